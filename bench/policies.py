"""What the policies are worth: `make bench-policies`.

Runs the router's and the executor's own decisions on a simulated clock (bench/sim) and prints a line per figure: name,
value, baseline, target, PASS or FAIL. Every figure is the worst of all seeds; constants were chosen on seeds below 100,
judged are others. Each seed is a job of its own, as many at once as there are cores. With a directory of public traces
(`--traces` or LORAPORT_TRACES) their workloads are run as well, else it says which are left out. Writes
bench/results/policies.json.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.figures import RESULTS, Figure, report
from bench.sim import attacks, scenarios, sharding
from bench.sim.machine import Model
from bench.sim.optimum import least_cost, least_cost_bytes, max_min
from bench.sim.residency import load_cost, replay
from bench.sim.workloads import Call, find_traces, residency_workloads, shares
from bench.sim.world import Setup, World
from services.executor.eviction import make_policy
from services.router.fair_queue import FairQueue, Waiting
from services.router.ledger import Ledger
from services.router.placement import Placed

SLOTS = (8, 16)
# Tenants besides the attacker, and by how much it may raise their p99.
VICTIMS = {"few": (4, 1.5), "many": (12, 3.0)}
# Sizes of an active set, the largest just below what four executors hold.
ACTIVE = (24, 60)
FRESH = 201
SETTLE_S = 30.0
SCENARIOS = Path(__file__).resolve().parents[1] / "tests" / "scenarios"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the policies on a simulated clock.")
    parser.add_argument("--traces", type=Path, default=_environment(), help="directory of public traces")
    parser.add_argument("--seeds", type=int, default=3, help="seeds per figure")
    parser.add_argument("--first-seed", type=int, default=FRESH, help="the first of them")
    parser.add_argument("--out", type=Path, default=RESULTS / "policies.json", help="where the JSON goes")
    options = parser.parse_args()
    traces, why_not = find_traces(options.traces)
    if why_not:
        print(f"left out: servegen, servegen-many, mooncake, azure: {why_not}")
    started, seeds = time.monotonic(), range(options.first_seed, options.first_seed + options.seeds)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        # The longest first, so that no core waits for one at the end.
        attacked = [pool.submit(victims, label, seed) for label in VICTIMS for seed in seeds]
        replayed = [pool.submit(replays, traces, slots, seed) for slots in SLOTS for seed in seeds]
        shared = [pool.submit(fairness, seed) for seed in seeds]
        placed = [pool.submit(placement, seed) for seed in seeds]
        broken = [pool.submit(faults, path) for path in sorted(SCENARIOS.glob("*.txt"))]
        figures = [
            *residency([job.result() for job in replayed]),
            *attacks_noticed([job.result() for job in attacked]),
            *equals([job.result() for job in shared]),
            *places([job.result() for job in placed]),
            *(job.result() for job in broken),
        ]
    figures += admissions()
    facts = {
        "seeds": f"{seeds[0]} to {seeds[-1]}", "traces": "yes" if traces else "no",
        "wall_s": round(time.monotonic() - started),
    }  # fmt: skip
    report(options.out, figures, facts)
    return 0


def _environment() -> Path | None:
    return Path(os.environ["LORAPORT_TRACES"]) if os.environ.get("LORAPORT_TRACES") else None


# --- residency


@dataclass(frozen=True, slots=True)
class Replayed:
    """One workload: load costs in ms of GDSF-D, of LRU and of the optimum; GDSF-D over the bound on bytes, 0 when that
    was not run; and its calls and popularity in words."""

    name: str
    slots: int
    ours: float
    lru: float
    best: float
    by_bytes: float
    facts: str


def replays(traces: Path | None, slots: int, seed: int) -> list[Replayed]:
    """Runs every workload through the adapter pool."""
    found = []
    for name, calls in residency_workloads(traces, seed=seed, slots=slots).items():
        keys, cost = [call.adapter for call in calls], {c.adapter: load_cost(c.rank) for c in calls}
        alone = [replace(call, tenant="all") for call in calls]
        by_bytes = 0.0
        if slots == SLOTS[0]:
            size = {call.adapter: -(-call.rank // 8) for call in calls}
            bound = least_cost_bytes(keys, cost, size, slots * 4)
            by_bytes = replay(calls, make_policy("gdsf-d"), slots=slots, by_bytes=True) / bound
        top, ten = shares(calls)
        found.append(
            Replayed(
                name,
                slots,
                replay(calls, make_policy("gdsf-d"), slots=slots),
                replay(alone, make_policy("lru"), slots=slots),
                least_cost(keys, cost, slots),
                by_bytes,
                f"{len(calls)} calls, top-1 {top:.2f}, top-10 {ten:.2f}",
            )
        )
    return found


def residency(jobs: Sequence[Sequence[Replayed]]) -> Iterator[Figure]:
    """Load cost of eviction against LRU and against the offline optimum."""
    runs: defaultdict[tuple[str, int], list[Replayed]] = defaultdict(list)
    for run in (run for job in jobs for run in job):
        runs[run.name, run.slots].append(run)
    for (name, slots), of in runs.items():
        lru_over_best = max(run.lru / run.best for run in of)
        if slots == SLOTS[0]:
            print(f"workload {name}: {of[0].facts}; by bytes / PFOO-L {max(run.by_bytes for run in of):.2f}")
        target = 0.85 if name == "servegen" else 1.05
        over_lru = max(run.ours / run.lru for run in of)
        yield _figure(f"load cost / LRU, {name}, K={slots}", over_lru, target, baseline=1.0)
        limit = 1.9 if name.startswith("servegen") else 1.05 * lru_over_best
        over_best = max(run.ours / run.best for run in of)
        yield _figure(f"load cost / OPT, {name}, K={slots}", over_best, limit, baseline=lru_over_best)


def _figure(name: str, value: float, target: float, *, baseline: float, at_most: bool = True) -> Figure:
    return Figure(name=name, value=value, baseline=baseline, target=target, unit="x", at_most=at_most)


# --- fairness


def victims(label: str, seed: int) -> dict[tuple[str, str], float]:
    """Returns by how much an attacker raises the victims' p99 time to the first token, by victims and attack."""
    count, _ = VICTIMS[label]
    calm = attacks.victims(count, seed=seed, rate=12.0)
    alone = _victims_p99(calm)
    return {
        (label, name): _victims_p99(sorted([*calm, *attack(seed)], key=lambda call: call.at)) / alone
        for name, attack in attacks.ATTACKS.items()
    }


def attacks_noticed(jobs: Sequence[dict[tuple[str, str], float]]) -> list[Figure]:
    """What tenants that just work notice of one that attacks: p99 of the time to the first token."""
    return [
        _figure(f"victim p99 TTFT, {name}, {label}", max(job.get((label, name), 0.0) for job in jobs),
                VICTIMS[label][1], baseline=1.0)
        for label, name in dict.fromkeys(key for job in jobs for key in job)
    ]  # fmt: skip


def _victims_p99(calls: Sequence[Call]) -> float:
    world = World(Setup(model=Model()))
    world.add(calls)
    world.clock.run(attacks.SECONDS + SETTLE_S)
    times = [story.ttft for story in world.stories if story.call.tenant != "attacker"]
    if any(value is None for value in times):
        return float("inf")
    return float(np.percentile(np.array(times, dtype=float), 99))


def overload(tenants: int, *, seed: int, seconds: float, rate: float) -> list[Call]:
    """Returns more calls than one executor serves, of equal tenants with two adapters each."""
    random = np.random.default_rng(seed)
    calls = []
    for tenant in range(tenants):
        at = 0.0
        while (at := at + float(random.exponential(tenants / rate))) < seconds:
            prompt = int(np.clip(random.lognormal(5.5, 0.7), 16, 3000))
            output = int(np.clip(random.lognormal(4.0, 0.5), 4, 300))
            adapter = f"t{tenant}/a{int(random.integers(2))}"
            calls.append(Call(at=at, tenant=f"t{tenant}", adapter=adapter, rank=16, prompt=prompt, output=output))
    return sorted(calls, key=lambda call: call.at)


def fairness(seed: int) -> tuple[float, float, float, float]:
    """Equal and weighted tenants that all want more than there is: Jain index of the equal ones' work, tokens against
    first come first served, largest spread of counters over the bound, least share of the weighted max-min one."""
    calls = overload(6, seed=seed, seconds=40.0, rate=60.0)
    world, spread = _overloaded(calls, Setup())
    work = np.array([account.work for account in world.routers[0].ledger.accounts.values()])
    jain = float(work.sum() ** 2 / (len(work) * (work**2).sum()))
    first_come, _ = _overloaded([replace(call, tenant="all") for call in calls], Setup(window=36, reserve=0))
    weights = {f"t{index}": 1.0 + index % 2 for index in range(6)}
    weighted, spread_weighted = _overloaded(calls, Setup(weights=weights))
    got = {tenant: account.work for tenant, account in weighted.routers[0].ledger.accounts.items()}
    total = sum(got.values())
    fair = max_min(dict.fromkeys(got, total), weights, total)
    fluid = min(got[tenant] / fair[tenant] for tenant in got)
    return jain, _tokens(world) / _tokens(first_come), max(spread, spread_weighted), fluid


def _overloaded(calls: Sequence[Call], setup: Setup) -> tuple[World, float]:
    world = World(setup)
    watch = _Spread(world)
    world.add(calls)
    world.clock.run(40.0)
    return world, watch.worst


def equals(jobs: Sequence[tuple[float, float, float, float]]) -> list[Figure]:
    """The figures of `fairness`."""
    jain, throughput, spread, fluid = zip(*jobs, strict=True)
    return [
        _figure("Jain index, equal tenants", min(jain), 0.98, baseline=1.0, at_most=False),
        _figure("tokens / first come first served", min(throughput), 0.97, baseline=1.0, at_most=False),
        _figure("spread of counters / U", max(spread), 1.0, baseline=0.0),
        _figure("least share / fluid max-min", min(fluid), 0.9, baseline=1.0, at_most=False),
    ]


def _tokens(world: World) -> int:
    return sum(story.tokens for story in world.stories)


class _Spread:
    """The largest spread of the counters of tenants that wait, as a part of the bound."""

    def __init__(self, world: World) -> None:
        self.worst = 0.0
        self._world = world
        world.watch = self._look

    def _look(self) -> None:
        for router in self._world.routers:
            waiting = {request.tenant for request in router.queue.waiting()}
            if len(waiting) > 1:
                counters = [router.ledger.counter(tenant) for tenant in waiting]
                bound = router.ledger.bound_ms(running=self._world.setup.max_running)
                self.worst = max(self.worst, (max(counters) - min(counters)) / bound)


# --- what an admission costs


def admissions() -> Iterator[Figure]:
    """What one admission costs, with 20,000 requests of so many tenants in the queue."""
    spot = Placed("e0", False, 0, 0, "")
    costs = {}
    for tenants in (100, 1000, 10_000):
        best = float("inf")
        for _ in range(3):
            ledger = Ledger()
            queue = FairQueue(ledger, max_queued=20_000, max_running=20_000, residence_s=60)
            for number in range(20_000):
                queue.offer(_waiting(number, tenants))
            started = time.process_time()
            for number in range(20_000, 24_000):
                turn = queue.take({"tiny"}, lambda _: spot, now=0.0)
                assert turn is not None
                ledger.open(turn.request.tenant, prefill_ms=64.0)
                queue.finish(turn.request.id)
                queue.offer(_waiting(number, tenants))
            best = min(best, (time.process_time() - started) / 4000 * 1e6)
        costs[tenants] = best
    for tenants, cost in costs.items():
        yield Figure(
            name=f"admission, {tenants} tenants", value=cost, baseline=costs[100], target=2 * min(costs.values()),
            unit="us",
        )  # fmt: skip


def _waiting(number: int, tenants: int) -> Waiting:
    return Waiting(
        id=str(number), tenant=f"t{number % tenants}", base_model="tiny", revision_id="r", rank=8, prompt_tokens=64,
        priority=0, arrived=0.0,
    )  # fmt: skip


# --- placement and faults


def placement(seed: int) -> tuple[int, dict[int, sharding.Spread]]:
    """One adapter with idle gaps over four executors that also serve others; active sets that outgrow one pool."""
    random = np.random.default_rng(seed)
    gapped = [Call(at=3.0 + 4 * index, tenant="quiet", adapter="quiet/a", rank=16) for index in range(200)]
    others = [
        Call(at=float(at), tenant=f"t{index % 5}", adapter=f"t{index % 5}/a{int(random.integers(6))}", rank=16)
        for index, at in enumerate(np.sort(random.uniform(0, 800, 800)))
    ]
    world = World(Setup(executors=4))
    world.add(sorted([*gapped, *others], key=lambda call: call.at))
    world.clock.run(830.0)
    loads = sum(machine.loads_done.get("quiet/a", 0) for machine in world.machines.values())
    return loads, {count: sharding.spread(count, seed=seed) for count in ACTIVE}


def places(jobs: Sequence[tuple[int, dict[int, sharding.Spread]]]) -> Iterator[Figure]:
    """The figures of `placement`. The baseline of a pool's need is that of executors that each serve every adapter."""
    yield Figure(
        name="cold loads of 200 gapped calls", value=max(loads for loads, _ in jobs), baseline=4, target=1, unit=""
    )
    one = sharding.slots(Model())
    for count in ACTIVE:
        spreads = [spread[count] for _, spread in jobs]
        name = f"{count} adapters on {sharding.EXECUTORS} pools of {one}"
        yield _figure(f"fullest pool's need, {name}", max(s.fullest for s in spreads), 1.0, baseline=count / one)
        yield Figure(
            name=f"loads once warm, {name}", value=max(s.loads for s in spreads), baseline=spreads[0].calls, target=0,
            unit="",
        )  # fmt: skip


def faults(path: Path) -> Figure:
    """A scenario of tests/scenarios: wrong revisions, and calls without an end or with two."""
    bad = scenarios.faults_of(scenarios.run(path.read_text()))
    return Figure(name=f"wrong, lost, doubled: {path.stem}", value=bad, baseline=0, target=0, unit="")


if __name__ == "__main__":
    sys.exit(main())
