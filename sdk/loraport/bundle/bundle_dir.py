"""Reads a bundle from a directory, touching exactly two files and following no link.

Every file is opened beneath one directory descriptor, without following links and without blocking,
and is judged by its descriptor: a name that changes its meaning between a look and an open gains nothing.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loraport.bundle.base import BaseSpec
from loraport.bundle.manifest import CONFIG_NAME, WEIGHTS_NAME
from loraport.bundle.verdict import DEFAULT_LIMITS, Limits, Verdict, Violation
from loraport.bundle.verify import verify_bundle

MAX_LISTED_FILES = 200
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class BundleDirError(ValueError):
    """A path that is not a readable directory. One line says why."""


@dataclass(frozen=True, slots=True)
class BundleFiles:
    """What lies in a bundle's directory.

    `config` is the content of the config, or None. `weights` is an open file, or None; close it, or
    use the value as a context manager. `ignored` are the names of all else, sorted, at most 200.
    `violations` name files that are present and must not be read.
    """

    config: bytes | None
    weights: BinaryIO | None
    ignored: tuple[str, ...]
    violations: tuple[Violation, ...]

    def __enter__(self) -> "BundleFiles":
        return self

    def __exit__(self, *_: object) -> None:
        if self.weights is not None:
            self.weights.close()


def read_bundle_dir(path: str | Path, *, limits: Limits = DEFAULT_LIMITS) -> BundleFiles:
    """Opens the two files of a bundle.

    Raises:
        BundleDirError: `path` is not a directory or cannot be read.
    """
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BundleDirError(f"cannot read the directory {path}: {error.strerror}") from None
    try:
        names = sorted(os.listdir(directory))
        violations: list[Violation] = []
        config_file = _open(CONFIG_NAME, names, directory, violations)
        config = None
        if config_file is not None:
            with config_file:
                config = config_file.read(limits.max_config_bytes + 1)
        weights = _open(WEIGHTS_NAME, names, directory, violations)
    except OSError as error:
        raise BundleDirError(f"cannot read the directory {path}: {error.strerror}") from None
    finally:
        os.close(directory)
    ignored = [name for name in names if name not in (CONFIG_NAME, WEIGHTS_NAME)]
    return BundleFiles(config, weights, tuple(ignored[:MAX_LISTED_FILES]), tuple(violations))


def verify_dir(path: str | Path, *, base: BaseSpec, tenant: str, limits: Limits = DEFAULT_LIMITS) -> Verdict:
    """Verifies the bundle in a directory; see `verify_bundle`.

    Raises:
        BundleDirError: `path` is not a directory or cannot be read.
        ValueError: `tenant` is not a legal name.
    """
    with read_bundle_dir(path, limits=limits) as files:
        try:
            return verify_bundle(
                files.config,
                files.weights,
                base=base,
                tenant=tenant,
                limits=limits,
                other_files=files.ignored,
                file_violations=files.violations,
            )
        except OSError as error:
            raise BundleDirError(f"cannot read {path}: {error.strerror}") from None


def _open(name: str, names: list[str], directory: int, violations: list[Violation]) -> BinaryIO | None:
    """Opens a plain file of its own, or says why it must not be read. None also when there is no such name."""
    if name not in names:
        return None
    try:
        descriptor = os.open(name, _FLAGS, dir_fd=directory)
    except OSError as error:
        violations.append(Violation("BAD_FILE", f"{name} cannot be opened: {error.strerror}", name))
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        violations.append(Violation("BAD_FILE", f"{name} is not a plain file", name))
        return None
    if status.st_nlink != 1:
        # Whoever holds the other name changes the bytes between the verification and the upload.
        os.close(descriptor)
        violations.append(Violation("BAD_FILE", f"{name} has a second name (a hard link); put a copy here", name))
        return None
    return os.fdopen(descriptor, "rb")
