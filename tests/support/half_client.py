"""An HTTP/2 client that says each frame by itself, so that it can leave out what every library does: send, read, end."""

import asyncio
import contextlib
import struct
from collections import Counter
from collections.abc import AsyncIterator, Mapping

DATA, HEADERS, RESET, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
# One bit is both: the end of a stream, and what answers settings and pings.
END = ACK = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4
# What a message is preceded by in gRPC.
PREFIX_BYTES = 5


class HalfClient:
    """One connection without TLS; calls are known by their streams' numbers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int) -> None:
        self._reader = reader
        self._writer = writer
        self._next = 1
        # What has come: streams with headers, those that have ended, and bytes of each.
        self.answered: set[int] = set()
        self.ended: set[int] = set()
        self.received = Counter[int]()
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window))
        self._listening = asyncio.create_task(self._listen())

    def begin(self, method: str, metadata: Mapping[str, str] | None = None) -> int:
        """Opens a call with its headers and nothing else. Returns its stream."""
        stream, self._next = self._next, self._next + 2
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "half",
            "content-type": "application/grpc",
            "te": "trailers",
            **(metadata or {}),
        }
        self._send(HEADERS, END_HEADERS, stream, b"".join(_literal(key, value) for key, value in fields.items()))
        return stream

    def say(self, stream: int, message: bytes) -> None:
        """Sends a call's only message, and that no other follows."""
        self._send(DATA, END, stream, struct.pack(">BI", 0, len(message)) + message)

    def ask(self, method: str, metadata: Mapping[str, str] | None = None, message: bytes = b"") -> int:
        """Makes a whole call, of which the answer is another matter. Returns its stream."""
        stream = self.begin(method, metadata)
        self.say(stream, message)
        return stream

    def take(self, stream: int, octets: int) -> None:
        """Lets so many bytes more of an answer come."""
        self._send(WINDOW_UPDATE, 0, stream, struct.pack(">I", octets))

    def reset(self, stream: int) -> None:
        """Leaves a call; the connection stays."""
        self._send(RESET, 0, stream, struct.pack(">I", 8))

    def close(self) -> None:
        """Vanishes."""
        self._listening.cancel()
        self._writer.close()

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        head = struct.pack(">I", len(payload))[1:] + bytes((kind, flags))
        self._writer.write(head + struct.pack(">I", stream) + payload)

    async def _listen(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
                self._hear(head[3], head[4], int.from_bytes(head[5:]), payload)

    def _hear(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in (SETTINGS, PING) and not flags & ACK:
            # Who does not answer these is soon gone, which is another story.
            self._send(kind, ACK, 0, payload if kind == PING else b"")
        if kind == HEADERS:
            self.answered.add(stream)
        if kind == DATA:
            self.received[stream] += len(payload)
        if kind == RESET or (kind in (HEADERS, DATA) and flags & END):
            self.ended.add(stream)


@contextlib.asynccontextmanager
async def half_client(port: int, *, window: int = 0) -> AsyncIterator[HalfClient]:
    """Connects; of each answer `window` bytes are read, and after them what is taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = HalfClient(reader, writer, window)
    try:
        yield client
    finally:
        client.close()


def _literal(key: str, value: str) -> bytes:
    """A field of HPACK by its text, which needs no table: shorter than 127 bytes each."""
    assert max(len(key), len(value)) < 127
    return b"\x00" + bytes((len(key),)) + key.encode() + bytes((len(value),)) + value.encode()
