"""Laws of the router's queue: every accepted request ends once, nobody starves, backlogged tenants stay close."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.fair_queue import FairQueue, Waiting
from services.router.ledger import Ledger
from services.shared.errors import LoraportError

TENANTS = ("acme", "globex", "initech")
BASES = ("tiny", "large")
MAX_QUEUED, MAX_RUNNING, RESIDENCE_S = 4, 3, 30.0


def request(
    number: int, tenant: str, *, base: str = "tiny", tokens: int = 1, priority: int = 0, arrived: float = 0.0
) -> Waiting:
    return Waiting(
        id=str(number), tenant=tenant, base_model=base, revision_id="", rank=0, prompt_tokens=tokens,
        priority=priority, arrived=arrived,
    )  # fmt: skip


class QueueMachine(RuleBasedStateMachine):
    """Compares the queue with three plain sets: waiting, running, ended."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(
            Ledger(prefill_ms_per_token=1, decode_ms_per_token=2),
            max_queued=MAX_QUEUED,
            max_running=MAX_RUNNING,
            residence_s=RESIDENCE_S,
        )
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

    @rule(bases=st.frozensets(st.sampled_from(BASES)))
    def take(self, bases: frozenset[str]) -> None:
        taken = self.queue.take(bases, lambda _: True)
        running = [item.tenant for item in self.running.values()]
        may = {
            item.id
            for item in self.waiting.values()
            if item.base_model in bases and running.count(item.tenant) < MAX_RUNNING
        }
        if taken is None:
            assert not may
        else:
            assert taken.id in may
            self.running[taken.id] = self.waiting.pop(taken.id)

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
        states = {state.tenant: (state.queued, state.running) for state in self.queue.states(self.now)}
        for tenant in TENANTS:
            queued = sum(item.tenant == tenant for item in self.waiting.values())
            running = sum(item.tenant == tenant for item in self.running.values())
            assert states.get(tenant, (0, 0)) == (queued, running)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

WORK = st.tuples(st.integers(1, 50), st.integers(1, 50))


@given(
    costs=st.dictionaries(st.sampled_from(TENANTS), WORK, min_size=2),
    slots=st.integers(1, 4),
    steps=st.integers(50, 300),
)
@settings(max_examples=60, deadline=None)
def test_tenants_that_always_wait_stay_within_the_bound(
    costs: dict[str, tuple[int, int]], slots: int, steps: int
) -> None:
    """Whatever a tenant's requests cost, the work that it got differs from any other's by no more than the bound."""
    ledger = Ledger(prefill_ms_per_token=1, decode_ms_per_token=2)
    queue = FairQueue(ledger, max_queued=4, max_running=slots, residence_s=1e9)
    number, served = 0, dict.fromkeys(costs, 0)
    running: list[tuple[Waiting, int]] = []
    for _ in range(steps):
        for tenant, (prompt, _decode) in costs.items():
            while sum(item.tenant == tenant for item in queue.waiting()) < 2:
                number += 1
                queue.offer(request(number, tenant, tokens=prompt))
        while len(running) < slots and (taken := queue.take(frozenset({"tiny"}), lambda _: True)):
            running.append((taken, costs[taken.tenant][1]))
            served[taken.tenant] += 1
        # One decode step: every running request makes a token.
        for item, _ in running:
            ledger.charge_decode(item.tenant, 1)
        for item, left in running:
            if left == 1:
                queue.finish(item.id)
        running = [(item, left - 1) for item, left in running if left > 1]
        counters = [ledger.counter(tenant) for tenant in costs]
        bound = ledger.bound_ms(running=slots, prompt_tokens=50, completion_tokens=50)
        assert max(counters) - min(counters) <= bound
    if steps >= 250:
        assert min(served.values()) > 0


@given(burst=st.integers(1, 30))
def test_a_returning_tenant_does_not_bring_its_idle_time_along(burst: int) -> None:
    ledger = Ledger(prefill_ms_per_token=1, decode_ms_per_token=2)
    queue = FairQueue(ledger, max_queued=1000, max_running=1000, residence_s=1e9)
    for number in range(100):
        queue.offer(request(number, "busy", tokens=10))
    for _ in range(50):
        queue.take(frozenset({"tiny"}), lambda _: True)
    for number in range(burst):
        queue.offer(request(1000 + number, "returning", tokens=10))
    taken = [queue.take(frozenset({"tiny"}), lambda _: True).tenant for _ in range(2 * burst)]
    assert abs(taken.count("busy") - taken.count("returning")) <= 1
