"""What the policies are worth: `make bench-policies`.

Runs the router's and the executor's own decisions on a simulated clock (bench/sim) and prints a line per figure: name,
value, baseline, target, PASS or FAIL. Every figure is the worst of all seeds. With a directory of public traces
(`--traces` or LORAPORT_TRACES) their workloads are run as well, else it says which are left out. Writes
bench/results/policies.json.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.figures import RESULTS, Figure, report
from bench.sim import attacks, scenarios
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
FEW, MANY = 4, 12
SETTLE_S = 30.0
SCENARIOS = Path(__file__).resolve().parents[1] / "tests" / "scenarios"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the policies on a simulated clock.")
    parser.add_argument("--traces", type=Path, default=_environment(), help="directory of public traces")
    parser.add_argument("--seeds", type=int, default=3, help="seeds per figure")
    parser.add_argument("--out", type=Path, default=RESULTS / "policies.json", help="where the JSON goes")
    options = parser.parse_args()
    traces, why_not = find_traces(options.traces)
    if why_not:
        print(f"left out: servegen, servegen-many, mooncake, azure: {why_not}")
    started, seeds = time.monotonic(), range(1, options.seeds + 1)
    figures = [
        *residency(traces, seeds),
        *victims(seeds),
        *fairness(seeds),
        *placement(seeds),
        *faults(),
        *admissions(),
    ]
    facts = {"seeds": options.seeds, "traces": "yes" if traces else "no", "wall_s": round(time.monotonic() - started)}
    report(options.out, figures, facts)
    return 0


def _environment() -> Path | None:
    return Path(os.environ["LORAPORT_TRACES"]) if os.environ.get("LORAPORT_TRACES") else None


# --- residency


def residency(traces: Path | None, seeds: Sequence[int]) -> list[Figure]:
    """Load cost of eviction against LRU and against the offline optimum."""
    ratios: defaultdict[tuple[str, int], list[tuple[float, float, float]]] = defaultdict(list)
    by_bytes: defaultdict[str, list[float]] = defaultdict(list)
    for slots in SLOTS:
        for seed in seeds:
            for name, calls in residency_workloads(traces, seed=seed, slots=slots).items():
                keys, cost = [call.adapter for call in calls], {c.adapter: load_cost(c.rank) for c in calls}
                alone = [replace(call, tenant="all") for call in calls]
                ours, lru = (
                    replay(calls, make_policy("gdsf-d"), slots=slots),
                    replay(alone, make_policy("lru"), slots=slots),
                )
                best = least_cost(keys, cost, slots)
                ratios[name, slots].append((ours, lru, best))
                if slots == SLOTS[0]:
                    size = {call.adapter: -(-call.rank // 8) for call in calls}
                    bound = least_cost_bytes(keys, cost, size, slots * 4)
                    by_bytes[name].append(replay(calls, make_policy("gdsf-d"), slots=slots, by_bytes=True) / bound)
                if slots == SLOTS[0] and seed == seeds[0]:
                    top, ten = shares(calls)
                    print(f"workload {name}: {len(calls)} calls, top-1 {top:.2f}, top-10 {ten:.2f}")
    figures = []
    for (name, slots), runs in ratios.items():
        over_lru, over_best = max(o / lru for o, lru, _ in runs), max(o / best for o, _, best in runs)
        lru_over_best = max(lru / best for _, lru, best in runs)
        target = 0.85 if name == "servegen" else 1.05
        figures.append(_figure(f"load cost / LRU, {name}, K={slots}", over_lru, target, baseline=1.0))
        limit = 1.9 if name.startswith("servegen") else 1.05 * lru_over_best
        figures.append(_figure(f"load cost / OPT, {name}, K={slots}", over_best, limit, baseline=lru_over_best))
    for name, values in by_bytes.items():
        print(f"load cost / PFOO-L, {name}, by bytes: {max(values):.2f}")
    return figures


def _figure(name: str, value: float, target: float, *, baseline: float, at_most: bool = True) -> Figure:
    return Figure(name=name, value=value, baseline=baseline, target=target, unit="x", at_most=at_most)


# --- fairness


def victims(seeds: Sequence[int]) -> list[Figure]:
    """What tenants that just work notice of one that attacks: p99 of the time to the first token."""
    worst: dict[tuple[str, str], tuple[float, float]] = {}
    for label, count in (("few", FEW), ("many", MANY)):
        for seed in seeds:
            calm = attacks.victims(count, seed=seed, rate=12.0)
            alone = _victims_p99(calm)
            for name, attack in attacks.ATTACKS.items():
                attacked = _victims_p99(sorted([*calm, *attack(seed)], key=lambda call: call.at))
                known = worst.get((label, name), (0.0, 0.0))
                worst[label, name] = max(known, (attacked / alone, alone))
    targets = {"few": 1.5, "many": 3.0}
    return [
        _figure(f"victim p99 TTFT, {name}, {label}", ratio, targets[label], baseline=1.0)
        for (label, name), (ratio, _) in worst.items()
    ]


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


def fairness(seeds: Sequence[int]) -> list[Figure]:
    """Equal and weighted tenants that all want more than there is."""
    jain, throughput, spread, fluid = 1.0, 9.0, 0.0, 9.0
    for seed in seeds:
        calls = overload(6, seed=seed, seconds=40.0, rate=60.0)
        world = World(Setup())
        watch = _Spread(world)
        world.add(calls)
        world.clock.run(40.0)
        spread = max(spread, watch.worst)
        work = {tenant: account.work for tenant, account in world.routers[0].ledger.accounts.items()}
        values = np.array(list(work.values()))
        jain = min(jain, float(values.sum() ** 2 / (len(values) * (values**2).sum())))
        first_come = World(Setup(window=36, reserve=0))
        first_come.add([replace(call, tenant="all") for call in calls])
        first_come.clock.run(40.0)
        throughput = min(throughput, _tokens(world) / _tokens(first_come))
        weights = {f"t{index}": 1.0 + index % 2 for index in range(6)}
        weighted = World(Setup(weights=weights))
        watch = _Spread(weighted)
        weighted.add(calls)
        weighted.clock.run(40.0)
        spread = max(spread, watch.worst)
        got = {tenant: account.work for tenant, account in weighted.routers[0].ledger.accounts.items()}
        total = sum(got.values())
        fair = max_min(dict.fromkeys(got, total), weights, total)
        fluid = min(fluid, min(got[tenant] / fair[tenant] for tenant in got))
    return [
        _figure("Jain index, equal tenants", jain, 0.98, baseline=1.0, at_most=False),
        _figure("tokens / first come first served", throughput, 0.97, baseline=1.0, at_most=False),
        _figure("spread of counters / U", spread, 1.0, baseline=0.0),
        _figure("least share / fluid max-min", fluid, 0.9, baseline=1.0, at_most=False),
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
    spot = Placed("e0", False, 0, "")
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


def placement(seeds: Sequence[int]) -> list[Figure]:
    """One adapter with idle gaps over four executors that also serve others; prompts that share beginnings."""
    loads = 0
    for seed in seeds:
        random = np.random.default_rng(seed)
        gapped = [Call(at=3.0 + 4 * index, tenant="quiet", adapter="quiet/a", rank=16) for index in range(200)]
        others = [
            Call(at=float(at), tenant=f"t{index % 5}", adapter=f"t{index % 5}/a{int(random.integers(6))}", rank=16)
            for index, at in enumerate(np.sort(random.uniform(0, 800, 800)))
        ]
        world = World(Setup(executors=4))
        world.add(sorted([*gapped, *others], key=lambda call: call.at))
        world.clock.run(830.0)
        loads = max(loads, sum(machine.loads_done.get("quiet/a", 0) for machine in world.machines.values()))
    return [Figure(name="cold loads of 200 gapped calls", value=loads, baseline=4, target=1, unit="")]


def faults() -> list[Figure]:
    """Every scenario of tests/scenarios: wrong revisions, and calls without an end or with two."""
    figures = []
    for path in sorted(SCENARIOS.glob("*.txt")):
        world = scenarios.run(path.read_text())
        bad = scenarios.faults_of(world)
        figures.append(Figure(name=f"wrong, lost, doubled: {path.stem}", value=bad, baseline=0, target=0, unit=""))
    return figures


if __name__ == "__main__":
    sys.exit(main())
