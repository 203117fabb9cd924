"""A host outside: a network namespace of the test's own that answers one port and knows no way back but to this machine.

A packet that comes with this machine's address (masqueraded: the sender has a way out) is answered; one that comes with
a container's own address is not, as on any real network.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

NAME = "loraport-out"
HERE, THERE, PORT = "198.18.251.1", "198.18.251.2", 8443
OUTSIDE = f"{THERE}:{PORT}"
SERVE = (
    "import socket; s=socket.create_server(('0.0.0.0', {port})); print('up', flush=True)\n"
    "while True: s.accept()[0].close()"
)


@contextlib.contextmanager
def outside_host() -> Iterator[bool]:
    """Gives whether there is such a host, for the length of the block."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield False
        return
    steps = (
        f"netns add {NAME}",
        f"link add {NAME}0 type veth peer name {NAME[:12]}1 netns {NAME}",
        f"addr add {HERE}/30 dev {NAME}0",
        f"link set {NAME}0 up",
        f"-n {NAME} addr add {THERE}/30 dev {NAME[:12]}1",
        f"-n {NAME} link set {NAME[:12]}1 up",
    )
    server = None
    try:
        made = all(_ip(step) for step in steps)
        if made:
            command = ["ip", "netns", "exec", NAME, sys.executable, "-c", SERVE.format(port=PORT)]
            server = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert server.stdout is not None
            server.stdout.readline()
        yield made
    finally:
        if server is not None:
            server.kill()
            server.wait()
        _ip(f"link del {NAME}0")
        _ip(f"netns del {NAME}")


def _ip(step: str) -> bool:
    return subprocess.run(["ip", *step.split()], capture_output=True, check=False).returncode == 0
