"""Ports of the loopback that nobody listens on, and that nobody is given by chance.

A port that the kernel chose, and that is free again, is soon chosen once more: for a connection, or for whoever listens
on port 0 in another test. A process that is to listen there later, or again, would find it taken. So these lie below
the range that the kernel chooses from, and apart from those of whole stacks (tests/e2e/harness.py).
"""

import contextlib
import random
import socket

PORTS = range(10_000, 20_000)


def free_ports(count: int) -> list[int]:
    """Returns ports that differ and were free a moment ago."""
    chooser, ports = random.SystemRandom(), list[int]()
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            port, probe = chooser.choice(PORTS), held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
    return ports


def free_port() -> int:
    """Returns one port that was free a moment ago."""
    return free_ports(1)[0]
