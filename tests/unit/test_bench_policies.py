"""The simulator: its bounds against brute force, its scenarios, and that it is a function of its seed."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim import attacks, scenarios
from bench.sim.machine import Job, Machine, Model
from bench.sim.optimum import least_cost, least_cost_bytes, max_min
from bench.sim.residency import load_cost, replay
from bench.sim.workloads import Call, find_traces, shares, synthetic
from bench.sim.world import Setup, World
from services.executor.eviction import make_policy
from services.router.shared_work import slack_ms

SCENARIOS = sorted((Path(__file__).resolve().parents[1] / "scenarios").glob("*.txt"))


def brute_force(keys: list[str], cost: dict[str, float], slots: int) -> float:
    """The least load cost, by trying every eviction."""
    states: dict[frozenset[str], float] = {frozenset(): 0.0}
    for key in keys:
        after: dict[frozenset[str], float] = {}
        for held, spent in states.items():
            if key in held:
                choices = [(held, spent)]
            elif len(held) < slots:
                choices = [(held | {key}, spent + cost[key])]
            else:
                choices = [(held - {victim} | {key}, spent + cost[key]) for victim in held]
            for state, total in choices:
                after[state] = min(total, after.get(state, float("inf")))
        states = after
    return min(states.values())


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=14), st.integers(1, 3))
@settings(max_examples=60)
def test_the_optimum_is_what_brute_force_finds(keys: list[str], slots: int) -> None:
    cost = dict(zip("abcde", (1.0, 2.0, 5.0, 3.0, 8.0), strict=True))
    best = brute_force(keys, cost, slots)
    assert least_cost(keys, cost, slots) == pytest.approx(best)
    size = dict.fromkeys("abcde", 1.0)
    assert least_cost_bytes(keys, cost, size, slots) <= best + 1e-9


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60), st.integers(1, 4))
@settings(max_examples=40)
def test_no_policy_beats_the_optimum(keys: list[str], slots: int) -> None:
    ranks = dict(zip("abcdefgh", (8, 16, 8, 64, 32, 8, 128, 16), strict=True))
    calls = [Call(at=float(at), tenant="t", adapter=key, rank=ranks[key]) for at, key in enumerate(keys)]
    cost = {key: load_cost(rank) for key, rank in ranks.items()}
    for policy in ("lru", "gdsf-d"):
        assert replay(calls, make_policy(policy), slots=slots) >= least_cost(keys, cost, slots) - 1e-6


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0, 10), min_size=1), st.floats(0.1, 30))
def test_max_min_gives_nobody_more_by_taking_from_who_has_less(demands: dict[str, float], capacity: float) -> None:
    weights = {name: 1.0 + ord(name) % 3 for name in demands}
    got = max_min(demands, weights, capacity)
    assert sum(got.values()) == pytest.approx(min(capacity, sum(demands.values())))
    for one, other in itertools.permutations(demands, 2):
        if got[one] < demands[one] - 1e-9:
            assert got[one] / weights[one] >= got[other] / weights[other] - 1e-9


def test_a_run_is_a_function_of_its_calls() -> None:
    def run() -> list[tuple[float | None, str]]:
        world = World(Setup(executors=2))
        world.add(synthetic("zipf-1.0", seed=3, adapters=20, tenants=4, calls=150))
        world.clock.run(120.0)
        return [(story.ttft, story.outcome) for story in world.stories]

    assert run() == run()
    assert all(outcome == "answered" for _, outcome in run())


def test_who_waits_for_a_row_of_a_machine_lengthens_no_step_of_it() -> None:
    """As in an executor: nobody gets a row by it."""
    sizes = Model(max_rows=2, step_tokens=512, prefill=1.0)

    def prompts_beside_a_row(waiting: int) -> int:
        ends: list[Callable[[], None]] = []
        machine = Machine("e0", sizes, now=lambda: 0.0, later=lambda _, end: ends.append(end))

        def ask(tenant: str, prompt: int) -> None:
            call = Call(at=0.0, tenant=tenant, adapter="", rank=0, prompt=prompt)
            quiet = {"on_token": lambda: None, "on_end": lambda: None, "on_failed": lambda _: None}
            machine.execute(Job(tenant, call, "", on_begun=lambda *_: None, **quiet))

        ask("generates", 300)
        ask("asks", 3000)
        ends.pop()()
        for number in range(waiting):
            ask(f"waits {number}", 300)
        before = machine.totals().prefill_tokens
        ends.pop()()
        return machine.totals().prefill_tokens - before

    assert prompts_beside_a_row(40) == prompts_beside_a_row(0) > 0


def test_shares_say_what_a_parameter_means() -> None:
    top, ten = shares(synthetic("zipf-1.0", seed=1, adapters=200, calls=6000))
    assert 0.14 < top < 0.2
    assert 0.45 < ten < 0.55


def test_absent_traces_are_left_out_with_a_reason(tmp_path: Path) -> None:
    assert "no trace directory" in find_traces(None)[1]
    assert "lacks servegen" in find_traces(tmp_path)[1]


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_call_ends_once_and_with_its_own_revision(path: Path) -> None:
    world = scenarios.run(path.read_text())
    assert scenarios.faults_of(world) == 0
    for router in world.routers:
        assert not len(router.queue)
        assert not router.open
        for executor in router.members.view().executors:
            assert (executor.in_flight, dict(executor.held), dict(executor.ahead)) == (0, {}, {})


def test_a_scenario_that_answers_too_little_says_so() -> None:
    with pytest.raises(AssertionError, match="of the calls were answered"):
        scenarios.run("fleet executors=1\ncalls count=20 rate=10\nat 0.1 kill e0\nanswered 0.9")
    with pytest.raises(ValueError, match="not a command"):
        scenarios.run("explode")


def test_the_counters_of_tenants_that_wait_stay_within_the_bound() -> None:
    """On the simulator, with loads, long prompts and an attacker, what the ledger publishes holds at every look."""
    calls = [*attacks.victims(6, seed=4, rate=40.0, seconds=12.0), *attacks.flood(4), *attacks.adapter_churn(4)]
    world = World(Setup())
    looked = []

    def look() -> None:
        (router,) = world.routers
        waiting = {request.tenant for request in router.queue.waiting()}
        counters = [router.ledger.counter(tenant) for tenant in waiting]
        if len(counters) > 1:
            looked.append(max(counters) - min(counters))
            assert looked[-1] <= router.ledger.bound_ms(running=world.setup.max_running)

    world.watch = look
    world.add(sorted((call for call in calls if call.at < 12.0), key=lambda call: call.at))
    world.clock.run(14.0)
    assert looked


def test_three_routers_keep_the_bound_within_their_stated_slack() -> None:
    """Every tenant's calls go to all three routers; what each tenant got of the whole fleet stays close."""
    world = World(Setup(executors=2, routers=3, window=12))
    world.add(attacks.victims(6, seed=5, rate=240.0, seconds=12.0))
    apart: list[float] = []

    def look() -> None:
        if 4.0 < world.clock.time < 12.0:
            waiting = [{request.tenant for request in router.queue.waiting()} for router in world.routers]
            both = set.intersection(*waiting)
            work = {t: sum(router.ledger.accounts[t].work for router in world.routers) for t in both}
            start = {t: work[t] - begun.setdefault(t, work[t]) for t in both}
            if len(start) > 1:
                apart.append(max(start.values()) - min(start.values()))
                bound = sum(router.ledger.bound_ms(running=world.setup.max_running) for router in world.routers)
                assert apart[-1] <= 2 * bound + slack_ms(executors=2)

    begun: dict[str, float] = {}
    world.watch = look
    world.clock.run(14.0)
    assert apart
    assert any(account.elsewhere for account in world.routers[0].ledger.accounts.values())
    # Without the bound's help: six tenants that always wait get nearly the same.
    assert max(apart) < 0.25 * 8000 * 2 / 6
