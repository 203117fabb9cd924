"""Does a growing active set spread over a fleet so that each executor's part of it fits its pool?"""

from dataclasses import dataclass

import numpy as np

from bench.sim.machine import Model
from bench.sim.workloads import Call
from bench.sim.world import Setup, World

EXECUTORS, RANK, TENANTS = 4, 16, 8
# Loads before this are those of adapters that are asked for the first time.
WARM_S, SECONDS, RATE = 60.0, 180.0, 16.0


@dataclass(frozen=True, slots=True)
class Spread:
    """What came out after the beginning: calls, loads, and the most that an executor's own calls needed of its pool."""

    calls: int
    loads: int
    fullest: float


def slots(model: Model) -> int:
    """Returns how many of the adapters one executor holds."""
    return model.pages // -(-RANK // 8)


def spread(adapters: int, *, seed: int) -> Spread:
    """Runs calls to `adapters` adapters, all asked for about equally often, on `EXECUTORS` executors."""
    random = np.random.default_rng(seed)
    at, calls = 0.0, []
    while (at := at + float(random.exponential(1 / RATE))) < SECONDS:
        number = int(random.integers(adapters))
        tenant = f"t{number % TENANTS}"
        calls.append(Call(at=at, tenant=tenant, adapter=f"{tenant}/a{number}", rank=RANK, prompt=200, output=24))
    world = World(Setup(executors=EXECUTORS))
    world.add(calls)
    world.clock.run(WARM_S)
    before = sum(_loads(world))
    used: dict[str, set[str]] = {name: set() for name in world.machines}
    for name, machine in world.machines.items():
        machine.on_execute = lambda revision, name=name: used[name].add(revision)
    world.clock.run(SECONDS + WARM_S)
    late = sum(call.at > WARM_S for call in calls)
    fullest = max(len(revisions) for revisions in used.values()) / slots(world.setup.model)
    return Spread(late, sum(_loads(world)) - before, fullest)


def _loads(world: World) -> list[int]:
    return [sum(machine.loads_done.values()) for machine in world.machines.values()]
