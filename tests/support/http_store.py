"""A web server in the place of an object store, which answers whatever a test tells it to."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from services.loader.answers import Bounds
from services.loader.store import S3Store
from tests.loader_rig import ACCESS, SECRET


@contextmanager
def http_server(
    answer: Callable[[BaseHTTPRequestHandler], None], bounds: Bounds | None = None
) -> Iterator[tuple[S3Store, list[str]]]:
    """A store that answers everything the same way, and the paths it was asked for."""
    with answering(answer) as (address, seen):
        keys = (ACCESS, SECRET)
        yield (
            S3Store(
                address, keys, quarantine_bucket="quarantine", verified_bucket="verified", bounds=bounds or Bounds()
            ),
            seen,
        )


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything the same way: its address, and the paths it was asked for."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            seen.append(f"{self.command} {self.path}")
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            answer(self)

        do_GET = do_PUT = do_HEAD = do_DELETE = handle_any

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as address:
        yield address, seen


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serves HTTP on loopback until the block ends, and gives the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def respond(handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    """Answers, whole; `Content_Length` and its kin are headers."""
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
