"""A web server that does what its script says, over real TLS on loopback, and a world of names that leads to it.

Names resolve to public addresses and connections to these are led to the server, so that the transport under test is
the one of production: nothing in it is switched off.
"""

import contextlib
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from loraport.dev.pki import Pair, make_ca, make_leaf
from services.loader.fetch.download import Download
from services.loader.fetch.faults import FetchFault
from services.loader.fetch.http import Transport
from services.loader.fetch.limits import FetchLimits
from services.loader.fetch.sources import RemoteFile, Target

PUBLIC = "93.184.216.34"
DATA = bytes(range(256)) * 400  # 100 KiB
# Everywhere, for this machine may be slow as well; and where the slowness of a source is what a test is about.
PATIENT = FetchLimits(resolve_s=60, connect_s=60, tls_s=60, head_s=60, min_rate=100, window_s=60, resume_pause_s=0.01)
QUICK = replace(PATIENT, head_s=0.4, min_rate=20_000, window_s=0.3)
HOSTS = ("files.example", "other.example", "hub.example", "cdn.example", "evil.example", "s3.example")


@dataclass(frozen=True)
class Request:
    """One request as it came. Header names in lower case."""

    host: str
    path: str
    headers: dict[str, str]


class Wire:
    """What a script may do with a connection."""

    def __init__(self, wire: socket.socket, stopped: threading.Event) -> None:
        self._wire = wire
        self._stopped = stopped

    def send(self, data: bytes) -> None:
        self._wire.sendall(data)

    def head(self, status: int = 200, headers: dict[str, str] | None = None) -> None:
        lines = [f"HTTP/1.1 {status} x", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        self.send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def file(self, data: bytes, *, status: int = 200, **headers: str) -> None:
        stated = {name.replace("_", "-"): value for name, value in headers.items()}
        self.head(status, {"Content-Length": str(len(data)), **stated})
        self.send(data)

    def drip(self, data: bytes, pause_s: float) -> None:
        """Sends byte by byte until the other side has gone or the test ends."""
        for byte in data:
            self.send(bytes([byte]))
            if self._stopped.wait(pause_s):
                return


Script = Callable[[Request, Wire], None]


@dataclass
class World:
    """Names, the server behind them, and everything that was seen. Tests replace `script` and `names`."""

    authorities: ssl.SSLContext
    port: int
    script: Script = lambda request, wire: wire.file(b"hello", ETag='"1"')
    names: dict[str, list[list[str]]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    connected: list[tuple[str, int]] = field(default_factory=list)

    def resolve(self, host: str, port: int) -> Sequence[str]:
        """Gives the answers of a name in turn, the last one for ever."""
        self.resolved.append(host)
        answers = self.names.get(host, [[PUBLIC]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        self.connected.append((address, port))
        return socket.create_connection(("127.0.0.1", self.port), timeout_s)

    def transport(self, limits: FetchLimits = PATIENT) -> Transport:
        return Transport(limits=limits, resolve=self.resolve, connect=self.connect, authorities=self.authorities)

    def download(
        self,
        file: RemoteFile | None = None,
        *,
        max_bytes: int = 1 << 20,
        size_bytes: int | None = None,
        limits: FetchLimits = PATIENT,
        **more: object,
    ) -> Download:
        return Download(
            self.transport(limits),
            file or remote(),
            max_bytes=max_bytes,
            size_bytes=size_bytes,
            **more,
        )

    def fetch(self, file: RemoteFile | None = None, **options: object) -> bytes:
        """Fetches a file to its end."""
        download = self.download(file, **options)
        with contextlib.closing(download):
            return b"".join(iter(download.next_piece, b""))


def code(world: World, *arguments: object, **options: object) -> str:
    """Fetches and returns the code of the failure."""
    with pytest.raises(FetchFault) as caught:
        world.fetch(*arguments, **options)
    return caught.value.code


def remote(host: str = "files.example", path: str = "/a", **options: object) -> RemoteFile:
    """A file on a host, redirects allowed to the files and to the CDN."""
    options.setdefault("redirect_hosts", frozenset({"files.example", "cdn.example"}))
    return RemoteFile(target=Target(host, 443, path), **options)


@contextlib.contextmanager
def hostile_world() -> Iterator[World]:
    """Runs the server. It keeps no more than one thread per connection, and all end with it."""
    ca = make_ca("the world")
    leaf = make_leaf(ca, uri="spiffe://example/web", dns=HOSTS)
    context = _server_context(leaf)
    stopped = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    world = World(ssl.create_default_context(cadata=ca.certificate.decode()), listener.getsockname()[1])

    def serve(raw: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), raw:
            raw.settimeout(60)
            with context.wrap_socket(raw, server_side=True) as wire:
                request = _read_request(wire)
                if request is not None:
                    world.requests.append(request)
                    world.script(request, Wire(wire, stopped))

    def accept() -> None:
        threads = []
        while not stopped.is_set():
            with contextlib.suppress(TimeoutError):
                threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
                threads[-1].start()
        for thread in threads:
            thread.join()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield world
    finally:
        stopped.set()
        accepting.join()
        listener.close()


def _server_context(leaf: Pair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "leaf.pem")
        path.write_bytes(leaf.certificate + leaf.key)
        context.load_cert_chain(path)
    return context


def _read_request(wire: ssl.SSLSocket) -> Request | None:
    data = b""
    while b"\r\n\r\n" not in data and len(data) < 1 << 16:
        piece = wire.recv(4096)
        if not piece:
            return None
        data += piece
    first, *lines = data.split(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Request(headers.get("host", ""), first.split(" ")[1], headers)
