"""One way to serve gRPC: limits, TLS, the guard of every call (`guard.py`), health, drain."""

import asyncio
import resource
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc

from services.shared.access import POLICIES, require_policies
from services.shared.rpc.guard import MAX_UNREAD_S, Guard, RefusalListener, UserAuthenticator
from services.shared.rpc.health import Health
from services.shared.rpc.identity import CertificateAuthorities

log = structlog.get_logger()

MAX_CONTROL_BYTES = 1 << 20
# Connections that a port takes at most, and the part of the process's descriptors that they may take.
MAX_CONNECTIONS, CONNECTION_SHARE = 4096, 4
# How long calls go on when their connection has reached its age, seconds.
GRACE_S = 900

# Milliseconds and counts. so_reuseport is off, else a second process could take the port unnoticed. A connection that
# has not become one of TLS in time is closed, and so is one without calls; none is for ever, so that a certificate that
# has expired opens nothing for long. What runs by then has a grace to end in, a longer one where calls may take longer.
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_CONTROL_BYTES + (1 << 16)),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # grpc waits for the answer to a keepalive ping as long as for that to any ping: a minute if this is not set.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_connection_age_ms", 12 * 3_600_000),
    ("grpc.max_connection_age_grace_ms", GRACE_S * 1000),
)
# For a port that anybody can connect to; nobody watches anything there.
OPEN_DOOR = (("grpc.max_connection_age_ms", 1_800_000),)


def most_connections() -> int:
    """Returns how many connections each port takes: descriptors are left for whatever else the process opens."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(1, soft // CONNECTION_SHARE))


class Server:
    """A gRPC server with health and graceful drain."""

    def __init__(
        self,
        authorities: CertificateAuthorities,
        *,
        authenticate_user: UserAuthenticator | None = None,
        on_refused: RefusalListener | None = None,
        options: tuple[tuple[str, int], ...] = (),
        max_unread_s: float = MAX_UNREAD_S,
    ) -> None:
        """`max_unread_s` is how long a message may wait for its caller before the call is ended."""
        # Each option once: which of two counts is grpc's own affair.
        wanted = {
            **dict(SERVER_OPTIONS), "grpc.max_allowed_incoming_connections": most_connections(), **dict(options)
        }  # fmt: skip
        self._handlers = _Handlers(Guard(authorities, authenticate_user, on_refused, max_unread_s=max_unread_s))
        self._server = grpc.aio.server(handlers=[self._handlers], options=list(wanted.items()))
        self._authorities = authorities
        self._health = Health()
        self.add(health_pb2_grpc.add_HealthServicer_to_server, self._health)
        # Its `List` has no policy and is not served.
        self._handlers.methods.clear()

    def add(self, register: Callable[[Any, Any], None], servicer: Any) -> None:
        """Registers a servicer with its generated `add_…_to_server`.

        Raises:
            ValueError: it registers no method by name.
        """
        before = len(self._handlers.methods)
        register(servicer, self._handlers)
        if len(self._handlers.methods) == before:
            raise ValueError(f"{type(servicer).__name__} registers no method by its name, so none would be served")

    def listen(self, address: str, *, key: bytes, certificate: bytes, clients: bool) -> int:
        """Binds an address with TLS and returns the port; `clients` asks for a certificate of one of the CAs.

        Raises:
            OSError: the address is taken or not ours.
        """
        credentials = grpc.ssl_server_credentials(
            [(key, certificate)], self._authorities.bundle if clients else None, require_client_auth=clients
        )
        try:
            port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise OSError(f"cannot listen on {address}: the port is taken or the address is not of this machine")
        return int(port)

    async def start(self, *, serving: bool = True) -> None:
        """Checks that every method has a policy and starts serving; health says what `serving` says."""
        require_policies(self._handlers.methods)
        await self.set_serving(serving)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets what the health service answers."""
        self._health.set(serving)

    async def stop(self, grace_s: float) -> None:
        """Says NOT_SERVING, accepts nothing new, lets running calls end for `grace_s` seconds, then cuts them."""
        await self.set_serving(False)
        started = time.monotonic()
        await self._server.stop(grace_s)
        log.info("server stopped", drain_s=round(time.monotonic() - started, 3))

    async def wait(self) -> None:
        """Waits until the server has stopped."""
        # Cancelling grpc's own wait would cancel the shutdown that `stop` waits for.
        await asyncio.shield(self._server.wait_for_termination())


class _Handlers(grpc.GenericRpcHandler):
    """All that grpc is given to serve: for each method with a policy its handler, behind the guard.

    Stands in for the server while servicers register.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._guarded: dict[str, Any] = {}
        # All that were registered, with a policy or without.
        self.methods: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Returns the handler of a call; grpc answers UNIMPLEMENTED where there is none."""
        return self._guarded.get(details.method)

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Nothing: these do not say which methods they have. The same handlers are registered by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        # Not passed on: grpc keeps a task waiting for each registered method and looks through all of them at every
        # call.
        for name, handler in handlers.items():
            method = f"/{service}/{name}"
            self.methods.append(method)
            if method in POLICIES:
                self._guarded[method] = self._guard.wrap(method, handler)


async def run_blocking(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs blocking work (SQL, files, hashing) in a thread, with the call's context."""
    return await asyncio.to_thread(function, *arguments)
