"""Laws of quotas: what is let in is bounded whatever comes in whatever order, and everything ends at zero."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.quota import AT_ONCE, KEPT_HERE, Bucket, Entry, Quotas, Use
from services.shared.errors import LoraportError
from services.shared.quotas import NO_QUOTA, Quota

STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=60)


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(limit=st.integers(1, 100), steps=STEPS)
def test_no_window_takes_more_than_its_share(limit: int, steps: list) -> None:
    """From any moment on, a bucket gives at most what it holds and what flows into it."""
    bucket, now, taken = Bucket(limit, 0.0), 0.0, []
    for pause, amount in steps:
        now += pause
        if bucket.wait_s(amount, limit, now) == 0:
            bucket.take(amount, limit, now)
            taken.append((now, amount))
    for start, _ in taken:
        total = 0
        for at, amount in taken:
            if at >= start:
                total += amount
                assert total <= limit * (1 + (at - start) / 60) + 1e-6


@given(limit=st.integers(1, 100), amount=st.integers(1, 100), debt=st.integers(0, 500))
def test_the_stated_wait_is_long_enough_and_no_longer(limit: int, amount: int, debt: int) -> None:
    bucket = Bucket(limit, 0.0)
    bucket.take(debt, limit, 0.0)
    wait = bucket.wait_s(amount, limit, 0.0)
    if math.isinf(wait):
        assert amount > limit
        return
    assert bucket.wait_s(amount, limit, wait + 1e-6) == 0
    late = Bucket(limit, 0.0)
    late.take(debt, limit, 0.0)
    assert wait == 0 or late.wait_s(amount, limit, wait * 0.99 - 1e-6) > 0


@given(limits=st.lists(st.integers(0, 100), min_size=2, max_size=10), used=st.integers(0, 50))
def test_changing_a_limit_back_and_forth_gives_nothing(limits: list[int], used: int) -> None:
    bucket = Bucket(limits[0], 0.0)
    bucket.take(used, limits[0], 0.0)
    for limit in limits:
        assert bucket.level(limit, 0.0) <= limit - used


Action = Callable[[Quotas, list[Entry]], None]
ACTIONS = st.one_of(
    st.tuples(st.just("enter"), st.integers(0, 1)),
    st.tuples(st.just("use"), st.integers(0, 5)),
    st.tuples(st.just("cold"), st.integers(0, 5)),
    st.tuples(st.just("tokens"), st.integers(1, 20)),
    st.tuples(st.just("began"), st.integers(0, 9)),
    st.tuples(st.just("close"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.integers(1, 30)),
)


@settings(max_examples=150)
@given(actions=st.lists(ACTIONS, max_size=80))
def test_limits_hold_at_every_moment_and_all_ends_at_zero(actions: list[tuple[str, int]]) -> None:
    time, quota = Time(), Quota(in_flight_count=4, queued_count=2, resident_bytes=30, cold_loads_per_minute=3)
    quotas, entries, used = Quotas(time), [], []
    for what, number in actions:
        refused = ""
        try:
            if what == "enter":
                entries.append(quotas.enter(f"t{number}", quota))
            elif what == "wait":
                time.now += number
            elif entries:
                entry = entries[number % len(entries)]
                if what in ("use", "cold") and not entry.revision and entry.open:
                    entry.use(f"r{number}", 10, resident=what == "use")
                elif what == "tokens":
                    entry.tokens(number)
                elif what == "began":
                    entry.began()
                elif what == "close":
                    entry.close()
        except LoraportError as error:
            refused = error.metadata["quota"]
        assert refused in ("", *KEPT_HERE)
        used = [{line.quota: line.used for line in quotas.lines(f"t{number}", quota)} for number in range(2)]
        for row in used:
            assert row["in_flight_count"] <= 4
            assert row["queued_count"] <= min(2, row["in_flight_count"])
            assert row["resident_bytes"] <= 30
    for entry in entries:
        entry.close()
        entry.close()
    for number in range(2):
        row = {line.quota: line.used for line in quotas.lines(f"t{number}", quota)}
        assert (row["in_flight_count"], row["queued_count"], row["resident_bytes"]) == (0, 0, 0)
    for account in quotas._accounts.values():
        assert not account.held
        assert not account.sizes
        assert not account.coming


@given(
    limit=st.integers(3, 40),
    asks=st.lists(st.integers(0, 2), max_size=150),
    linked=st.booleans(),
)
def test_three_routers_let_in_no_more_than_one_would(limit: int, asks: list[int], linked: bool) -> None:
    """Linked, each hears of the others after every call; apart, each keeps to its part."""
    time, quota = Time(), Quota(requests_per_minute=limit)
    routers = [Quotas(time) for _ in range(3)]

    def exchange() -> None:
        told = [router.told() for router in routers]
        for index, router in enumerate(routers):
            router.hear({str(other): told[other] for other in range(3) if other != index}, lambda tenant: quota)

    exchange()
    if not linked:
        for router in routers:
            router.lost()
    admitted = 0
    for index in asks:
        try:
            routers[index].enter("acme", quota)
            admitted += 1
        except LoraportError:
            pass
        if linked:
            exchange()
    assert admitted <= limit
    if not linked:
        assert all(router._accounts["acme"].in_flight <= limit // 3 for router in routers if router._accounts)


def test_a_refusal_costs_nothing_and_says_how_long() -> None:
    time, quotas = Time(), None
    quotas = Quotas(time)
    quota = Quota(requests_per_minute=2)
    for _ in range(2):
        quotas.enter("acme", quota).close()
    for _ in range(5):
        with pytest.raises(LoraportError) as caught:
            quotas.enter("acme", quota)
        assert caught.value.retry_after_s == 30.0
        assert caught.value.quota == ("tenants/acme", "requests_per_minute: at most 2")
    time.now += 30
    quotas.enter("acme", quota)
    line = quotas.lines("acme", quota)[0]
    assert (line.used, line.total, line.refused) == (2, 3, 5)


def test_nothing_at_all_and_no_limit() -> None:
    quotas = Quotas(Time())
    for name in AT_ONCE:
        with pytest.raises(LoraportError) as caught:
            quotas.enter("acme", Quota(**{name: 0}))
        assert caught.value.retry_after_s is None
    with pytest.raises(LoraportError) as caught:
        quotas.enter("acme", Quota(requests_per_minute=0))
    assert caught.value.retry_after_s is None
    entries = [quotas.enter("acme", NO_QUOTA) for _ in range(1000)]
    assert len(entries) == 1000


def test_tokens_may_be_owed_and_are_paid_back() -> None:
    time = Time()
    quotas, quota = Quotas(time), Quota(tokens_per_minute=60)
    time.now += 3600  # idling saves nothing up
    with quotas.enter("acme", quota) as entry:
        entry.tokens(50)
        entry.tokens(100)
    with pytest.raises(LoraportError) as caught:
        quotas.enter("acme", quota)
    assert caught.value.metadata["quota"] == "tokens_per_minute"
    assert caught.value.retry_after_s == 91
    time.now += 91
    quotas.enter("acme", quota)


def test_one_load_for_all_that_wait_for_it() -> None:
    quotas, quota = Quotas(Time()), Quota(cold_loads_per_minute=1)
    entries = [quotas.enter("acme", quota) for _ in range(4)]
    for entry in entries[:3]:
        entry.use("r1", 10, resident=False)
    with pytest.raises(LoraportError) as caught:
        entries[3].use("r2", 10, resident=False)
    assert caught.value.metadata["quota"] == "cold_loads_per_minute"
    entries[3].use("r3", 10, resident=True)
    # Once nobody waits for it any more, not being resident means another load.
    for entry in entries:
        entry.began()
    with pytest.raises(LoraportError):
        quotas.enter("acme", quota).use("r1", 10, resident=False)


def test_what_other_routers_do_counts_from_when_they_are_known() -> None:
    time = Time()
    quotas, quota = Quotas(time), Quota(requests_per_minute=10, in_flight_count=5)
    quotas.enter("acme", quota).close()
    quotas.hear({"b": {"acme": Use((1000, 0, 0), 2, 2)}}, lambda tenant: quota)
    assert quotas.lines("acme", quota)[0].used == 1
    quotas.hear({"b": {"acme": Use((1004, 0, 0), 4, 0)}}, lambda tenant: quota)
    used = {line.quota: line.used for line in quotas.lines("acme", quota)}
    assert (used["requests_per_minute"], used["in_flight_count"], used["queued_count"]) == (5, 4, 0)
    quotas.enter("acme", quota)
    with pytest.raises(LoraportError) as caught:
        quotas.enter("acme", quota)
    assert caught.value.metadata["quota"] == "in_flight_count"
    # Not told of any more: idle there; a router that has gone holds nothing.
    quotas.hear({"b": {}}, lambda tenant: quota)
    assert {line.quota: line.used for line in quotas.lines("acme", quota)}["in_flight_count"] == 1
    quotas.hear({}, lambda tenant: quota)
    assert quotas.routers == 1
