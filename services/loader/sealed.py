"""Bytes in memory that nobody can change any more.

A `Blob` is filled once, checked where it lies, and sealed: an anonymous memory file whose size and content the kernel
then refuses to change, for us as well. Where the kernel has no such files, an unlinked file takes its place and
`seal` says why; nobody else can open it, but nothing stops this process from writing to it.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator

from loraport.bundle.digest import PREFIX
from services.shared.handover import missing_seals

CHUNK_BYTES = 1 << 20


class Blob:
    """A memory file, writable until it is sealed.

    One thread may write while one other hashes what is written already; all else is not thread-safe.
    """

    def __init__(self, name: str) -> None:
        """Opens an empty one; `name` shows up in the kernel's lists only. Raises OSError."""
        self.size_bytes = 0
        self.unsealed_because = ""
        self._hash = hashlib.sha256()
        self._hashed = 0
        try:
            self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError) as error:
            self.unsealed_because = f"no memory files here ({error})"
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())

    def write(self, data: bytes) -> None:
        """Appends `data`. Raises OSError."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, self.size_bytes)
            self.size_bytes += written
            view = view[written:]

    def hash_to(self, end: int) -> None:
        """Hashes what is written before `end` and not hashed yet, read back from where it lies. Raises OSError.

        `digest` leaves nothing out, whoever called this and however it went: it only does work early, while the next
        bytes are on their way.
        """
        for piece in _pieces(self._fd, self._hashed, end):
            self._hash.update(piece)
            self._hashed += len(piece)

    def digest(self) -> str:
        """Returns the digest of the bytes as they lie in memory; nothing else was written there. Raises OSError."""
        self.hash_to(self.size_bytes)
        return PREFIX + self._hash.hexdigest()

    def seal(self) -> None:
        """Makes size and content final. Idempotent; `unsealed_because` says when and why it could not be done."""
        if self.unsealed_because:
            return
        try:
            missing = missing_seals(self._fd)
            if missing:
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in missing))
        except (AttributeError, OSError) as error:
            self.unsealed_because = f"the kernel refused to seal ({error})"

    def open_reader(self) -> "Reader":
        """Returns a reader with a descriptor of its own, which outlives this blob's. Raises OSError."""
        return Reader(os.dup(self._fd), self.size_bytes)

    def open_handover(self) -> int | None:
        """Returns a descriptor to give to another process; None when somebody could write to it. Raises OSError."""
        return None if missing_seals(self._fd) else os.dup(self._fd)

    def close(self) -> None:
        """Gives the memory back once the last reader is closed too. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Reader:
    """Reads a blob's bytes from front to back."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fd = fd
        self._pieces = _pieces(fd, 0, size_bytes)

    def next_piece(self) -> bytes:
        """Returns the next 1 .. CHUNK_BYTES bytes, empty at the end. Raises OSError."""
        return next(self._pieces, b"")

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def _pieces(fd: int, offset: int, end: int) -> Iterator[bytes]:
    while offset < end:
        piece = os.pread(fd, min(CHUNK_BYTES, end - offset), offset)
        if not piece:
            raise OSError("a sealed file became shorter")
        offset += len(piece)
        yield piece
