"""What a process shows at its endpoint, and sends to a collector, from its configuration alone."""

import json
import subprocess
import sys
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from services.shared.config import ConfigError, from_mapping
from services.shared.telemetry import TelemetryConfig
from tests.architecture.source import ROOT

CODE = """
import json, sys, urllib.request
from contextvars import copy_context
from opentelemetry import metrics as otel, trace
from services.shared import metrics, telemetry, tracing
port = telemetry.start("router", telemetry.TelemetryConfig(otlp_endpoint=sys.argv[1], trace_ratio=1.0))
def call():
    span = tracing.enter(min(tracing.ROOTS), {}, request_id="r", trusted=False)
    telemetry.observe(metrics.TTFT, 0.2, start="warm", tenant_class="acme")
    span.end()
copy_context().run(call)
page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
trace.get_tracer_provider().shutdown(); otel.get_meter_provider().shutdown()
print(json.dumps({"port": port, "told": telemetry.metrics_port(), "page": page}))
"""


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer, trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is sent to it."""

    def __init__(self) -> None:
        self.metrics: list = []
        self.spans: list = []

    def Export(self, request, context):
        if isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest):
            self.metrics += request.resource_metrics
            return metrics_service_pb2.ExportMetricsServiceResponse()
        self.spans += request.resource_spans
        return trace_service_pb2.ExportTraceServiceResponse()


def test_the_endpoint_and_the_collector_are_told_the_same() -> None:
    server, collector = grpc.server(futures.ThreadPoolExecutor(2)), Collector()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        done = subprocess.run(
            [sys.executable, "-c", CODE, address], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
    finally:
        server.stop(0)
    told = json.loads(done.stdout)
    assert told["port"] == told["told"] > 0
    line = 'loraport_router_ttft_seconds_count{start="warm",tenant_class="other"} 1.0'
    assert line in told["page"]
    [resource] = collector.metrics
    facts = {fact.key: fact.value.string_value for fact in resource.resource.attributes}
    assert facts["service.name"] == "loraport-router"
    assert facts["service.instance.id"]
    sent = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    [point] = sent["loraport.router.ttft"].histogram.data_points
    [span] = [span for one in collector.spans for scope in one.scope_spans for span in scope.spans]
    assert [exemplar.trace_id for exemplar in point.exemplars] == [span.trace_id]


@pytest.mark.parametrize(
    "wrong",
    [{"trace_ratio": 1.5}, {"trace_ratio": -0.1}, {"traces_kept": 0}, {"metrics_listen": "nowhere"}, {"labels": 1}],
)
def test_what_cannot_be_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        from_mapping(TelemetryConfig, wrong, where="telemetry")
