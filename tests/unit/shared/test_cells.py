"""Series as we count them, beside OpenTelemetry's own."""

import sys
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
from opentelemetry.trace import SpanContext, TraceFlags

from services.shared import telemetry, tracing
from services.shared.cells import Buckets
from services.shared.metrics import LOOKUPS, TTFT
from tests.support.telemetry import Reader, recording

THREADS, TIMES = 4, 2_000
SAMPLED = TraceFlags(TraceFlags.SAMPLED)

STARTS = st.sampled_from(["warm", "cold", "base", "acme", "globex", "other"])
CLASSES = st.sampled_from(["standard", "high", "acme"])
# Bounds belong to the bucket below them.
VALUES = st.one_of(st.sampled_from(TTFT.buckets), st.floats(0, 100), st.floats(), st.integers(-1, 100))
SEEN = st.lists(st.tuples(VALUES, STARTS, CLASSES), max_size=30)


def points(reader: InMemoryMetricReader) -> dict[frozenset[tuple[str, Any]], Any]:
    """Returns the points of the one histogram that a reader knows, by their labels."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    [metric] = data.resource_metrics[0].scope_metrics[0].metrics
    assert metric.data.aggregation_temporality == AggregationTemporality.CUMULATIVE
    assert (metric.name, metric.unit, metric.description) == (TTFT.name, TTFT.unit, TTFT.help)
    return {frozenset(point.attributes.items()): point for point in metric.data.data_points}


@given(SEEN, SEEN)
def test_a_histogram_is_what_opentelemetry_would_have_made(first: list, then: list) -> None:
    ours, theirs = Reader(), InMemoryMetricReader()
    meter = MeterProvider([theirs], shutdown_on_exit=False).get_meter("theirs")
    histogram = meter.create_histogram(
        TTFT.name, unit=TTFT.unit, description=TTFT.help, explicit_bucket_boundaries_advisory=list(TTFT.buckets)
    )
    before = telemetry.use(MeterProvider([ours], shutdown_on_exit=False))
    try:
        for seen in (first, then):
            for value, start, tenant_class in seen:
                telemetry.observe(TTFT, value, start=start, tenant_class=tenant_class)
                histogram.record(value, TTFT.bounded({"start": start, "tenant_class": tenant_class}))
            found, wanted = points(ours), points(theirs)
            assert set(found) == set(wanted)
            for labels, point in wanted.items():
                mine = found[labels]
                assert (mine.count, mine.bucket_counts) == (point.count, point.bucket_counts)
                assert mine.explicit_bounds == point.explicit_bounds == TTFT.buckets
                assert (mine.min, mine.max, mine.sum) == (point.min, point.max, pytest.approx(point.sum))
                assert mine.start_time_unix_nano <= mine.time_unix_nano
    finally:
        telemetry.restore(before)


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=30))
def test_a_bucket_names_its_newest_sampled_trace(seen: list[tuple[float, bool]]) -> None:
    cell, newest = Buckets(TTFT.buckets), {}
    for trace_id, (value, sampled) in enumerate(seen, 1):
        cell.put(value, SpanContext(trace_id, 7, is_remote=False, trace_flags=SAMPLED) if sampled else None)
        if sampled:
            newest[bisect_left(TTFT.buckets, value)] = (value, trace_id, 7)
    for _ in range(2):  # whoever reads later is told as well
        point = cell.point({}, 0)
        assert [(one.value, one.trace_id, one.span_id) for one in point.exemplars] == [
            newest[place] for place in sorted(newest)
        ]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_only_a_sampled_span_is_named(ratio: float) -> None:
    def call() -> None:
        tracing.enter(min(tracing.ROOTS), {}, request_id="r", trusted=False)
        telemetry.observe(TTFT, 0.2, start="warm", tenant_class="standard")

    with recording(ratio=ratio) as seen:
        copy_context().run(call)
        assert len(seen.exemplars(TTFT)) == ratio
        assert seen.values(TTFT) == {"warm standard": 1}


def test_labels_in_another_order_are_the_same_series() -> None:
    with recording() as seen:
        telemetry.observe(TTFT, 0.2, start="warm", tenant_class="standard")
        telemetry.observe(TTFT, 0.2, tenant_class="standard", start="warm")
        assert seen.values(TTFT) == {"warm standard": 2}


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads that take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_lose_nothing_of_each_other(hasty: None) -> None:
    def work(number: int) -> None:
        for time in range(TIMES):
            telemetry.count(LOOKUPS, tier="HOST", result="hit")
            telemetry.observe(TTFT, time % 2, start="warm", tenant_class=("standard", "high")[number % 2])

    with recording() as seen:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))
        assert seen.values(LOOKUPS) == {"HOST hit": THREADS * TIMES}
        assert seen.values(TTFT) == dict.fromkeys(("warm standard", "warm high"), THREADS * TIMES / 2)
        assert [point.sum for point in telemetry.histogram_points(TTFT)] == [THREADS * TIMES / 4] * 2
