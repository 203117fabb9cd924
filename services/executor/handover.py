"""Takes the loader's sealed memory over on one host: the same pages, mapped read-only, nothing copied.

Before a byte is looked at, the kernel has said that the other end is of our user, that the file can never change
(all four seals) and that it has the signed size. Whether these are the signed bytes, intake says: it hashes them where
they lie, and they cannot change between its look and their use.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import stat

from services.shared.handover import GRANTED, encode_request, missing_seals, peer_uid

# For each step of the talk; the loader answers from memory.
PATIENCE_S = 2.0


class HandoverFailed(Exception):
    """Nothing was handed over. `suspicious` when something was, and it was not what a loader hands over."""

    def __init__(self, why: str, *, suspicious: bool = False) -> None:
        super().__init__(why)
        self.suspicious = suspicious


def take_over(path: str, token: bytes, lease_id: str, *, size_bytes: int, patience_s: float = PATIENCE_S) -> memoryview:
    """Return a lease's bytes as a read-only view of the loader's memory. It lives as long as a view of it does.

    Blocking.

    Raises:
        HandoverFailed: no loader of our user answers there, it refuses, or what came is not sealed or of another size.
    """
    if not os.path.isabs(path):  # nor an abstract name, which has no owner
        raise HandoverFailed("the socket's path is not absolute", suspicious=True)
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(patience_s)
            connection.connect(path)
            if peer_uid(connection) != os.getuid():
                raise HandoverFailed("another user listens there", suspicious=True)
            connection.sendall(encode_request(token, lease_id))
            answer, fds, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if answer != GRANTED:
            raise HandoverFailed("the loader refused" if answer else "the loader hung up")
        if len(fds) != 1:
            raise HandoverFailed("a grant without a file", suspicious=True)
        return _map(fds[0], size_bytes)
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: no such sockets on this platform
        raise HandoverFailed(f"{type(error).__name__}: {error}") from None
    finally:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def _map(fd: int, size_bytes: int) -> memoryview:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
        raise HandoverFailed(f"a file of {status.st_size} bytes, {size_bytes} are signed", suspicious=True)
    missing = missing_seals(fd)
    if missing:
        raise HandoverFailed(f"a file that can still change: no {', '.join(missing)}", suspicious=True)
    return memoryview(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
