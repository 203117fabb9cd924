"""The port for metrics: it shows the page, and whoever holds connections to it takes nothing else."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from services.shared import metrics_door
from services.shared.metrics_door import MetricsServer

# Long beyond what a slow machine needs; nothing here waits for it unless it fails.
LONG_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0)
    server.begin()
    yield server
    server.shutdown()
    server.server_close()


def connected(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=LONG_S)


def page(server: MetricsServer) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LONG_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read()


def test_one_connection_too_many_is_closed_and_places_come_back(server: MetricsServer) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as open_ones:
        for _ in range(metrics_door.MAX_CONNECTIONS):
            open_ones.enter_context(connected(server))
        # Connections are taken in their order: by the time this one is looked at, all places are taken.
        with connected(server) as late:
            assert late.recv(1) == b""
        assert threading.active_count() <= before + metrics_door.MAX_CONNECTIONS
    while True:  # the threads have still to see that their clients left
        with contextlib.suppress(http.client.HTTPException, OSError):
            assert b"python_info" in page(server)
            break


def test_a_connection_that_says_nothing_is_closed(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_door._Handler, "timeout", 0.05)
    with connected(server) as silent:
        assert silent.recv(1) == b""
