"""The table of metrics: its names are those at the endpoint, its labels are closed, and services record all of it."""

import re
from collections.abc import Iterator
from contextvars import copy_context

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.trace import Span
from prometheus_client import CollectorRegistry, generate_latest

from services.loader.examine import INTAKE_VIOLATIONS
from services.router.ledger import KINDS
from services.shared import metrics, telemetry, tracing
from services.shared.metrics import METRICS, OTHER, Metric, tenant_class
from services.shared.readers import Filled
from tests.architecture.source import ROOT
from tests.support.telemetry import recording

ONE_OF_EACH = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)


def test_every_kind_of_work_that_is_charged_has_its_label() -> None:
    assert metrics.WORK.labels["work"] == set(KINDS)


class Page(Filled, PrometheusMetricReader):
    """The page as the library makes it."""


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """What the endpoint would show, of this test alone."""
    registry = CollectorRegistry()
    reader = Page(scope_info_enabled=False, disable_target_info=True, registry=registry)
    before = telemetry.use(MeterProvider([reader]))
    yield registry
    telemetry.restore(before)


def record(metric: Metric, **labels: str) -> None:
    """Records one value, as services do for this kind of metric."""
    {"counter": telemetry.count, "gauge": telemetry.gauge, "histogram": telemetry.observe}[metric.kind](
        metric, 1.0, **labels
    )


def series(registry: CollectorRegistry) -> set[str]:
    """Returns the names of all series."""
    lines = generate_latest(registry).decode().splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if line and not line.startswith("#")}


@ONE_OF_EACH
def test_names_are_those_at_the_endpoint(metric: Metric, registry: CollectorRegistry) -> None:
    record(metric, **{name: min(values) for name, values in metric.labels.items()})
    assert series(registry) == set(metric.series_names)


def test_ten_thousand_names_become_one_series_each(registry: CollectorRegistry) -> None:
    for metric in METRICS.values():
        for number in range(10_000 // len(METRICS) + 1):
            record(metric, **dict.fromkeys(metric.labels, f"tenant-{number}"))
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert not [line for line in lines if "tenant-" in line]
    counted = [line for line in lines if "_bucket{" not in line and not re.match(r"\S+_(sum|count)\b", line)]
    assert len(counted) == sum(metric.kind != "histogram" for metric in METRICS.values())


@ONE_OF_EACH
def test_a_metric_has_its_labels_and_no_other(metric: Metric) -> None:
    good = {name: next(iter(values)) for name, values in metric.labels.items()}
    assert metric.bounded(good) == good
    assert set(metric.bounded(dict.fromkeys(good, "x" * 99)).values()) <= {OTHER}
    with pytest.raises(KeyError):
        metric.bounded(good | {"tenant": "acme"})


@ONE_OF_EACH
def test_each_service_of_a_metric_records_it(metric: Metric) -> None:
    """By the name of its constant in the service's room, or in the one that all servers share."""
    constant = next(name for name, value in vars(metrics).items() if value is metric)
    for service in metric.services:
        rooms = (ROOT / "services" / service, ROOT / "services" / "shared" / "rpc")
        found = any(f"metrics.{constant}" in path.read_text() for room in rooms for path in room.rglob("*.py"))
        assert found, f"{service} never records {metric.name}"


def test_every_violation_of_an_intake_has_its_label() -> None:
    assert set(INTAKE_VIOLATIONS) <= metrics.REFUSALS.labels["code"]


def test_classes_of_tenants() -> None:
    assert [tenant_class(weight) for weight in (0.1, 1.0, 1.5)] == ["low", "standard", "high"]


def test_a_point_of_a_traced_request_names_its_trace() -> None:
    def call() -> Span:  # what is current then ends with its context, as with the task of a real call
        span = tracing.enter(min(tracing.ROOTS), {}, request_id="r", trusted=False)
        telemetry.observe(metrics.TTFT, 0.2, start="warm", tenant_class="standard")
        return span

    with recording() as seen:
        span = copy_context().run(call)
        [exemplar] = seen.exemplars(metrics.TTFT)
    assert (exemplar.trace_id, exemplar.span_id) == (span.get_span_context().trace_id, span.get_span_context().span_id)


def test_recording_before_the_start_does_nothing() -> None:
    for metric in METRICS.values():
        record(metric, **dict.fromkeys(metric.labels, "x"))
