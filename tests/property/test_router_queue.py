"""Laws of the router's queue: every accepted request ends once, nobody starves, backlogged tenants stay close."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.fair_queue import MAX_PASSED, FairQueue, Waiting
from services.router.ledger import Bill, Ledger
from services.shared.errors import LoraportError

TENANTS = ("acme", "globex", "initech")
BASES = ("tiny", "large")
MAX_QUEUED, MAX_RUNNING, RESIDENCE_S = 4, 3, 30.0


@dataclass(frozen=True)
class Spot:
    """A place on an executor."""

    cold: bool = False


WARM = Spot()


def request(
    number: int, tenant: str, *, base: str = "tiny", tokens: int = 1, priority: int = 0, arrived: float = 0.0,
    revision: str = "", weight: float = 1.0,
) -> Waiting:  # fmt: skip
    return Waiting(
        id=str(number), tenant=tenant, base_model=base, revision_id=revision, rank=0, prompt_tokens=tokens,
        priority=priority, arrived=arrived, weight=weight,
    )  # fmt: skip


def queue_of(ledger: Ledger, *, running: int = 10_000, queued: int = 10_000) -> FairQueue:
    return FairQueue(ledger, max_queued=queued, max_running=running, residence_s=1e9)


class QueueMachine(RuleBasedStateMachine):
    """Compares the queue with three plain sets: waiting, running, ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.queue = FairQueue(self.ledger, max_queued=MAX_QUEUED, max_running=MAX_RUNNING, residence_s=RESIDENCE_S)
        self.now, self.number = 0.0, 0
        self.waiting: dict[str, Waiting] = {}
        self.running: dict[str, Waiting] = {}
        self.ended: set[str] = set()

    @rule(tenant=st.sampled_from(TENANTS), base=st.sampled_from(BASES), priority=st.integers(-10, 10))
    def arrive(self, tenant: str, base: str, priority: int) -> None:
        self.number += 1
        new = request(self.number, tenant, base=base, priority=priority, arrived=self.now)
        full = sum(item.tenant == tenant for item in self.waiting.values()) == MAX_QUEUED
        if full:
            with pytest.raises(LoraportError) as caught:
                self.queue.offer(new)
            assert (caught.value.reason, caught.value.retry_after_s) == ("OVERLOADED", 1.0)
        else:
            self.queue.offer(new)
            self.waiting[new.id] = new

    @rule(bases=st.frozensets(st.sampled_from(BASES)), blocked=st.frozensets(st.sampled_from(TENANTS)))
    def take(self, bases: frozenset[str], blocked: frozenset[str]) -> None:
        for base in BASES:
            self.queue.wake(base, 100)
        turn = self.queue.take(bases, lambda item: None if item.tenant in blocked else WARM, now=self.now)
        running = [item.tenant for item in self.running.values()]
        may = {
            item.id
            for item in self.waiting.values()
            if item.base_model in bases and running.count(item.tenant) < MAX_RUNNING and item.tenant not in blocked
        }
        if turn is None:
            assert not may
        else:
            assert turn.request.id in may
            self.running[turn.request.id] = self.waiting.pop(turn.request.id)
            self.ledger.open(turn.request.tenant, prefill_ms=1.0)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(sorted([*self.waiting, *self.running, *self.ended, "nobody"])))
        item = self.waiting.get(known) or self.running.get(known) or request(0, "acme")
        assert self.queue.withdraw(item) == (known in self.waiting)
        if self.waiting.pop(known, None):
            self.ended.add(known)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(sorted([*self.running, *self.ended, "nobody"])))
        self.queue.finish(known)
        if self.running.pop(known, None):
            self.ended.add(known)

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for item in self.queue.expire(self.now):
            assert self.now - item.arrived >= RESIDENCE_S
            del self.waiting[item.id]
            self.ended.add(item.id)
        assert all(self.now - item.arrived < RESIDENCE_S for item in self.waiting.values())

    @invariant()
    def counts_agree(self) -> None:
        assert {item.id for item in self.queue.waiting()} == set(self.waiting)
        assert len(self.queue) == len(self.waiting)
        states = {state.tenant: (state.queued, state.running) for state in self.queue.states(self.now)}
        for tenant in TENANTS:
            queued = sum(item.tenant == tenant for item in self.waiting.values())
            running = sum(item.tenant == tenant for item in self.running.values())
            assert states.get(tenant, (0, 0)) == (queued, running)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40)

# Prompt, decode steps, and load of a tenant's requests, in ms.
WORK = st.tuples(st.integers(1, 50), st.integers(1, 50), st.integers(0, 200))


@given(
    costs=st.dictionaries(st.sampled_from(TENANTS), WORK, min_size=2),
    slots=st.integers(1, 6),
    steps=st.integers(50, 250),
    data=st.data(),
)
@settings(max_examples=60)
def test_tenants_that_always_wait_stay_within_the_bound(
    costs: dict[str, tuple[int, int, int]], slots: int, steps: int, data: st.DataObject
) -> None:
    """Whatever a tenant's requests cost, and however much of it was foretold, its counter differs from any other's by no
    more than the published bound; also when a tenant cannot be served for a while."""
    ledger = Ledger()
    queue = queue_of(ledger)
    number, served = 0, dict.fromkeys(costs, 0)
    running: list[tuple[Waiting, int, Bill]] = []
    foretold = data.draw(st.floats(0.0, 2.0))
    blocked = data.draw(st.sampled_from(["", *costs]))
    for step in range(steps):
        for tenant, (prompt, _decode, _load) in costs.items():
            while sum(item.tenant == tenant for item in queue.waiting()) <= slots:
                number += 1
                queue.offer(request(number, tenant, tokens=prompt))
        out = blocked if 20 <= step < 40 else ""
        queue.wake("tiny")
        while len(running) < slots:
            turn = queue.take({"tiny"}, lambda item: None if item.tenant == out else WARM, now=step)  # noqa: B023
            if turn is None:
                break
            tenant = turn.request.tenant
            bill = ledger.open(tenant, prefill_ms=costs[tenant][0], load_ms=costs[tenant][2] * foretold)
            running.append((turn.request, costs[tenant][1], bill))
            served[tenant] += 1
        for _item, left, bill in running:
            if left == costs[bill.tenant][1]:
                bill.loaded(costs[bill.tenant][2])
            bill.decode(2.0)
        for item, left, _ in running:
            if left == 1:
                queue.finish(item.id)
        running = [(item, left - 1, bill) for item, left, bill in running if left > 1]
        counters = [ledger.counter(tenant) for tenant in costs if tenant != out]
        assert max(counters) - min(counters) <= ledger.bound_ms(running=slots) + 1e-6
    if steps >= 250:
        assert min(served.values()) > 0


@given(weights=st.tuples(st.floats(0.25, 4), st.floats(0.25, 4)))
@settings(max_examples=30)
def test_weights_divide_work(weights: tuple[float, float]) -> None:
    ledger = Ledger()
    queue = queue_of(ledger)
    for number in range(1000):
        tenant = number % 2
        queue.offer(request(number, TENANTS[tenant], weight=weights[tenant]))
    for _ in range(300):
        turn = queue.take({"tiny"}, lambda _: WARM, now=0.0)
        ledger.open(turn.request.tenant, prefill_ms=10.0)
    work = [ledger.accounts[tenant].work for tenant in TENANTS[:2]]
    assert abs(work[0] / weights[0] - work[1] / weights[1]) <= 2 * 10.0 / min(weights)


@given(burst=st.integers(1, 30), empty=st.booleans())
def test_a_returning_tenant_does_not_bring_its_idle_time_along(burst: int, empty: bool) -> None:
    """Also not when nobody waits in the moment of its return."""
    ledger = Ledger()
    queue = queue_of(ledger)
    queue.offer(request(9000, "returning", tokens=10))
    queue.take({"tiny"}, lambda _: WARM, now=0.0)
    for number in range(100):
        queue.offer(request(number, "busy", tokens=10))
    for _ in range(100 if empty else 50):
        turn = queue.take({"tiny"}, lambda _: WARM, now=0.0)
        ledger.open(turn.request.tenant, prefill_ms=10.0)
    for number in range(burst):
        queue.offer(request(1000 + number, "returning", tokens=10))
    for number in range(burst):
        queue.offer(request(2000 + number, "busy", tokens=10))
    taken = []
    for _ in range(2 * burst):
        turn = queue.take({"tiny"}, lambda _: WARM, now=0.0)
        ledger.open(turn.request.tenant, prefill_ms=10.0)
        taken.append(turn.request.tenant)
    assert abs(taken.count("busy") - taken.count("returning")) <= 2


def test_what_was_charged_too_much_pays_for_the_next_work_only() -> None:
    ledger = Ledger()
    bill = ledger.open("acme", prefill_ms=100.0)
    bill.computed(20.0)
    assert ledger.counter("acme") == 100.0
    ledger.open("acme", prefill_ms=70.0)
    assert ledger.counter("acme") == 100.0
    ledger.open("acme", prefill_ms=70.0)
    assert (ledger.counter("acme"), ledger.accounts["acme"].work) == (160.0, 160.0)
    # Nothing of it lasts through an idle time.
    ledger.open("acme", prefill_ms=50.0).computed(0.0)
    ledger.lift("acme", 1000.0)
    ledger.open("acme", prefill_ms=10.0)
    assert ledger.counter("acme") == 1010.0


def test_a_request_that_needs_no_load_passes_until_the_head_has_waited_enough() -> None:
    ledger = Ledger()
    queue = queue_of(ledger)
    queue.offer(request(0, "acme", revision="cold"))
    for number in range(1, 60):
        queue.offer(request(number, "acme", revision="warm"))
    order = []
    for _ in range(20):
        turn = queue.take({"tiny"}, lambda item: Spot(cold=item.revision_id == "cold"), now=0.0)
        order.append((turn.request.revision_id, turn.passed))
    assert order[:MAX_PASSED] == [("warm", True)] * MAX_PASSED
    assert order[MAX_PASSED] == ("cold", False)
    # And by time: two seconds after it was passed first.
    queue.offer(request(100, "globex", revision="cold"))
    queue.offer(request(101, "globex", revision="warm"))
    queue.offer(request(102, "globex", revision="warm"))
    only_warm = {"warm": WARM}
    turn = queue.take({"tiny"}, lambda item: only_warm.get(item.revision_id), now=10.0)
    assert turn.request.id == "101" or turn.request.tenant == "acme"


def test_a_head_that_was_passed_too_often_holds_its_own_tenant_only() -> None:
    ledger = Ledger()
    queue = queue_of(ledger)
    queue.offer(request(0, "acme", revision="cold"))
    for number in range(1, 60):
        queue.offer(request(number, "acme", revision="warm"))
    only_warm = {"warm": WARM}
    for _ in range(MAX_PASSED):
        assert queue.take({"tiny"}, lambda item: only_warm.get(item.revision_id), now=0.0) is not None
    assert queue.take({"tiny"}, lambda item: only_warm.get(item.revision_id), now=0.0) is None
    queue.offer(request(100, "globex", revision="warm"))
    assert queue.take({"tiny"}, lambda item: only_warm.get(item.revision_id), now=0.0).request.tenant == "globex"
    queue.wake("tiny")
    assert queue.take({"tiny"}, lambda _: Spot(cold=True), now=0.0).request.revision_id == "cold"


@given(st.lists(st.integers(1, 100), min_size=2, max_size=12), st.integers(1, 4), st.integers(1, 20))
@settings(max_examples=60)
def test_every_request_starts_within_a_bound(prompts: list[int], slots: int, depth: int) -> None:
    """Tenants that all wait with `depth` requests each, of different size: before a request starts, no tenant can have
    had more work than that request's tenant, and the bound on their spread. Each admission is at least the least prompt,
    so the number of admissions before it is bounded."""
    ledger = Ledger()
    queue = queue_of(ledger)
    tenants = [f"t{index:02d}" for index in range(len(prompts))]
    for number in range(depth):
        for index, tenant in enumerate(tenants):
            queue.offer(request(number * 100 + index, tenant, tokens=prompts[index]))
    running: list[Waiting] = []
    started: dict[str, int] = {}
    while len(queue):
        turn = queue.take({"tiny"}, lambda _: WARM, now=0.0)
        started[turn.request.id] = len(started)
        ledger.open(turn.request.tenant, prefill_ms=turn.request.prompt_tokens)
        running.append(turn.request)
        if len(running) == slots:
            queue.finish(running.pop(0).id)
    bound = ledger.bound_ms(running=slots)
    for number in range(depth):
        for index, prompt in enumerate(prompts):
            own = (number + 1) * prompt
            most = sum(min(depth, (own + bound) // other + 1) for other in prompts)
            assert started[str(number * 100 + index)] <= most
