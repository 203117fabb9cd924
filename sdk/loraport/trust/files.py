"""A directory of trust roots: `N.root.json` is the signed envelope of version N, without gaps.

The lowest is trusted because it is there: whoever runs a service or audits a log has put it there by hand, by an image
or by a configuration system. Every other one must follow the one before.
"""

import re
from pathlib import Path

from loraport.trust.root import RootError, TrustRoot, accept, open_first
from loraport.whole_file import replace_file

_NAME = re.compile(r"([1-9][0-9]{0,8})\.root\.json")
MAX_FILES = 1024


class TrustFileError(ValueError):
    """A directory that holds no usable chain of roots; one line that says what to do."""


def read_chain(directory: str | Path) -> list[tuple[TrustRoot, bytes]]:
    """Returns the roots of a directory with their envelopes, oldest first.

    Raises:
        TrustFileError: there is none, one is missing between two, or one does not follow the one before.
        OSError: a file cannot be read.
    """
    found = {
        int(match[1]): path for path in Path(directory).glob("*.root.json") if (match := _NAME.fullmatch(path.name))
    }
    if not found:
        raise TrustFileError(f"{directory} holds no trust root; make one with: loraport trust init")
    if len(found) > MAX_FILES:
        raise TrustFileError(f"{directory} holds more than {MAX_FILES} trust roots")
    chain: list[tuple[TrustRoot, bytes]] = []
    for version in range(min(found), max(found) + 1):
        if version not in found:
            raise TrustFileError(f"{directory} lacks {version}.root.json between others")
        envelope = found[version].read_bytes()
        try:
            root = accept(chain[-1][0], envelope) if chain else open_first(envelope)
        except RootError as error:
            raise TrustFileError(f"{found[version]} is no trust root to follow: {error}") from None
        if root.version != version:
            raise TrustFileError(f"{found[version]} holds version {root.version}")
        chain.append((root, envelope))
    return chain


def write_root(directory: str | Path, root: TrustRoot, envelope: bytes) -> Path:
    """Adds a root to a directory, whole or not at all, and returns its path. Raises OSError."""
    path = Path(directory) / f"{root.version}.root.json"
    replace_file(path, [envelope], mode=0o644)
    return path
