"""A process of the stack on a host of its own: a network namespace behind a wire that loses packets.

Everything goes on talking to 127.0.0.1; relays at both ends of the wire carry what is said there, TLS and all. The wire
is a pair of virtual interfaces, and what it loses is dropped by the kernel: `tc netem` where there is one, else a
rule of the namespace's own packet filter.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.proxy import pump

NEAR, FAR = "10.213.77.1", "10.213.77.2"
LOOPBACK = "127.0.0.1"
CLONE_NEWNET = 0x40000000
BIND_S = 60.0


class Namespace:
    """A network namespace, held by a process that sleeps, with one wire to ours."""

    def __init__(self) -> None:
        self.fault = ""
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "3600"])
        ours = os.readlink("/proc/self/ns/net")
        ends = time.monotonic() + 5.0
        while self._holder.poll() is None and os.readlink(f"/proc/{self._holder.pid}/ns/net") == ours:
            assert time.monotonic() < ends, "unshare did not begin"
            time.sleep(0.01)
        name, pid = f"lp{self._holder.pid}", str(self._holder.pid)
        steps = (
            ["ip", "link", "add", name, "type", "veth", "peer", "name", "wire", "netns", pid],
            ["ip", "addr", "add", f"{NEAR}/30", "dev", name],
            ["ip", "link", "set", name, "up"],
            self.inside("ip", "addr", "add", f"{FAR}/30", "dev", "wire"),
            self.inside("ip", "link", "set", "wire", "up"),
            self.inside("ip", "link", "set", "lo", "up"),
        )
        if self._holder.poll() is not None or not all(map(_done, steps)):
            self.fault = "network namespaces with a wire between them are not allowed here"

    def inside(self, *command: str) -> list[str]:
        """Returns a command that runs in the namespace."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--", *command]

    def lose(self, part: float) -> bool:
        """Loses this part of the packets from now on, each way. Returns whether the kernel can."""
        netem = self.inside("tc", "qdisc", "add", "dev", "wire", "root", "netem", "loss", f"{part:.0%}")
        drop = ("-m", "statistic", "--mode", "random", "--probability", f"{part}", "-j", "DROP")
        incoming = self.inside("iptables", "-A", "INPUT", "-i", "wire", *drop)
        outgoing = self.inside("iptables", "-A", "OUTPUT", "-o", "wire", *drop)
        return _done(incoming) and (_done(netem) or _done(outgoing))

    def lost(self) -> int:
        """Returns how many packets its filter has dropped."""
        told = subprocess.run(self.inside("iptables", "-nvxL", "INPUT"), capture_output=True, text=True, check=True)
        return sum(int(line.split()[0]) for line in told.stdout.splitlines() if " DROP " in line)

    def enter(self) -> None:
        """Takes the calling thread, and the threads that it starts, into the namespace."""
        with Path(f"/proc/{self._holder.pid}/ns/net").open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def close(self) -> None:
        """Lets go of it; it ends, and the wire with it, once nothing runs inside."""
        self._holder.kill()
        self._holder.wait()


class Relay:
    """Carries connections to `listen` on to `target`; both are addresses of the namespace that it is in, None: ours."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], namespace: Namespace | None) -> None:
        self._listen, self._target, self._namespace = listen, target, namespace
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes no more connections; the address is free again."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        if self._namespace is not None:
            self._namespace.enter()
        with self._bound() as server:
            server.settimeout(0.2)
            while not self._closed.is_set():
                with contextlib.suppress(TimeoutError):
                    client, _ = server.accept()
                    threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _bound(self) -> socket.socket:
        """Waits for the address: who had it may be on its way out."""
        ends = time.monotonic() + BIND_S
        while True:
            try:
                return socket.create_server(self._listen)
            except OSError:
                if self._closed.is_set() or time.monotonic() > ends:
                    raise
                time.sleep(0.02)

    def _carry(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._target, 10) as server:
            server.settimeout(None)
            threading.Thread(target=pump, args=(client, server), daemon=True).start()
            pump(server, client)


@contextlib.contextmanager
def far_away(namespace: Namespace, *, serves: int, asks: tuple[int, ...]) -> Iterator[None]:
    """Makes a process in the namespace reachable at its port here, and the ports that it asks reachable from there."""
    relays = [
        Relay((LOOPBACK, serves), (FAR, serves), None),
        Relay((FAR, serves), (LOOPBACK, serves), namespace),
    ]
    for port in asks:
        relays += [Relay((LOOPBACK, port), (NEAR, port), namespace), Relay((NEAR, port), (LOOPBACK, port), None)]
    try:
        yield
    finally:
        for relay in relays:
            relay.close()


def _done(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
