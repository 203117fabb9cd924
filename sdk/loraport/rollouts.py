"""The admin plane's calls about rollouts: `AdminClient.rollouts`.

with AdminClient.local(".loraport") as admin:
    started = admin.rollouts.start("acme", "support-bot", rollout_service_pb2.Rollout(to_revision_id=new))
    for now in admin.rollouts.watch(started.name):
        print(now.state, now.verdict)
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from loraport.registry.v1 import rollout_service_pb2 as pb
from loraport.registry.v1 import rollout_service_pb2_grpc as stubs

# A rollout may take days; whoever follows it longer watches again.
WATCH_TIMEOUT_S = 8 * 86_400.0
ENDED = (pb.Rollout.STATE_SUCCEEDED, pb.Rollout.STATE_ROLLED_BACK, pb.Rollout.STATE_ABORTED)

T = TypeVar("T")


class Peer(Protocol):
    """One service's address."""

    channel: Any

    def call(self, method: Callable[..., T], request: Any) -> T:
        """Calls a method. Raises LoraportError."""

    def stream(self, method: Callable[..., Iterable[T]], request: Any, *, timeout_s: float) -> Iterator[T]:
        """Yields what a method streams. Raises LoraportError."""

    def pages(self, method: Callable[..., Any], request: Any, items: str) -> Iterator[Any]:
        """Yields the items of all pages. Raises LoraportError."""


class Rollouts:
    """See the module's text. Methods return the messages of the registry's contract and raise LoraportError."""

    def __init__(self, registry: Peer) -> None:
        self._registry = registry
        self._stub: Any = stubs.RolloutServiceStub(registry.channel)

    def start(self, tenant: str, adapter: str, rollout: pb.Rollout, *, dry_run: bool = False) -> pb.Rollout:
        """Starts a rollout by its target and settings; with `dry_run` checks it and returns its plan."""
        parent = f"tenants/{tenant}/adapters/{adapter}"
        request = pb.StartRolloutRequest(parent=parent, rollout=rollout, validate_only=dry_run)
        return self._registry.call(self._stub.StartRollout, request)

    def get(self, name: str) -> pb.Rollout:
        """Returns a rollout with its story and what was seen."""
        return self._registry.call(self._stub.GetRollout, pb.GetRolloutRequest(name=name))

    def list(self, tenant: str | None = None, adapter: str | None = None) -> Iterator[pb.Rollout]:
        """Yields an adapter's rollouts, or without one everybody's, newest first, without their stories."""
        parent = f"tenants/{tenant}/adapters/{adapter}" if tenant and adapter else "tenants/-"
        return self._registry.pages(self._stub.ListRollouts, pb.ListRolloutsRequest(parent=parent), "rollouts")

    def watch(self, name: str) -> Iterator[pb.Rollout]:
        """Yields a rollout as it is and whenever it changes, to its end."""
        request = pb.WatchRolloutRequest(name=name)
        return self._registry.stream(self._stub.WatchRollout, request, timeout_s=WATCH_TIMEOUT_S)

    def pause(self, name: str, reason: str = "") -> pb.Rollout:
        """Holds a rollout where it is; its gates watch on."""
        return self._control(name, "PAUSE", reason)

    def resume(self, name: str, reason: str = "") -> pb.Rollout:
        """Lets a held rollout go on."""
        return self._control(name, "RESUME", reason)

    def advance(self, name: str, reason: str) -> pb.Rollout:
        """Goes to the next step without waiting for evidence."""
        return self._control(name, "ADVANCE", reason)

    def roll_back(self, name: str, reason: str) -> pb.Rollout:
        """Decides against the new revision: the old one answers at once."""
        return self._control(name, "ROLLBACK", reason)

    def abort(self, name: str, reason: str) -> pb.Rollout:
        """Calls a rollout off before the alias has moved."""
        return self._control(name, "ABORT", reason)

    def _control(self, name: str, action: str, reason: str) -> pb.Rollout:
        request = pb.ControlRolloutRequest(name=name, reason=reason)
        request.action = pb.ControlRolloutRequest.Action.Value(f"ACTION_{action}")
        return self._registry.call(self._stub.ControlRollout, request)
