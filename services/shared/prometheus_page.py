"""The Prometheus page: what OpenTelemetry's reader shows, and beside a bucket of a histogram the newest trace in it.

Who accepts OpenMetrics gets the exemplars; the older text format has no place for them. They are kept here, because the
reader forgets one as soon as a page has shown it, and there may be two who fetch.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics.export import Histogram, HistogramDataPoint, MetricsData
from opentelemetry.trace import format_span_id, format_trace_id
from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar
from prometheus_client.core import Metric as Family

from services.shared.metrics import METRICS

Bucket = tuple[str, frozenset[tuple[str, str]]]
OVERFLOW = "+Inf"


class PageReader(PrometheusMetricReader):
    """The reader of a meter provider, and the page's collector for `registry`.

    It holds one exemplar for each bucket that has had one: no more than there are series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._newest: dict[Bucket, Exemplar] = {}
        # Two who fetch at once would take each other's halves.
        self._lock = threading.Lock()
        self._plain = CollectorRegistry()
        super().__init__(scope_info_enabled=False, registry=self._plain)
        registry.register(_Page(self))

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        for resource in metrics_data.resource_metrics if metrics_data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if isinstance(metric.data, Histogram) and metric.name in METRICS:
                        self._keep(METRICS[metric.name].prometheus, metric.data.data_points)
        super()._receive_metrics(metrics_data, timeout_millis, **kwargs)

    def _keep(self, name: str, points: Iterable[HistogramDataPoint]) -> None:
        for point in points:
            for exemplar in point.exemplars:
                if not exemplar.trace_id or not exemplar.span_id:
                    continue
                labels = {str(key): str(value) for key, value in (point.attributes or {}).items()}
                labels["le"] = _bucket(point.explicit_bounds, exemplar.value)
                ids = {"trace_id": format_trace_id(exemplar.trace_id), "span_id": format_span_id(exemplar.span_id)}
                self._newest[name, frozenset(labels.items())] = Exemplar(
                    ids, exemplar.value, exemplar.time_unix_nano / 1e9
                )

    def families(self) -> list[Family]:
        """Returns what the page shows now."""
        with self._lock:
            families = list(self._plain.collect())
            for family in families:
                if family.type == "histogram":
                    family.samples = [self._with_trace(family.name, sample) for sample in family.samples]
            return families

    def _with_trace(self, name: str, sample: Any) -> Any:
        found = self._newest.get((name, frozenset(sample.labels.items())))
        return sample._replace(exemplar=found) if found is not None else sample


class _Page:
    """A collector that names nothing before it is asked: by then the reader has its provider."""

    def __init__(self, reader: PageReader) -> None:
        self._reader = reader

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> list[Family]:
        return self._reader.families()


def _bucket(bounds: Sequence[float], value: float) -> str:
    """Returns the `le` of the bucket that counts a value, written as the reader writes it."""
    place = bisect_left(bounds, value)
    return f"{bounds[place]}" if place < len(bounds) else OVERFLOW
