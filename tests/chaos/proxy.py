"""A proxy in front of the object store that can be told to misbehave, on the loopback."""

import contextlib
import socket
import threading
import time
from typing import Literal

Mode = Literal["pass", "refuse", "reset", "truncate", "slow", "error"]
ERROR = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
# Bytes of an answer that `truncate` lets through, and the pause of `slow` before every piece.
TRUNCATED, PAUSE_S = 700, 0.2


class Proxy:
    """Forwards connections to `target` in its `mode`; what is open is served in the mode of its beginning."""

    def __init__(self, target: int) -> None:
        self.mode: Mode = "pass"
        self.connections = 0
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(client, self.mode), daemon=True).start()

    def _serve(self, client: socket.socket, mode: Mode) -> None:
        with client, contextlib.suppress(OSError):
            if mode == "refuse":
                return
            if mode == "error":
                client.recv(65536)
                client.sendall(ERROR)
                return
            if mode == "reset":
                client.recv(1)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                return
            with socket.create_connection(("127.0.0.1", self._target), 5) as server:
                upward = threading.Thread(target=pump, args=(client, server), daemon=True)
                upward.start()
                pump(
                    server,
                    client,
                    limit=TRUNCATED if mode == "truncate" else 0,
                    pause_s=PAUSE_S if mode == "slow" else 0.0,
                )


def pump(source: socket.socket, sink: socket.socket, *, limit: int = 0, pause_s: float = 0.0) -> None:
    """Copies until an end closes, or `limit` bytes (0: none) have gone through; then closes both."""
    left = limit or 1 << 62
    with contextlib.suppress(OSError):
        while left and (data := source.recv(min(65536, left))):
            time.sleep(pause_s)
            sink.sendall(data)
            left -= len(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
