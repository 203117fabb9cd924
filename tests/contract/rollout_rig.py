"""A rollout's hands in tests: an operator, and a router that loads, probes and reports as it is told to."""

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from loraport.registry.v1 import rollout_service_pb2 as pb
from tests.contract.registry_rig import TIMEOUT, Rig

ADAPTER = "tenants/acme/adapters/bot"
ALIAS = f"{ADAPTER}/aliases/prod"
State = pb.Rollout.State
# Nothing waits for time, and twenty requests of each arm are enough.
QUICK: dict[str, Any] = {
    "step_percents": [10, 50, 100],
    "min_sample_count": 20,
    "min_step_duration": Duration(),
    "retention_duration": Duration(),
    "golden_prompts": [pb.RolloutPrompt(text="the quick brown fox")],
    "gates": pb.RolloutGates(advance_tolerance_percent=500, error_margin_percent=60),
}


@dataclass
class Hands:
    """Calls of one operator and one router. `old` and `new` are revision ids."""

    rig: Rig
    old: str
    new: str
    started: Timestamp = field(default_factory=lambda: Timestamp(seconds=1_800_000_000))
    sequence: int = 0

    async def start(self, **changes: Any) -> pb.Rollout:
        settings = {"to_revision_id": self.new, **QUICK, **changes}
        request = pb.StartRolloutRequest(parent=ADAPTER, rollout=pb.Rollout(**settings))
        return await self.rig.rollouts().StartRollout(request, timeout=TIMEOUT)

    async def get(self, name: str) -> pb.Rollout:
        return await self.rig.rollouts().GetRollout(pb.GetRolloutRequest(name=name), timeout=TIMEOUT)

    async def control(self, name: str, action: str, reason: str = "because", **more: Any) -> pb.Rollout:
        request = pb.ControlRolloutRequest(name=name, action=f"ACTION_{action}", reason=reason, **more)
        return await self.rig.rollouts().ControlRollout(request, timeout=TIMEOUT)

    async def ready(self, name: str, executor: str = "e0", **changes: Any) -> int:
        values = {"ready": True, "revision_id": self.new, "serving_executors": ["e0", "e1"], **changes}
        request = pb.ReportReadinessRequest(name=name, router="r0", executor=executor, **values)
        return (await self.rig.rollouts("router").ReportReadiness(request, timeout=TIMEOUT)).state

    async def probed(self, name: str, executor: str = "e0", **changes: Any) -> int:
        values = {"revision_id": self.new, "prompt_count": 1, "token_count": 4, "mean_logprob_difference": 0.001}
        request = pb.ReportProbeRequest(name=name, router="r0", executor=executor, **(values | changes))
        return (await self.rig.rollouts("router").ReportProbe(request, timeout=TIMEOUT)).state

    async def observe(
        self, name: str, step: int, seen: Iterable[pb.Observation], **changes: Any
    ) -> pb.ReportObservationsResponse:
        self.sequence += 1
        values = {"sequence": self.sequence, "start_time": self.started, "step_index": step, **changes}
        request = pb.ReportObservationsRequest(name=name, router="r0", observations=seen, **values)
        return await self.rig.rollouts("router").ReportObservations(request, timeout=TIMEOUT)

    async def until(self, name: str, wanted: Callable[[pb.Rollout], bool]) -> pb.Rollout:
        """Waits for what the registry does by itself."""
        end = time.monotonic() + TIMEOUT
        while not wanted(found := await self.get(name)):
            assert time.monotonic() < end, f"still {State.Name(found.state)}: {found.verdict}"
            await asyncio.sleep(0.02)
        return found

    async def prepared(self, **changes: Any) -> pb.Rollout:
        """A rollout whose first share has begun."""
        rollout = await self.start(**changes)
        for executor in ("e0", "e1"):
            await self.ready(rollout.name, executor)
        await self.until(rollout.name, in_state("PROBING"))
        for executor in ("e0", "e1"):
            await self.probed(rollout.name, executor)
        return await self.until(rollout.name, in_state("SPLITTING"))


def in_state(*names: str) -> Callable[[pb.Rollout], bool]:
    wanted = {State.Value(f"STATE_{name}") for name in names}
    return lambda rollout: rollout.state in wanted


def requests(
    count: int, *, new_ms: float = 100.0, control_ms: float = 100.0, new_errors: int = 0, seed: int = 7, **changes: Any
) -> list[pb.Observation]:
    """So many requests of each judged arm; times spread by 20 %."""
    chance = random.Random(seed)
    seen = []
    for arm, middle in (("new", new_ms), ("control", control_ms)):
        for index in range(count):
            ok = arm == "control" or index >= new_errors
            values: dict[str, Any] = {
                "arm": arm,
                "first_token_ms": middle * chance.lognormvariate(0, 0.2) if ok else 0.0,
                "per_token_ms": middle / 10 * chance.lognormvariate(0, 0.2) if ok else 0.0,
                "ok": ok,
                "error_reason": "" if ok else "EXECUTOR_UNAVAILABLE",
                "output_token_count": 20 + chance.randrange(20) if ok else 0,
            }
            seen.append(pb.Observation(**(values | (changes if arm == "new" else {}))))
    return seen


async def make_hands(rig: Rig) -> Hands:
    """An adapter with two ACTIVE revisions, the first one behind `prod`."""
    await rig.base()
    await rig.tenant("acme")
    old = await rig.active("acme", "bot", 1, "c1")
    new = await rig.active("acme", "bot", 2, "c2")
    await rig.alias(ALIAS, old.revision_id)
    return Hands(rig, old.revision_id, new.revision_id)
