"""The Prometheus page: what OpenTelemetry's reader shows, and beside a bucket of a histogram the newest trace in it.

Who accepts OpenMetrics gets the exemplars, which that reader leaves out; the older text format has no place for them.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics.export import HistogramDataPoint, MetricsData
from opentelemetry.trace import format_span_id, format_trace_id
from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar
from prometheus_client.core import Metric as Family

from services.shared.readers import filled, histograms

Bucket = tuple[str, frozenset[tuple[str, str]]]
OVERFLOW = "+Inf"


class PageReader(PrometheusMetricReader):
    """The reader of a meter provider, and the page's collector for `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Of what was read last.
        self._exemplars: dict[Bucket, Exemplar] = {}
        # Two who fetch at once would take each other's halves.
        self._lock = threading.Lock()
        self._plain = CollectorRegistry()
        super().__init__(scope_info_enabled=False, registry=self._plain)
        registry.register(_Page(self))

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        data = filled(metrics_data)
        self._exemplars = {
            bucket: exemplar
            for metric, points in histograms(data)
            for point in points
            for bucket, exemplar in _exemplars(metric.prometheus, point)
        }
        super()._receive_metrics(data, timeout_millis, **kwargs)

    def families(self) -> list[Family]:
        """Returns what the page shows now."""
        with self._lock:
            families = list(self._plain.collect())
            for family in families:
                if family.type == "histogram":
                    family.samples = [self._with_trace(family.name, sample) for sample in family.samples]
            return families

    def _with_trace(self, name: str, sample: Any) -> Any:
        found = self._exemplars.get((name, frozenset(sample.labels.items())))
        return sample._replace(exemplar=found) if found is not None else sample


class _Page:
    """A collector that names nothing before it is asked: by then the reader has its provider."""

    def __init__(self, reader: PageReader) -> None:
        self._reader = reader

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> list[Family]:
        return self._reader.families()


def _exemplars(name: str, point: HistogramDataPoint) -> Iterator[tuple[Bucket, Exemplar]]:
    for one in point.exemplars:
        labels = {key: str(value) for key, value in (point.attributes or {}).items()}
        labels["le"] = _bucket(point.explicit_bounds, one.value)
        ids = {"trace_id": format_trace_id(one.trace_id or 0), "span_id": format_span_id(one.span_id or 0)}
        yield (name, frozenset(labels.items())), Exemplar(ids, one.value, one.time_unix_nano / 1e9)


def _bucket(bounds: Sequence[float], value: float) -> str:
    """Returns the `le` of the bucket that counts a value, written as the reader writes it."""
    place = bisect_left(bounds, value)
    return f"{bounds[place]}" if place < len(bounds) else OVERFLOW
