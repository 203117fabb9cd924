"""What services record, seen without the process's own providers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.shared import telemetry, tracing
from services.shared.metrics import Metric
from services.shared.readers import Filled

Labels = frozenset[tuple[str, str]]


class Reader(Filled, InMemoryMetricReader):
    """Keeps what a reader of metrics is told."""


class Seen:
    """Metrics and spans that were recorded."""

    def __init__(self, reader: Reader, exporter: InMemorySpanExporter) -> None:
        self._reader = reader
        self._exporter = exporter

    def spans(self) -> list[Any]:
        """Returns the spans that have ended."""
        return list(self._exporter.get_finished_spans())

    def points(self, metric: Metric) -> dict[Labels, float]:
        """Returns a metric's value by its labels; of a histogram the number of values."""
        return {
            frozenset(point.attributes.items()): point.value if not hasattr(point, "count") else point.count
            for point in self._points(metric)
        }

    def exemplars(self, metric: Metric) -> list[Any]:
        """Returns the exemplars of a histogram."""
        return [exemplar for point in self._points(metric) for exemplar in point.exemplars]

    def _points(self, metric: Metric) -> list[Any]:
        data = self._reader.get_metrics_data()
        scopes = [scope for resource in (data.resource_metrics if data else ()) for scope in resource.scope_metrics]
        found = [one for scope in scopes for one in scope.metrics if one.name == metric.name]
        return [point for one in found for point in one.data.data_points]

    def values(self, metric: Metric) -> dict[str, float]:
        """Returns a metric's value by its labels' values, in the order of the table."""
        found = self.points(metric)
        return {" ".join(dict(labels)[name] for name in metric.labels): value for labels, value in found.items()}


@contextmanager
def recording(*, ratio: float = 1.0) -> Iterator[Seen]:
    """Records inside, of requests the part `ratio`; afterwards nothing is recorded again."""
    reader, exporter = Reader(), InMemorySpanExporter()
    before = telemetry.use(MeterProvider([reader]))
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    restore = tracing.use(provider, ratio=ratio)
    try:
        yield Seen(reader, exporter)
    finally:
        telemetry.restore(before)
        restore()
