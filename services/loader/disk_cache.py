"""Verified weights on the node's disk, between store and memory. Blocking; safe to use from several threads.

    <root>/sha256/<2 hex>/<62 hex>     whole files only: written under <root>/tmp, then renamed
    <root>/tmp/                        what a crash leaves here, the next start deletes

The files are a hint and never trusted: whoever reads hashes, and reports what was wrong (`spoil`). Everything here may
be deleted at any moment by anybody. A disk that fails costs a read from the store, never a load. Nothing is flushed to
the platter: a file that a power cut spoils is found by its digest.
"""

import contextlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import structlog

from loraport.bundle.digest import PREFIX, parse_digest
from services.loader.disk_tier import DiskTier

log = structlog.get_logger()

_TWO, _REST = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{62}")
# A pipe or a link in the place of a file must neither be waited for nor followed.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskCache:
    """The files under one directory, which belongs to one loader."""

    def __init__(self, root: str | Path, budget_bytes: int) -> None:
        self._root = Path(root)
        self._tier = DiskTier(budget_bytes)
        self._lock = threading.Lock()
        self._writing: dict[str, bool] = {}  # digest: whether the file is still wanted
        self.spoiled_count = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, as far as known."""
        return self._tier.used_bytes

    def open(self) -> None:
        """Makes the directory, deletes what was half-written, and adopts what lies there.

        Raises:
            OSError: the directory cannot be used.
        """
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._folder("tmp", make=True) as folder:
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
        with self._lock:
            leaving = self._tier.adopt(self._scan())
        for digest in leaving:
            self._delete(digest)
        log.info("disk tier opened", files=len(self._tier.digests()), used_bytes=self._tier.used_bytes)

    def open_file(self, digest: str, size_bytes: int, *, tenants: Collection[str]) -> BinaryIO | None:
        """Returns a file of exactly this size, for tenants, to read, hash and close; None when there is none."""
        two, rest = _names(digest)
        with self._lock:
            if digest in self._writing or not self._tier.use(digest, tenants=tenants):
                return None
        try:
            with self._folder("sha256", two) as folder:
                fd = os.open(rest, _READ, dir_fd=folder)
                with contextlib.suppress(OSError):  # the order after a restart is a nicety
                    os.utime(rest, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            self.forget(digest)
            return None
        except OSError as error:
            self.spoil(digest, f"cannot be opened ({error.strerror})")
            return None
        try:
            status = os.fstat(fd)
            good = stat.S_ISREG(status.st_mode) and status.st_size == size_bytes
            if good:
                return os.fdopen(fd, "rb", buffering=0)  # type: ignore[return-value]
            os.close(fd)
        except OSError as error:
            os.close(fd)
            self.spoil(digest, f"cannot be read ({error.strerror})")
            return None
        self.spoil(digest, "is of another kind or size")
        return None

    def put(self, digest: str, size_bytes: int, pieces: Iterator[bytes], *, tenants: Collection[str]) -> bool:
        """Keeps verified bytes for tenants, unless they are there; returns whether they were written. Failing is not an
        error."""
        with self._lock:
            leaving = self._tier.admit(digest, size_bytes, tenants=tenants)
            if leaving is None:
                return False
            self._writing[digest] = True
        whole = False
        try:
            for old in leaving:
                self._delete(old)
            whole = self._write(digest, size_bytes, pieces)
        except OSError as error:
            log.warning("disk tier could not keep a file", why=str(error))
        finally:
            with self._lock:
                keep = self._writing.pop(digest) and whole
            if not keep:
                self.forget(digest)
        return keep

    def spoil(self, digest: str, why: str) -> None:
        """Deletes and counts a file whose bytes are not what they must be."""
        self.spoiled_count += 1
        log.error("a file on the node's disk was spoiled", digest=digest, why=why, count=self.spoiled_count)
        self.forget(digest)

    def forget(self, digest: str) -> None:
        """Deletes a file. Idempotent."""
        with self._lock:
            if digest in self._writing:
                self._writing[digest] = False  # who writes it deletes it
                return
            self._tier.forget(digest)
        self._delete(digest)

    def _write(self, digest: str, size_bytes: int, pieces: Iterator[bytes]) -> bool:
        """Writes beside, then renames: a reader sees the whole file or none."""
        two, rest = _names(digest)
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._folder("tmp", make=True) as beside, self._folder("sha256", two, make=True) as folder:
            name = f"{rest[:16]}.{secrets.token_hex(8)}"
            fd = os.open(name, _NEW, 0o600, dir_fd=beside)
            try:
                try:
                    written = _write_all(fd, pieces)
                finally:
                    os.close(fd)
                if written != size_bytes:
                    return False
                os.replace(name, rest, src_dir_fd=beside, dst_dir_fd=folder)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=beside)
        return True

    def _delete(self, digest: str) -> None:
        two, rest = _names(digest)
        try:
            with self._folder("sha256", two) as folder:
                os.unlink(rest, dir_fd=folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("disk tier could not delete a file", why=str(error))

    @contextlib.contextmanager
    def _folder(self, *names: str, make: bool = False) -> Iterator[int]:
        """Opens a folder below the root, step by step, following no link."""
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=fd)
                inner = os.open(name, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def _scan(self) -> list[tuple[str, int]]:
        """Returns (digest, size) of the files that lie there, by the time of their last use."""
        found = []
        with self._folder("sha256", make=True) as top:
            for two in filter(_TWO.fullmatch, os.listdir(top)):
                with contextlib.suppress(OSError), self._folder("sha256", two) as folder:
                    for rest in filter(_REST.fullmatch, os.listdir(folder)):
                        with contextlib.suppress(OSError):
                            status = os.stat(rest, dir_fd=folder, follow_symlinks=False)
                            if stat.S_ISREG(status.st_mode):
                                found.append((status.st_mtime_ns, PREFIX + two + rest, status.st_size))
        return [(digest, size) for _, digest, size in sorted(found)]


def _names(digest: str) -> tuple[str, str]:
    digits = parse_digest(digest)
    return digits[:2], digits[2:]


def _write_all(fd: int, pieces: Iterator[bytes]) -> int:
    written = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:
            count = os.write(fd, view)
            written += count
            view = view[count:]
    return written
