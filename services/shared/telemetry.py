"""Logs, metrics and traces of a process: how they are set up, and the one way to record a metric.

Logs are JSON lines on stderr with the trace id when there is one; they hold no prompts, keys or paths of tenants.
Metrics are those of `services.shared.metrics`, shown at a Prometheus endpoint and, as traces are, sent over OTLP when a
collector is configured. Recording is safe from any thread, and seen by nobody before `start`.
"""

import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from opentelemetry import metrics as otel
from opentelemetry import trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, NoOpMeterProvider, Observation

from services.shared import tracing
from services.shared.cells import Buckets, Number
from services.shared.metrics import METRICS, Metric

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

log = structlog.get_logger(__name__)

METER = "loraport"
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """What a process tells of itself, and to whom."""

    # host:port of the Prometheus endpoint, plain HTTP to whoever can reach it; port 0 takes a free one, empty is none.
    metrics_listen: str = "127.0.0.1:0"
    # host:port of an OTLP collector (gRPC without TLS); empty: what OTEL_EXPORTER_OTLP_ENDPOINT says, else none.
    otlp_endpoint: str = ""
    # The part of requests that are traced, in [0, 1]. What begins a request decides; everybody behind it follows.
    trace_ratio: float = 0.1
    # The newest traces that are kept in memory for `loraport trace`.
    traces_kept: int = 512

    def __post_init__(self) -> None:
        if not 0 <= self.trace_ratio <= 1:
            raise ValueError("telemetry.trace_ratio is in [0, 1]")
        if self.traces_kept < 1:
            raise ValueError("telemetry.traces_kept is at least 1")
        if self.metrics_listen and not self.metrics_listen.rpartition(":")[2].isdigit():
            raise ValueError("telemetry.metrics_listen is host:port")


class Recorder:
    """The cells of all metrics, and the instruments by which one meter provider reads them.

    A value is taken for the labels as `Metric.bounded` gives them.
    """

    def __init__(self, provider: MeterProvider) -> None:
        meter = provider.get_meter(METER)
        # A key is the labels in the order of the table.
        self._cells: dict[str, dict[tuple[tuple[str, str], ...], Any]] = {name: {} for name in METRICS}
        self._lock = threading.Lock()
        for metric in METRICS.values():
            # A histogram is read as the number of its values, in whose place our readers put it (`readers.filled`).
            make = meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
            make(metric.name, [self._reader(metric.name)], unit=metric.unit, description=metric.help)

    def _reader(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_options: CallbackOptions) -> Iterable[Observation]:
            # A copy: other threads go on recording.
            return [Observation(cell.value, dict(labels)) for labels, cell in self._cells[name].copy().items()]

        return read

    def cell(self, metric: Metric, labels: Mapping[str, str]) -> Any:
        """Returns where a metric's values with these labels are kept: `Buckets` of a histogram, else a `Number`."""
        # Labels in the order of the table, each of its set, are the key as they come.
        found = self._cells[metric.name].get(tuple(labels.items()))
        return found if found is not None else self._bounded(metric, labels)

    def _bounded(self, metric: Metric, labels: Mapping[str, str]) -> Any:
        bounded, cells = metric.bounded(labels), self._cells[metric.name]
        key = tuple((name, bounded[name]) for name in metric.labels)
        with self._lock:
            if key not in cells:
                cells[key] = Buckets(metric.buckets) if metric.kind == "histogram" else Number()
            return cells[key]

    def points(self, metric: Metric) -> "list[HistogramDataPoint]":
        """Returns a histogram as OpenTelemetry shows one, a point for each of its series."""
        now_ns = time.time_ns()
        return [cell.point(dict(labels), now_ns) for labels, cell in self._cells[metric.name].copy().items()]


_recorder = Recorder(NoOpMeterProvider())
_port = 0


def use(provider: MeterProvider) -> Recorder:
    """Records on `provider` from now on, beginning at nothing; returns the recorder that was used before."""
    return restore(Recorder(provider))


def restore(recorder: Recorder) -> Recorder:
    """Records on an earlier recorder again; returns the one that was used until now."""
    global _recorder
    before, _recorder = _recorder, recorder
    return before


def count(metric: Metric, amount: float = 1, **labels: str) -> None:
    """Adds to a counter."""
    _recorder.cell(metric, labels).add(amount)


def observe(metric: Metric, value: float, **labels: str) -> None:
    """Puts a value into a histogram, in whose bucket it names the trace that is recorded now.

    One that is negative or not finite is no value: the log says so.
    """
    if not 0 <= value < math.inf:
        log.warning("no value for a histogram", metric=metric.name, value=value)
        return
    _recorder.cell(metric, labels).put(value, tracing.sampled())


def gauge(metric: Metric, value: float, **labels: str) -> None:
    """Sets a gauge, or a counter whose sum somebody else keeps."""
    _recorder.cell(metric, labels).value = value


def histogram_points(metric: Metric) -> "list[HistogramDataPoint]":
    """See `Recorder.points`."""
    return _recorder.points(metric)


def setup(service: str, *, level: str = "INFO") -> None:
    """Configures logging. Called once by a service's `__main__`."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_trace_id,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level)),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    _adopt_libraries(shared)
    structlog.contextvars.bind_contextvars(service=service)


def start(service: str, config: TelemetryConfig) -> int:
    """Begins to record metrics and traces; returns the port of the Prometheus endpoint, 0 for none. Called once.

    Raises:
        OSError: the endpoint's address cannot be used.
    """
    # Imported here: nothing of it is needed to import a service, or to test one.
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from prometheus_client import REGISTRY

    from services.shared.metrics_door import MetricsServer
    from services.shared.prometheus_page import PageReader

    # Without the second, two processes of a service would be one series.
    process = {"service.name": f"loraport-{service}", "service.instance.id": f"{socket.gethostname()}:{os.getpid()}"}
    resource = Resource.create(process)
    endpoint = config.otlp_endpoint or os.environ.get(OTLP_VARIABLE, "")
    readers: list[MetricReader] = [PageReader(REGISTRY)]
    if endpoint:
        readers.append(_otlp_metrics(config.otlp_endpoint))
    provider = SdkMeterProvider(readers, resource=resource)
    otel.set_meter_provider(provider)
    use(provider)
    tracing.start(resource, config, export=bool(endpoint))
    if config.metrics_listen:
        global _port
        host, _, port = config.metrics_listen.rpartition(":")
        server = MetricsServer(host.strip("[]"), int(port))
        server.begin()
        _port = int(server.server_port)
    return _port


def metrics_port() -> int:
    """Returns the port of this process's Prometheus endpoint, 0 for none."""
    return _port


def exposition() -> bytes:
    """Returns all metrics as the Prometheus endpoint shows them."""
    from prometheus_client import generate_latest

    return generate_latest()


def otlp_target(endpoint: str) -> dict[str, Any]:
    """Returns an OTLP exporter's arguments for a configured endpoint; none where the environment says it."""
    return {"endpoint": endpoint, "insecure": True} if endpoint else {}


def _otlp_metrics(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    from services.shared.readers import OtlpReader

    return OtlpReader(OTLPMetricExporter(**otlp_target(endpoint)))


def _adopt_libraries(processors: list[Any]) -> None:
    """Makes what libraries log, from WARNING on, JSON lines like our own."""
    handler = logging.StreamHandler(sys.stderr)
    render: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.JSONRenderer(),
    ]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=render, foreign_pre_chain=processors))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def _add_trace_id(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    context = tracing.current().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
    return event
