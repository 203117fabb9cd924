"""Takes an upload's bytes in, and not one more than its session announced.

The config stays in memory, the weights go into an unlinked file. Nothing is believed or looked at yet.
"""

import asyncio
import contextlib
import errno
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

from loraport.bundle.digest import is_digest
from loraport.bundle.envelope import MAX_ENVELOPE_BYTES
from services.loader.lane import Lane
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.futures import fault_of
from services.shared.names import is_id
from services.shared.statements import StatementError, TrustedKeys, UploadSession, open_session

MAX_CHUNK_BYTES = 256 << 10
MAX_CONFIG_BYTES = 64 << 10
# An upload holds one of few places while it is received. Trickling bytes must not keep it: a fixed time for the
# little ones, and this rate for the rest, in all and, of a client, all the while.
PATIENCE_S = 10.0
MIN_BYTES_PER_S = 256 << 10


@dataclass(frozen=True, slots=True)
class SessionPart:
    """The first part of an upload: the registry's signed session."""

    envelope: bytes


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Some bytes of one of the two files."""

    file: Literal["config", "weights"]
    data: bytes


Part = SessionPart | ChunkPart


@dataclass(slots=True)
class Received:
    """All bytes of an upload. `weights` is an unlinked file; the holder closes it."""

    config: bytes
    weights: BinaryIO


async def first_envelope(parts: AsyncIterator[Part]) -> bytes:
    """Returns the session's envelope, with which an upload begins. Raises LoraportError (INVALID_REQUEST)."""
    first = await anext(parts, None)
    if not isinstance(first, SessionPart):
        raise LoraportError("INVALID_REQUEST", "the first message of an upload must be its session", subject="session")
    return first.envelope


async def read_session(
    envelope: bytes, trusted: TrustedKeys, lane: Lane, *, now: float, max_weights_bytes: int
) -> UploadSession:
    """Returns the session of an envelope. Anybody may send one, so `lane` is not for what others wait for.

    Raises:
        LoraportError: INVALID_SESSION, or UPLOAD_TOO_LARGE when it announces too much.
    """
    if len(envelope) > MAX_ENVELOPE_BYTES:  # none that long waits for the thread
        raise LoraportError("INVALID_SESSION", f"the upload session has {len(envelope)} bytes")
    try:
        session = await lane.run(_open, envelope, trusted, now)
    except StatementError as error:
        raise LoraportError("INVALID_SESSION", f"the upload session is not valid: {error}") from None
    legal = is_id(session.tenant) and is_id(session.base_model) and session.weights_size >= 1
    if not legal or not all(map(is_digest, (session.revision_id, session.weights_digest, session.config_digest))):
        raise LoraportError("INVALID_SESSION", "the upload session holds an illegal name, digest or size")
    if session.weights_size > max_weights_bytes:
        raise LoraportError(
            "UPLOAD_TOO_LARGE", f"{session.weights_size} bytes of weights, the limit is {max_weights_bytes}"
        )
    return session


def _open(envelope: bytes, trusted: TrustedKeys, now: float) -> UploadSession:
    return open_session(envelope, trusted, now=now)


async def paced(parts: AsyncGenerator[Part, None], clock: Clock) -> AsyncGenerator[Part, None]:
    """Yields a client's parts while they come fast enough. Only the time spent waiting for them counts: what the loader
    does meanwhile is not the client's.

    Raises:
        LoraportError: DEADLINE_EXCEEDED.
    """
    waited, came = 0.0, 0
    async with contextlib.aclosing(parts):
        while True:
            asked, left = clock.monotonic(), PATIENCE_S + came / MIN_BYTES_PER_S - waited
            try:
                async with asyncio.timeout(left):
                    part = await anext(parts, None)
            except TimeoutError:
                raise _too_slow(came, waited + left) from None
            if part is None:
                return
            waited += clock.monotonic() - asked
            came += len(part.data) if isinstance(part, ChunkPart) else 0
            if came < (waited - PATIENCE_S) * MIN_BYTES_PER_S:
                raise _too_slow(came, waited)
            yield part


def _too_slow(came: int, waited_s: float) -> LoraportError:
    detail = f"the upload brought {came} bytes in {waited_s:.0f} s, the least is {MIN_BYTES_PER_S} a second"
    return LoraportError("DEADLINE_EXCEEDED", detail)


async def receive(
    parts: AsyncGenerator[Part, None],
    lane: Lane,
    *,
    weights_size: int,
    spool_dir: str | None,
    patience_s: float,
) -> Received:
    """Takes the files in to the end, writing in threads of `lane`. However that ends, `parts` are closed then.

    Raises:
        LoraportError: UPLOAD_TOO_LARGE at the first byte too many, INVALID_REQUEST when parts are out of order or
            bytes are missing at the end, STORAGE_FULL when the spool has no room, DEADLINE_EXCEEDED when the bytes
            come too slowly.
    """
    # Where it ends in the middle of a write, nothing else would tell the sender's side that nobody reads any more.
    async with contextlib.aclosing(parts):
        spool = _Spool(await lane.run(open_spool, spool_dir), lane)
        longest = patience_s + weights_size / MIN_BYTES_PER_S
        try:
            async with asyncio.timeout(longest):
                config = await _take(parts, spool, weights_size)
        except TimeoutError:
            spool.close()
            detail = f"the upload took more than {longest:.0f} s for {weights_size} bytes of weights"
            raise LoraportError("DEADLINE_EXCEEDED", detail) from None
        except BaseException:
            spool.close()
            raise
        return Received(config, spool.file)


class _Spool:
    """The file that the weights go into, a chunk at a time."""

    def __init__(self, file: BinaryIO, lane: Lane) -> None:
        self.file = file
        self._lane = lane
        self._writing: asyncio.Future[None] | None = None

    async def append(self, data: bytes) -> None:
        """Appends a chunk. Raises as `append`."""
        self._writing = self._lane.run(append, self.file, data)
        await asyncio.shield(self._writing)

    def close(self) -> None:
        """Closes the file once nobody writes to it: until then its number must not be another file's."""
        if self._writing is None or self._writing.done():
            self.file.close()
        else:
            self._writing.add_done_callback(self._written)

    def _written(self, done: asyncio.Future[None]) -> None:
        self.file.close()
        fault_of(done)  # whoever waited for it has it, or has left


async def _take(parts: AsyncIterator[Part], spool: _Spool, weights_size: int) -> bytes:
    """Spools the weights and returns the config. Raises as `receive`."""
    config = bytearray()
    taken = 0
    async for part in parts:
        if isinstance(part, SessionPart):
            raise LoraportError("INVALID_REQUEST", "only the first message may be a session", subject="session")
        if not 1 <= len(part.data) <= MAX_CHUNK_BYTES:
            raise LoraportError("INVALID_REQUEST", "a chunk has 1 byte to 256 KiB", subject="chunk.data")
        if part.file == "config":
            if taken:
                raise LoraportError("INVALID_REQUEST", "the config comes before the weights", subject="chunk.file")
            if len(config) + len(part.data) > MAX_CONFIG_BYTES:
                raise LoraportError("UPLOAD_TOO_LARGE", f"the config is larger than {MAX_CONFIG_BYTES} bytes")
            config += part.data
        else:
            taken += len(part.data)
            if taken > weights_size:
                detail = f"more weights came than the {weights_size} bytes announced"
                raise LoraportError("UPLOAD_TOO_LARGE", detail)
            await spool.append(part.data)
    if not config or taken != weights_size:
        came = f"{len(config)} bytes of config and {taken} of {weights_size} bytes of weights came"
        raise LoraportError("INVALID_REQUEST", f"the upload is not complete: {came}; upload again")
    return bytes(config)


def open_spool(spool_dir: str | None) -> BinaryIO:
    """Opens an unlinked file that is gone when it is closed or the process ends."""
    try:
        # Unbuffered: what a write could not store, a later close must not stumble over.
        return tempfile.TemporaryFile(dir=spool_dir, prefix="loraport-", buffering=0)  # type: ignore[return-value]
    except OSError as error:
        raise _full(error) from None


def append(file: BinaryIO, data: bytes) -> None:
    """Appends to a spool. Raises LoraportError (STORAGE_FULL, INTERNAL)."""
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        raise _full(error) from None


def _full(error: OSError) -> LoraportError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return LoraportError("STORAGE_FULL", "the loader's spool has no room left; nothing was kept")
    return LoraportError("INTERNAL", "the loader's spool cannot be written")
