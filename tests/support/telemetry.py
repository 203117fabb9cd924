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

Labels = frozenset[tuple[str, str]]


class Seen:
    """Metrics and spans that were recorded."""

    def __init__(self, reader: InMemoryMetricReader, exporter: InMemorySpanExporter) -> None:
        self._reader = reader
        self._exporter = exporter

    def spans(self) -> list[Any]:
        """Returns the spans that have ended."""
        return list(self._exporter.get_finished_spans())

    def points(self, metric: Metric) -> dict[Labels, float]:
        """Returns a metric's value by its labels; of a histogram the number of values."""
        data = self._reader.get_metrics_data()
        found: dict[Labels, float] = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for one in scope.metrics:
                    if one.name == metric.name:
                        for point in one.data.data_points:
                            value = getattr(point, "count", None)
                            found[frozenset(point.attributes.items())] = point.value if value is None else value
        return found

    def values(self, metric: Metric) -> dict[str, float]:
        """Returns a metric's value by its labels' values, in the order of the table."""
        found = self.points(metric)
        return {" ".join(dict(labels)[name] for name in metric.labels): value for labels, value in found.items()}


@contextmanager
def recording() -> Iterator[Seen]:
    """Records inside; afterwards nothing is recorded again."""
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    before = telemetry.use(MeterProvider([reader]))
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    restore = tracing.use(provider)
    try:
        yield Seen(reader, exporter)
    finally:
        telemetry.restore(before)
        restore()
