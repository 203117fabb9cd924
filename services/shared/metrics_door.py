"""The HTTP port at which a process shows its metrics: a few connections at a time, none of them silent for long.

Whoever reaches the port may keep others from the page; the process keeps its descriptors, threads and memory.
"""

import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

# Connections at a time; one more is closed at once. Prometheus needs one.
MAX_CONNECTIONS = 16
# A connection is closed when nothing comes, or nothing can be sent, for so long.
SILENCE_S = 10.0


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: scrapes are no news."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves the page, each connection in a thread of its own."""

    daemon_threads = True
    # Beyond the places, so that the one too many is closed rather than left without an answer.
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError when the address cannot be used."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(make_wsgi_app())

    def begin(self) -> None:
        """Serves from now on, in a thread that ends with the process."""
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread began
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a client that breaks off is no news either."""
