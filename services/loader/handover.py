"""Hands sealed memory files to executors of this host: tokens, and the unix socket where they are presented.

A token is good for one presentation while its lease lasts, whether or not it is granted. Whoever is refused, for any
reason, hears the same byte and reads the bytes by `ReadBlob` instead.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import stat
from collections.abc import Callable

import structlog

from services.shared.handover import (
    GRANTED,
    MAX_PATH_BYTES,
    REFUSED,
    REQUEST_BYTES,
    TOKEN_BYTES,
    decode_request,
    lease_key,
    peer_uid,
)

log = structlog.get_logger()

# A client that does not say its 68 bytes within this time is let go; so many are listened to at a time.
PATIENCE_S = 2.0
MAX_CLIENTS = 32
# After a failed accept (no descriptors left), before the next one.
PAUSE_S = 0.1


class Tokens:
    """The tokens that are out: one for a lease, kept as hashes."""

    def __init__(self) -> None:
        self._leases: dict[bytes, tuple[str, str]] = {}  # hash of the token: (lease id, holder)
        self._of_lease: dict[str, bytes] = {}

    def issue(self, lease_id: str, holder: str) -> bytes:
        """Returns a fresh token of a lease; an older one of it is worth nothing any more."""
        self.drop(lease_id)
        token = secrets.token_bytes(TOKEN_BYTES)
        key = hashlib.sha256(token).digest()
        self._leases[key] = (lease_id, holder)
        self._of_lease[lease_id] = key
        return token

    def redeem(self, token: bytes, of_lease: bytes) -> tuple[str, str] | None:
        """Uses a token up; returns (lease id, holder), None when it is unknown, used, or of another lease."""
        found = self._leases.pop(hashlib.sha256(token).digest(), None)
        if found is None:
            return None
        del self._of_lease[found[0]]
        return found if secrets.compare_digest(lease_key(found[0]), of_lease) else None

    def drop(self, lease_id: str) -> None:
        """Forgets the token of a lease that has ended."""
        key = self._of_lease.pop(lease_id, None)
        if key is not None:
            del self._leases[key]

    def __len__(self) -> int:
        return len(self._leases)


class HandoverSocket:
    """Serves a unix socket. `redeem(token, lease key)` returns a descriptor to give away and close, or None."""

    def __init__(self, path: str, redeem: Callable[[bytes, bytes], int | None], *, patience_s: float = PATIENCE_S):
        self._path = path
        self._redeem = redeem
        self._patience_s = patience_s
        self._room = asyncio.Semaphore(MAX_CLIENTS)
        self._clients: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None
        self._inode = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listens, for this user only.

        Raises:
            OSError: the path cannot be used, or another process listens there.
        """
        self._socket = _listen(self._path)
        self._inode = os.stat(self._path, follow_symlinks=False).st_ino
        self._task = asyncio.create_task(self._accept(self._socket))

    async def stop(self) -> None:
        """Stops listening, lets clients go and removes the path. Idempotent."""
        tasks = [*self._clients, *((self._task,) if self._task is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with contextlib.suppress(OSError):
                if os.stat(self._path, follow_symlinks=False).st_ino == self._inode:
                    os.unlink(self._path)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await self._room.acquire()
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                self._room.release()
                log.warning("no hand-over client could be taken", why=str(error))
                await asyncio.sleep(PAUSE_S)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                async with asyncio.timeout(self._patience_s):
                    await self._answer(connection)
        except (OSError, TimeoutError) as error:
            log.info("a hand-over client left", kind=type(error).__name__)
        finally:
            self._room.release()

    async def _answer(self, connection: socket.socket) -> None:
        uid = peer_uid(connection)
        if uid != os.getuid():
            log.warning("another user asked for host memory", uid=uid)
            return
        loop, data = asyncio.get_running_loop(), b""
        while len(data) < REQUEST_BYTES:
            piece = await loop.sock_recv(connection, REQUEST_BYTES - len(data))
            if not piece:
                return
            data += piece
        request = decode_request(data)
        fd = None if request is None else self._redeem(*request)
        if fd is None:
            log.warning("hand-over refused")
            await loop.sock_sendall(connection, REFUSED)
            return
        try:
            # One byte into an empty buffer: this never waits.
            socket.send_fds(connection, [GRANTED], [fd])
        finally:
            os.close(fd)


def _listen(path: str) -> socket.socket:
    """Binds, closes the door to other users, and only then listens. Raises OSError."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(f"the hand-over socket's path is longer than {MAX_PATH_BYTES} bytes")
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(MAX_CLIENTS)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Removes the socket of a process that is gone; anything else stays and is an error."""
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(f"{path} is there already and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(f"another process listens at {path}")
