"""Ports of the loopback that nobody listens on."""

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Returns ports that differ and were free a moment ago."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in sockets]


def free_port() -> int:
    """Returns one port that was free a moment ago."""
    return free_ports(1)[0]
