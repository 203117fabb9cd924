"""Logs and traces.

Logs are JSON lines on stderr with the trace id when there is one; they hold no prompts, keys or paths of tenants.
Traces and metrics go out over OTLP when `OTEL_EXPORTER_OTLP_ENDPOINT` is set, else nothing is recorded.
"""

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from opentelemetry import metrics, trace


def setup(service: str, *, level: str = "INFO") -> None:
    """Configures logging, and traces and metrics when an endpoint is set. Called once by a service's `__main__`."""
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
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        _export(service)


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


def _export(service: str) -> None:
    # Imported here: the exporters are only needed where an endpoint is set.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": f"loraport-{service}"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource=resource))
