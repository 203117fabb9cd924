"""One tenant attacks, the others just work: what the victims notice.

Victims send conversation-like calls to an adapter or two each. An attacker adds its own calls; the same victims' calls,
at the same moments, are run with and without it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bench.sim.workloads import Call

SECONDS = 60.0
# The victims have been at work for so long when the attack begins.
START = 5.0


def victims(count: int, *, seed: int, rate: float, seconds: float = SECONDS) -> list[Call]:
    """Returns the calls of `count` tenants, `rate` per second in all, each tenant with one adapter of rank 16."""
    random = np.random.default_rng(seed)
    calls = []
    for number in range(count):
        at = 0.0
        while (at := at + float(random.exponential(count / rate))) < seconds:
            prompt = int(np.clip(random.lognormal(5.8, 0.7), 16, 3000))
            output = int(np.clip(random.lognormal(3.5, 0.6), 4, 200))
            calls.append(
                Call(at=at, tenant=f"v{number}", adapter=f"v{number}/a", rank=16, prompt=prompt, output=output)
            )
    return sorted(calls, key=lambda call: call.at)


def _attack(
    *, seed: int, rate: float, adapter: Callable[[int], str], rank: int = 16, prompt: int = 64, output: int = 8,
    leaves_after: float = 0.0, start: float = START, seconds: float = SECONDS,
) -> list[Call]:  # fmt: skip
    random = np.random.default_rng(seed + 1000)
    calls, at, number = [], start, 0
    while (at := at + float(random.exponential(1 / rate))) < seconds:
        calls.append(
            Call(at=at, tenant="attacker", adapter=f"x/{adapter(number)}", rank=rank, prompt=prompt, output=output,
                 leaves_after=leaves_after)
        )  # fmt: skip
        number += 1
    return calls


def adapter_churn(seed: int) -> list[Call]:
    """64 adapters in turn, tiny requests: every one needs a load."""
    return _attack(seed=seed, rate=30.0, adapter=lambda number: str(number % 64))


def cancellation_churn(seed: int) -> list[Call]:
    """As adapter churn, but every caller leaves before it is answered."""
    return _attack(seed=seed, rate=30.0, adapter=lambda number: str(number % 64), leaves_after=0.05)


def long_context(seed: int) -> list[Call]:
    """Prompts of 16,000 tokens."""
    return _attack(seed=seed, rate=3.0, adapter=lambda _: "0", prompt=16_000, output=64)


def idle_then_burst(seed: int) -> list[Call]:
    """Nothing for half a minute, then 400 calls at once."""
    calls = _attack(seed=seed, rate=4000.0, adapter=lambda number: str(number % 2), prompt=300, output=60, start=30.0,
                    seconds=30.1)  # fmt: skip
    return calls[:400]


def large_rank(seed: int) -> list[Call]:
    """Adapters of rank 128, each half of the pool's room of eight."""
    return _attack(seed=seed, rate=10.0, adapter=lambda number: str(number % 6), rank=128, prompt=200, output=30)


def flood(seed: int) -> list[Call]:
    """More than the executor can serve, of one adapter, with long answers."""
    return _attack(seed=seed, rate=30.0, adapter=lambda _: "0", prompt=300, output=200)


def synchronized(seed: int) -> list[Call]:
    """Bursts of 60 calls every five seconds."""
    calls = []
    for burst in range(1, 12):
        one = _attack(seed=seed + burst, rate=100.0, adapter=lambda number: str(number % 4), prompt=400, output=40)
        calls += [replace(call, at=5.0 * burst + index / 10_000) for index, call in enumerate(one[:60])]
    return calls


def cyclic_set(seed: int) -> list[Call]:
    """One adapter more than the pool holds, in turn."""
    return _attack(seed=seed, rate=20.0, adapter=lambda number: str(number % 17), prompt=100, output=16)


def growing_library(seed: int) -> list[Call]:
    """A library that grows from 200 to 20,000 adapters, the newest asked for most."""
    random = np.random.default_rng(seed)
    return _attack(
        seed=seed, rate=15.0,
        adapter=lambda number: str(int(200 * 100 ** min(1.0, number / 900)) - 1 - int(random.integers(40))),
        prompt=100, output=16,
    )  # fmt: skip


def rollout_doubling(seed: int) -> list[Call]:
    """Six adapters, from the middle on each in two revisions."""
    return _attack(
        seed=seed, rate=15.0, adapter=lambda number: f"{number % 6}{'-next' if number > 300 and number % 2 else ''}",
        prompt=200, output=30,
    )  # fmt: skip


ATTACKS: dict[str, Callable[[int], list[Call]]] = {
    "adapter churn": adapter_churn,
    "cancellation churn": cancellation_churn,
    "long context": long_context,
    "idle then burst": idle_then_burst,
    "rank 128": large_rank,
    "flood": flood,
    "synchronized bursts": synchronized,
    "cyclic K+1": cyclic_set,
    "growing library": growing_library,
    "rollout doubling": rollout_doubling,
}
