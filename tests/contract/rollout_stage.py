"""A router between two executors that a test plays and a registry's desk that writes down what it is told."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loraport.registry.v1 import catalog_service_pb2 as cpb
from loraport.registry.v1 import rollout_service_pb2 as rpb
from loraport.registry.v1 import rollout_service_pb2_grpc as rollout_stubs
from services.shared.errors import LoraportError
from tests.contract.router_world import World, eventually

NAME = "tenants/acme/adapters/pirate/rollouts/r1"
SALT = bytes(range(16))
State = rpb.Rollout.State


@dataclass
class FakeDesk(rollout_stubs.RolloutServiceServicer):
    """What routers reported; `away` refuses everything for a while."""

    away: bool = False
    lose_answers: int = 0
    ended: bool = False
    calls: int = 0
    readiness: list[rpb.ReportReadinessRequest] = field(default_factory=list)
    lost: list[rpb.ReportReadinessRequest] = field(default_factory=list)
    probes: list[rpb.ReportProbeRequest] = field(default_factory=list)
    reports: dict[int, rpb.ReportObservationsRequest] = field(default_factory=dict)
    repeated: int = 0

    def _open(self) -> None:
        if self.away:
            raise LoraportError("REGISTRY_UNAVAILABLE")

    async def ReportReadiness(self, request, context) -> rpb.ReportReadinessResponse:
        self._open()
        (self.lost if request.lost_epoch else self.readiness).append(request)
        return rpb.ReportReadinessResponse()

    async def ReportProbe(self, request, context) -> rpb.ReportProbeResponse:
        self._open()
        self.probes.append(request)
        return rpb.ReportProbeResponse()

    async def ReportObservations(self, request, context) -> rpb.ReportObservationsResponse:
        self._open()
        self.calls += 1
        if self.ended:
            return rpb.ReportObservationsResponse()
        self.repeated += request.sequence in self.reports
        self.reports.setdefault(request.sequence, request)
        if self.lose_answers:
            self.lose_answers -= 1
            raise LoraportError("REGISTRY_UNAVAILABLE")
        return rpb.ReportObservationsResponse(sequence=max(self.reports))

    def seen(self, arm: str, step: int | None = None) -> list[rpb.Observation]:
        reports = [r for r in self.reports.values() if step is None or r.step_index == step]
        return [o for r in reports for o in r.observations if o.arm == arm]


@dataclass
class Stage:
    """A world with a rollout to move."""

    world: World
    desk: FakeDesk
    old: str
    new: str
    generation: int = 0

    async def rollout(self, state: str, *, share: int = 0, step: int = 0, ended: bool = False, **more) -> None:
        self.generation += 1
        item = cpb.CatalogRollout(
            name=NAME, tenant="acme", adapter="pirate", alias="prod", salt=SALT, from_revision_id=self.old,
            to_revision_id=self.new, base_model="tiny", state=State.Value(f"STATE_{state}"), share_basis_points=share,
            step_index=step, generation=self.generation, ended=ended, **more,
        )  # fmt: skip
        await self.world.put(cpb.CatalogItem(rollout=item))

    async def ask(self, session: str = "", **options):
        client = self.world.client()
        try:
            return await client.generate(prompt="hi", adapter="pirate", session_id=session, max_tokens=12, **options)
        finally:
            await client.close()


@asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[Stage]:
    """Two executors and a router, all serving."""
    world, desk = World(folder), FakeDesk()
    newer = world.registry.revision("acme", "pirate", version=2)
    world.registry.items += [
        world.registry.base(),
        *world.registry.tenant("acme"),
        *world.registry.tenant("globex"),
        *world.registry.adapter("acme", "pirate"),
        cpb.CatalogItem(revision=newer),
    ]
    world.registry_services.append((rollout_stubs.add_RolloutServiceServicer_to_server, desk))
    world.overrides["executor_wait_s"] = 60.0
    await world.start_registry()
    for name in ("e0", "e1"):
        await world.start_executor(name)
    await world.start_router()
    await eventually(lambda: all(e.serving for e in world.router._fleet.view().executors))
    try:
        yield Stage(world, desk, world.registry.revision("acme", "pirate").revision_id, newer.revision_id)
    finally:
        await world.stop()
