"""Logs, metrics and traces of a process: how they are set up, and the one way to record a metric.

Logs are JSON lines on stderr with the trace id when there is one; they hold no prompts, keys or paths of tenants.
Metrics are those of `services.shared.metrics`, shown at a Prometheus endpoint and, as traces are, sent over OTLP when a
collector is configured. Recording is safe from any thread, and does nothing before `start`.
"""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog
from opentelemetry import metrics as otel
from opentelemetry import trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, NoOpMeterProvider, Observation

from services.shared.metrics import METRICS, Metric

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
    """The instruments of all metrics, on one meter provider.

    Gauges, and counters that somebody else sums up, are `set`; they keep their last value. A value is taken for the
    labels as `Metric.bounded` gives them.
    """

    def __init__(self, provider: MeterProvider) -> None:
        meter = provider.get_meter(METER)
        self._values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {name: {} for name in METRICS}
        self._histograms: dict[str, otel.Histogram] = {}
        self._meter = meter
        self._lock = threading.Lock()
        for metric in METRICS.values():
            self._make(metric)

    def _make(self, metric: Metric) -> None:
        about = {"unit": metric.unit, "description": metric.help}
        if metric.kind == "histogram":
            buckets = list(metric.buckets)
            self._histograms[metric.name] = self._meter.create_histogram(
                metric.name, explicit_bucket_boundaries_advisory=buckets, **about
            )
        elif metric.kind == "gauge":
            self._meter.create_observable_gauge(metric.name, [self._reader(metric.name)], **about)
        else:
            self._meter.create_observable_counter(metric.name, [self._reader(metric.name)], **about)

    def _reader(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_options: CallbackOptions) -> Iterable[Observation]:
            # A copy: other threads go on recording.
            return [Observation(value, dict(labels)) for labels, value in self._values[name].copy().items()]

        return read

    def count(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Adds to a counter."""
        values, key = self._values[metric.name], tuple(metric.bounded(labels).items())
        with self._lock:
            values[key] = values.get(key, 0) + amount

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Puts a value into a histogram; an exemplar of it names the trace that is recorded now."""
        self._histograms[metric.name].record(value, metric.bounded(labels))

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge, or a counter whose sum somebody else keeps."""
        self._values[metric.name][tuple(metric.bounded(labels).items())] = value


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
    """See `Recorder.count`."""
    _recorder.count(metric, amount, **labels)


def observe(metric: Metric, value: float, **labels: str) -> None:
    """See `Recorder.observe`."""
    _recorder.observe(metric, value, **labels)


def gauge(metric: Metric, value: float, **labels: str) -> None:
    """See `Recorder.set`."""
    _recorder.set(metric, value, **labels)


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
    from prometheus_client import REGISTRY, start_http_server

    from services.shared import tracing
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
        server, _ = start_http_server(int(port), addr=host.strip("[]"))
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
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(OTLPMetricExporter(**otlp_target(endpoint)))


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
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
    return event
