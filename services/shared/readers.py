"""OpenTelemetry's readers of metrics, which are told the histograms that the recorder keeps itself."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.export import Metric as Read

from services.shared import telemetry
from services.shared.metrics import METRICS, Metric


class Filled(MetricReader):
    """Put before one of OpenTelemetry's readers: what that receives has the histograms of `telemetry`."""

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        # The method that OpenTelemetry documents for this; the reader behind goes on with it.
        super()._receive_metrics(filled(metrics_data), timeout_millis, **kwargs)  # type: ignore[safe-super]


class OtlpReader(Filled, PeriodicExportingMetricReader):
    """Sends all metrics now and then."""


def filled(data: MetricsData) -> MetricsData:
    """Returns what OpenTelemetry has read, with histograms in the places of their numbers of values."""

    def resource(one: ResourceMetrics) -> ResourceMetrics:
        return replace(one, scope_metrics=[scope(inner) for inner in one.scope_metrics])

    def scope(one: ScopeMetrics) -> ScopeMetrics:
        return replace(one, metrics=[_metric(inner) for inner in one.metrics])

    return replace(data, resource_metrics=[resource(one) for one in data.resource_metrics])


def histograms(data: MetricsData) -> Iterator[tuple[Metric, Sequence[HistogramDataPoint]]]:
    """Yields the histograms of the table that are in `data`, each with the points of its series."""
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for read in scope.metrics:
                if read.name in METRICS and isinstance(read.data, Histogram):
                    yield METRICS[read.name], read.data.data_points


def _metric(read: Read) -> Read:
    known = METRICS.get(read.name)
    if known is None or known.kind != "histogram":
        return read
    return replace(read, data=Histogram(telemetry.histogram_points(known), AggregationTemporality.CUMULATIVE))
