"""Trust roots on this side of the registry: what to believe of those that it shows, and drafts that several sign."""

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraport.bundle.canonical import StrictJsonError, load_strict
from loraport.bundle.envelope import Signer, add_signatures, sign_envelope, signed_by
from loraport.trust.root import PAYLOAD_TYPE, Role, RootError, TrustRoot, accept, open_first, parse_root

if TYPE_CHECKING:
    from loraport.admin import AdminClient

DRAFT_SCHEMA = "loraport.trust-draft.v1"
MAX_DRAFT = 1 << 20


@dataclass(frozen=True, slots=True)
class Believed:
    """A root of the chain, its envelope, and where the registry says it is in the log (None: not there)."""

    root: TrustRoot
    envelope: bytes
    log_index: int | None

    def row(self) -> dict[str, Any]:
        return {"version": self.root.version, "digest": self.root.digest, "log_index": self.log_index}


def believed(data: Path, folder: Path, *, offline: bool = False) -> list[Believed]:
    """Returns the chain from the directory's first root on, with the registry's newer ones unless `offline`.

    Raises:
        ValueError: the directory or the registry has no chain to follow; one line.
    """
    from loraport.admin import AdminClient
    from loraport.trust.files import read_chain

    if offline:
        return [Believed(root, envelope, None) for root, envelope in read_chain(folder)]
    with AdminClient.local(data) as admin:
        return follow(admin, folder)


def follow(admin: "AdminClient", folder: Path) -> list[Believed]:
    """Returns the chain from the directory's first root to the registry's newest. Raises ValueError, one line."""
    from loraport.trust.files import read_chain

    chain = [Believed(root, envelope, None) for root, envelope in read_chain(folder)]
    first = chain[0].root.version
    for shown in admin.list_trust_roots():
        place = shown.version - first
        if place < 0:
            continue
        try:
            if place >= len(chain):
                chain.append(Believed(accept(chain[-1].root, shown.envelope), shown.envelope, shown.log_index))
            elif open_first(shown.envelope).digest != chain[place].root.digest:
                raise RootError("FORK", f"{folder} holds another version {shown.version}")
            else:
                chain[place] = Believed(chain[place].root, shown.envelope, shown.log_index)
        except RootError as error:
            raise ValueError(f"ALARM: the registry shows a trust root that does not follow: {error}") from None
    return chain


def last_root(admin: "AdminClient", folder: Path) -> TrustRoot:
    """Returns the newest root of `follow`."""
    return follow(admin, folder)[-1].root


@dataclass(frozen=True, slots=True)
class Draft:
    """A root on its way: `envelope` is empty until somebody has signed."""

    root: TrustRoot
    envelope: bytes

    def sign(self, signers: Sequence[Signer]) -> "Draft":
        """Returns the draft with these signatures as well."""
        if not signers:
            return self
        if self.envelope:
            return Draft(self.root, add_signatures(self.envelope, signers))
        return Draft(self.root, sign_envelope(PAYLOAD_TYPE, self.root.body(), signers))

    def missing(self, old: TrustRoot) -> list[str]:
        """Returns whose signatures are missing, a line for each threshold. Only accepting decides."""
        have = set(signed_by(self.envelope)) if self.envelope else set()
        lines = []
        for root in (old, self.root):
            of_root = root.roles[Role.ROOT]
            short = of_root.threshold - len(have & set(of_root.key_ids))
            if short > 0:
                others = ", ".join(sorted(set(of_root.key_ids) - have))
                lines.append(f"{short} of the root keys of version {root.version}: {others}")
        return lines

    def require(self, old: TrustRoot) -> None:
        """Raises ValueError (one line) unless the draft may follow `old` as it is."""
        if missing := self.missing(old):
            raise ValueError(f"signatures are missing: {'; '.join(missing)}; collect them with --draft FILE")
        accept(old, self.envelope)


def read_draft(path: Path) -> Draft:
    """Reads a draft. Raises ValueError (one line) or OSError."""
    try:
        value = load_strict(path.read_bytes(), max_bytes=MAX_DRAFT, max_depth=1)
        if not isinstance(value, dict) or value.get("schema") != DRAFT_SCHEMA:
            raise ValueError(f"{path} is no draft of a trust root; make one with: loraport trust rotate --draft FILE")
        root = parse_root(base64.b64decode(value["root"], validate=True))
        draft = Draft(root, base64.b64decode(value["envelope"], validate=True))
        if draft.envelope and open_payload(draft.envelope) != root.body():
            raise ValueError(f"{path}: what was signed is not what the draft shows")
    except (StrictJsonError, KeyError, TypeError, binascii.Error):
        raise ValueError(
            f"{path} is no draft of a trust root; make one with: loraport trust rotate --draft FILE"
        ) from None
    return draft


def open_payload(envelope: bytes) -> bytes:
    """Returns what an envelope of a root holds, unverified."""
    from loraport.bundle.envelope import claimed_payload

    return claimed_payload(envelope, payload_type=PAYLOAD_TYPE)


def write_draft(path: Path, draft: Draft) -> None:
    """Writes a draft. Raises OSError."""
    parts = {"root": draft.root.body(), "envelope": draft.envelope}
    value = {"schema": DRAFT_SCHEMA} | {name: base64.b64encode(part).decode() for name, part in parts.items()}
    path.write_text(json.dumps(value, indent=1) + "\n")
