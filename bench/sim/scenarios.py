"""Faults as text: one command a line, at moments of the simulated clock.

    fleet executors=2 routers=2            first line
    calls count=400 rate=20 adapters=8 seed=1
    at 3 kill e0                           an executor or a router
    at 6 start e0
    at 4 cut r0 e1                         they cannot reach each other, and both notice
    at 7 heal r0 e1
    at 5 board down                        the notice board is away; `board up` brings it back
    at 5 alias t0/a0 t0/a0-next            the name means another revision from now on
    answered 0.9                           at least this part of all calls

`#` begins a comment.
"""

from functools import partial

import numpy as np

from bench.sim.workloads import Call
from bench.sim.world import Setup, World

SETTLE_S = 60.0


def run(text: str) -> World:
    """Runs a scenario and returns the world after it.

    Raises:
        ValueError: a line is not a command.
        AssertionError: fewer calls were answered than the scenario says.
    """
    world, until, least = World(Setup()), 0.0, 0.0
    for line in text.splitlines():
        words = line.split("#")[0].split()
        match words:
            case []:
                continue
            case ["fleet", *facts]:
                world = World(Setup(residence_s=30.0, **_numbers(facts)))
            case ["calls", *facts]:
                calls = _calls(**_numbers(facts))
                until = max(until, calls[-1].at)
                world.add(calls)
            case ["at", seconds, *command]:
                world.clock.later(float(seconds), partial(_do, world, command))
            case ["answered", part]:
                least = float(part)
            case _:
                raise ValueError(f"not a command: {line}")
    world.clock.run(until + SETTLE_S)
    answered = sum(story.outcome == "answered" for story in world.stories) / len(world.stories)
    assert answered >= least, f"{answered:.3f} of the calls were answered, not {least}"
    return world


def faults_of(world: World) -> int:
    """Returns how many calls had a token of another revision, no end, two ends, or tokens of two answers."""
    return sum(
        story.ends != 1 or story.wrong > 0 or story.tokens > story.call.output
        or (story.outcome == "answered" and story.tokens != story.call.output)
        for story in world.stories
    )  # fmt: skip


def _numbers(facts: list[str]) -> dict[str, int]:
    return {key: int(value) for key, value in (fact.split("=") for fact in facts)}


def _calls(*, count: int, rate: int, adapters: int = 8, tenants: int = 4, seed: int = 1) -> list[Call]:
    random = np.random.default_rng(seed)
    calls, at = [], 0.0
    for _ in range(count):
        at += float(random.exponential(1 / rate))
        number = int(random.integers(adapters))
        calls.append(
            Call(
                at=at, tenant=f"t{number % tenants}", adapter=f"t{number % tenants}/a{number}", rank=16,
                prompt=int(random.integers(32, 600)), output=int(random.integers(4, 60)),
            )
        )  # fmt: skip
    return calls


def _do(world: World, command: list[str]) -> None:
    parts = {router.name: router for router in world.routers} | dict(world.machines)
    match command:
        case ["kill", name]:
            parts[name].kill()
        case ["start", name]:
            parts[name].start()
            world.started_again(name)
        case ["cut", one, other]:
            world.cut(one, other)
        case ["heal", one, other]:
            world.cuts.discard(frozenset((one, other)))
        case ["board", state]:
            world.board_up = state == "up"
        case ["alias", adapter, revision]:
            world.aliases[adapter] = revision
        case _:
            raise ValueError(f"not a command: {' '.join(command)}")
