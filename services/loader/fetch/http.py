"""One request to one checked address. Blocking: call it from a thread.

The name is resolved once. Every address that it has must be allowed, and the connection goes to one of these very
addresses, with the name in SNI, certificate check and Host: a second answer of the name server cannot matter. No
proxy variables, no redirects, no decoding, no kept connections, no cookies. Python's own parser reads the head; what
the head means, `limits` decides.
"""

import contextlib
import http.client
import io
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from services.loader.fetch.addresses import is_private_network, is_public
from services.loader.fetch.faults import FetchFault
from services.loader.fetch.limits import FetchLimits, Head, Pace
from services.loader.fetch.sources import HTTPS_PORT, Target

# How long a wait may go on before it is asked whether anybody still wants it.
TICK_S = 0.5
MAX_ADDRESSES = 16
_BUFFER_BYTES = 64 << 10

Resolve = Callable[[str, int], Sequence[str]]
Connect = Callable[[str, int, float], socket.socket]


class Budget:
    """One fetch's time, and whether it is still wanted. `stop` may be called from any thread."""

    def __init__(self, total_s: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.now = monotonic
        self._until = monotonic() + total_s
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends the fetch at its next wait."""
        self._stopped.set()

    def pause(self, seconds: float) -> None:
        """Waits. Raises FetchFault as `left` does."""
        self._stopped.wait(min(seconds, self.left()))
        self.left()

    def left(self) -> float:
        """Returns how many seconds are left, more than 0. Raises FetchFault: SLOW, STOPPED."""
        if self._stopped.is_set():
            raise FetchFault("STOPPED")
        left = self._until - self.now()
        if left <= 0:
            raise FetchFault("SLOW", "the whole fetch took too long")
        return left


def resolve_host(host: str, port: int) -> list[str]:
    """Returns the addresses of a name, as the system knows them. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def connect_address(address: str, port: int, timeout_s: float) -> socket.socket:
    """Connects to an address, which is never a name. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    wire = socket.socket(family, socket.SOCK_STREAM)
    try:
        wire.settimeout(timeout_s)
        wire.connect((address, port))
    except BaseException:
        wire.close()
        raise
    return wire


class Transport:
    """Opens answers. The arguments are for tests, which bring their own names, wires and authorities."""

    def __init__(
        self,
        *,
        limits: FetchLimits | None = None,
        resolve: Resolve = resolve_host,
        connect: Connect = connect_address,
        authorities: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits or FetchLimits()
        self._resolve = resolve
        self._connect = connect
        self._authorities = authorities or ssl.create_default_context()

    def open(
        self,
        target: Target,
        headers: Mapping[str, str],
        *,
        budget: Budget,
        private: bool = False,
        authorities: ssl.SSLContext | None = None,
    ) -> "Answer":
        """Sends a GET and returns the answer once its head is here. Close it.

        Raises:
            FetchFault: the host is not allowed, cannot be reached, or answers no HTTP in time.
        """
        addresses = self._addresses(target, private, budget)
        wire = self._secure(self._dial(target, addresses, budget), target, authorities or self._authorities, budget)
        try:
            wire.settimeout(min(self.limits.head_s, budget.left()))
            wire.sendall(_request(target, headers))
            return Answer(wire, budget, self.limits)
        except OSError as error:
            wire.close()
            raise FetchFault("BROKEN", type(error).__name__) from None
        except BaseException:
            wire.close()
            raise

    def _addresses(self, target: Target, private: bool, budget: Budget) -> list[str]:
        addresses = list(_within(self._resolve, target, min(self.limits.resolve_s, budget.left())))
        if not 1 <= len(addresses) <= MAX_ADDRESSES:
            raise FetchFault("RESOLVE", f"{len(addresses)} addresses")
        for address in addresses:
            # One bad address condemns the name: it is not for us to guess which answer was meant.
            if not (is_public(address) or (private and is_private_network(address))):
                raise FetchFault("ADDRESS", target.host)
        return addresses

    def _dial(self, target: Target, addresses: list[str], budget: Budget) -> socket.socket:
        until = budget.now() + self.limits.connect_s
        for tried, address in enumerate(addresses):
            # A dead address takes its share of the time and leaves the rest to the next ones.
            left = min(until - budget.now(), budget.left()) / (len(addresses) - tried)
            if left <= 0:
                break
            with contextlib.suppress(OSError):
                return self._connect(address, target.port, left)
        raise FetchFault("CONNECT", target.host)

    def _secure(self, wire: socket.socket, target: Target, context: ssl.SSLContext, budget: Budget) -> ssl.SSLSocket:
        try:
            wire.settimeout(min(self.limits.tls_s, budget.left()))
            return context.wrap_socket(wire, server_hostname=target.host)
        except (OSError, ValueError) as error:
            wire.close()
            raise FetchFault("TLS", f"{target.host}: {type(error).__name__}") from None
        except BaseException:
            wire.close()
            raise


class Answer:
    """An answer whose head is here and whose body is still on the wire, as it was sent."""

    def __init__(self, wire: ssl.SSLSocket, budget: Budget, limits: FetchLimits) -> None:
        self._wire = wire
        self._limits = limits
        self._input = _Input(wire, budget, head_until=budget.now() + limits.head_s)
        self._response = http.client.HTTPResponse(self._input, method="GET")  # type: ignore[arg-type]
        try:
            self._response.begin()
        except (http.client.HTTPException, ValueError) as error:
            short = isinstance(error, http.client.RemoteDisconnected)
            raise FetchFault("BROKEN" if short else "HEADERS", type(error).__name__) from None
        pairs = self._response.getheaders()
        self.head = Head(self._response.status, tuple((name.lower(), value.strip()) for name, value in pairs))

    def read(self, size: int) -> bytes:
        """Returns up to `size` bytes of the body; none at its end.

        Raises:
            FetchFault: they come too slowly, or the connection broke.
        """
        if self._input.pace is None:
            self._input.pace = Pace(self._limits)
        try:
            return self._response.read(size)
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise FetchFault("BROKEN", type(error).__name__) from None

    def close(self) -> None:
        """Closes the connection; what is left of the body is not read."""
        self._response.close()
        self._wire.close()

    def __enter__(self) -> "Answer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Input(io.RawIOBase):
    """The wire as a file whose every wait is bounded. Stands in for the socket that `http.client` reads from."""

    def __init__(self, wire: ssl.SSLSocket, budget: Budget, *, head_until: float) -> None:
        self._wire = wire
        self._budget = budget
        self._head_until = head_until
        self.pace: Pace | None = None  # of the body; None while the head is read

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, _BUFFER_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            left = self._budget.left()
            started = self._budget.now()
            if self.pace is None:
                left = min(left, self._head_until - started)
                if left <= 0:
                    raise FetchFault("SLOW", "the head of the answer")
            self._wire.settimeout(min(TICK_S, left))
            count: int | None = None
            with contextlib.suppress(TimeoutError):
                count = self._wire.recv_into(buffer)
            if self.pace is not None:
                self.pace.add(self._budget.now() - started, count or 0)
            if count is not None:
                return count


def _request(target: Target, headers: Mapping[str, str]) -> bytes:
    """Returns the bytes of a GET. Raises FetchFault when a value could end its line."""
    lines = [f"GET {target.path} HTTP/1.1", f"Host: {host_header(target)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if not all(line.isascii() and line.isprintable() for line in lines):
        raise FetchFault("CHARACTER")
    return ("\r\n".join([*lines, "", ""])).encode("ascii")


def host_header(target: Target) -> str:
    """Returns the value of `Host`."""
    return target.host if target.port == HTTPS_PORT else f"{target.host}:{target.port}"


def _within(resolve: Resolve, target: Target, timeout_s: float) -> Sequence[str]:
    """Resolves in a thread of its own: the system's resolver knows no timeout of ours."""
    answers: queue.SimpleQueue[Sequence[str] | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(resolve(target.host, target.port))
        except (OSError, UnicodeError):
            answers.put(None)

    threading.Thread(target=work, daemon=True, name="resolve").start()
    try:
        found = answers.get(timeout=timeout_s)
    except queue.Empty:
        found = None
    if found is None:
        raise FetchFault("RESOLVE", target.host)
    return found
