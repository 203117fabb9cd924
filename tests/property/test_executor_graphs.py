"""Graph buckets: a step is never replayed on less than it needs, and the budget is never passed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.executor.kernels.graphs import (
    Bucket,
    CaptureBudget,
    CaptureCost,
    Variants,
    adapter_counts,
    all_buckets,
    choose_bucket,
    plan_captures,
    row_sizes,
)

COST = CaptureCost(layers=32, row_bytes=2**20)
ENOUGH = CaptureBudget(seconds=1e9, bytes=2**60)
limits = st.tuples(st.integers(1, 600), st.integers(1, 100))


def every_bucket(max_rows: int, max_adapters: int, variants: Variants) -> list[Bucket]:
    return [bucket for _, bucket in all_buckets(max_rows=max_rows, max_adapters=max_adapters, variants=variants)]


def variants(rows: int, adapters: int) -> tuple[str, ...]:
    """Some steps want the same kernels whatever their ranks are."""
    return ("b-usual",) if rows < 4 * adapters else ("b-usual", "a-wide")


def one(rows: int, adapters: int) -> tuple[str, ...]:
    return ("b-usual",)


@given(limits, st.data())
def test_a_step_takes_the_smallest_bucket_that_holds_it(limit: tuple[int, int], data: st.DataObject) -> None:
    max_rows, max_adapters = limit
    rows = data.draw(st.integers(1, max_rows))
    adapters = data.draw(st.integers(0, min(rows, max_adapters)))
    captured = plan_captures(max_rows=max_rows, max_adapters=max_adapters, variants=variants, cost=COST, budget=ENOUGH)
    assert set(captured) == set(every_bucket(max_rows, max_adapters, variants))
    own = data.draw(st.sampled_from(["b-usual", "a-wide", "other"]))
    bucket = choose_bucket(captured, rows=rows, adapters=adapters, variant=own)
    assert bucket is not None
    there = {b.variant for b in captured if (b.rows, b.adapters) == (bucket.rows, bucket.adapters)}
    assert (bucket.variant == own) == (own in there), "its own kernels, if they were captured at that size"
    assert bucket.rows >= rows
    assert bucket.adapters >= adapters
    assert (bucket.adapters == 0) == (adapters == 0)
    size = (bucket.rows, bucket.adapters)
    smaller = [b for b in captured if (b.rows, b.adapters) < size and b.rows >= rows and b.adapters >= adapters]
    assert all((b.adapters == 0) != (adapters == 0) for b in smaller)
    assert bucket.rows == min(size for size in row_sizes(max_rows) if size >= rows)
    if adapters:
        assert bucket.adapters == min(count for count in adapter_counts(max_adapters) if count >= adapters)


@given(limits, st.floats(0, 100), st.integers(0, 2**31))
def test_captures_stay_within_the_budget(limit: tuple[int, int], seconds: float, size: int) -> None:
    max_rows, max_adapters = limit
    budget = CaptureBudget(seconds=seconds, bytes=size)
    captured = plan_captures(max_rows=max_rows, max_adapters=max_adapters, variants=variants, cost=COST, budget=budget)
    assert sum(COST.seconds(b) for b in captured) <= seconds
    if captured:
        assert sum(COST.own_bytes(b) for b in captured) + COST.row_bytes * max_rows <= size
        assert Bucket(max_rows, max_adapters, "b-usual") in captured or max_adapters > max_rows
    usual = [b for b in captured if b.variant != "a-wide"]
    assert list(captured[: len(usual)]) == sorted(usual, reverse=True), "large first"
    assert list(captured[len(usual) :]) == sorted(set(captured) - set(usual), reverse=True), "then what is a luxury"
    if len(usual) < len(captured):
        every = every_bucket(max_rows, max_adapters, one)
        assert set(usual) == set(every), "which is not paid for with what is usual"
    assert len(set(captured)) == len(captured)


@given(limits, st.data())
def test_whatever_is_captured_a_step_is_held_or_runs_eagerly(limit: tuple[int, int], data: st.DataObject) -> None:
    max_rows, max_adapters = limit
    every = every_bucket(max_rows, max_adapters, variants)
    some = data.draw(st.lists(st.sampled_from(every), unique=True))
    rows = data.draw(st.integers(1, max_rows * 2))
    adapters = data.draw(st.integers(0, min(rows, max_adapters * 2)))
    bucket = choose_bucket(some, rows=rows, adapters=adapters)
    fits = [b for b in some if b.rows >= rows and b.adapters >= adapters and (b.adapters == 0) == (adapters == 0)]
    assert bucket == (min(fits, key=lambda b: (b.rows, b.adapters, b.variant)) if fits else None)


def test_the_buckets_of_a_common_size() -> None:
    assert row_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert adapter_counts(64) == (0, 1, 2, 4, 8, 16, 64)
    assert adapter_counts(16) == (0, 1, 2, 4, 8, 16)
    assert Bucket(1, 2, "b-usual") not in every_bucket(64, 64, one)
    buckets = every_bucket(64, 64, one)
    assert (len(buckets), round(sum(COST.seconds(b) for b in buckets), 1)) == (62, 3.9)
    assert sum(COST.own_bytes(b) for b in buckets) // 2**20 == 257
