"""How a sealed memory file changes hands between two processes of one user on one host.

    holder → loader   MAGIC, the token (32 bytes), SHA-256 of the lease id (32 bytes)
    loader → holder   GRANTED with one descriptor (SCM_RIGHTS), or REFUSED without; then the connection ends

Both ends look at the kernel's word for who the other is (`peer_uid`). The token comes over mTLS, so the socket adds no
identity of its own: it only moves what a lease allows already.
"""

import fcntl
import hashlib
import socket
import struct

MAGIC = b"LPH1"
TOKEN_BYTES = 32
REQUEST_BYTES = len(MAGIC) + TOKEN_BYTES + hashlib.sha256().digest_size
GRANTED, REFUSED = b"\x01", b"\x00"
# `sockaddr_un` has 108 bytes, the last one is zero.
MAX_PATH_BYTES = 107

SEALS = ("F_SEAL_WRITE", "F_SEAL_GROW", "F_SEAL_SHRINK", "F_SEAL_SEAL")


def lease_key(lease_id: str) -> bytes:
    """Returns the 32 bytes that stand for a lease id."""
    return hashlib.sha256(lease_id.encode()).digest()


def encode_request(token: bytes, lease_id: str) -> bytes:
    """Returns the whole request of a holder. Raises ValueError when the token is not one."""
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"a hand-over token has {TOKEN_BYTES} bytes")
    return MAGIC + token + lease_key(lease_id)


def decode_request(data: bytes) -> tuple[bytes, bytes] | None:
    """Returns (token, lease key), None when it is not a request."""
    if len(data) != REQUEST_BYTES or not data.startswith(MAGIC):
        return None
    return data[len(MAGIC) : len(MAGIC) + TOKEN_BYTES], data[len(MAGIC) + TOKEN_BYTES :]


def peer_uid(connection: socket.socket) -> int:
    """Returns the user at the other end of a unix socket, from the kernel. Raises OSError where it does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise OSError("the kernel does not name the peers of unix sockets")
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def missing_seals(fd: int) -> tuple[str, ...]:
    """Returns the names of the seals that a descriptor lacks; all of them when it can have none."""
    try:
        found = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except (AttributeError, OSError):
        return SEALS
    return tuple(name for name in SEALS if not found & getattr(fcntl, name))
