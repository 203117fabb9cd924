"""A collector of OTLP as `deploy/observability/collector.yaml` opens one: gRPC, without TLS, for metrics and traces."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer, trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps of every process, (service, instance), the newest metrics, and all spans with the service that made them.

    A bucket has its newest exemplar: `exemplars` has the (metric, trace) of all that came.
    """

    def __init__(self) -> None:
        self.metrics: dict[tuple[str, str], dict[str, Any]] = {}
        self.spans: list[tuple[str, Any]] = []
        self.exemplars: set[tuple[str, bytes]] = set()
        self.address = ""

    def Export(self, request: Any, context: Any) -> Any:
        if isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest):
            for one in request.resource_metrics:
                found = {metric.name: metric for scope in one.scope_metrics for metric in scope.metrics}
                self.metrics[_process(one.resource)] = found
                for name, metric in found.items():
                    points = metric.histogram.data_points
                    self.exemplars |= {(name, exemplar.trace_id) for point in points for exemplar in point.exemplars}
            return metrics_service_pb2.ExportMetricsServiceResponse()
        for one in request.resource_spans:
            service, _ = _process(one.resource)
            self.spans += [(service, span) for scope in one.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def _process(resource: Any) -> tuple[str, str]:
    facts = {fact.key: fact.value.string_value for fact in resource.attributes}
    return facts["service.name"], facts["service.instance.id"]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs one on a free port of the loopback; its `address` is what services are told."""
    server, collector = grpc.server(futures.ThreadPoolExecutor(2)), Collector()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
