"""`TelemetryService`: what a process tells an operator of itself. Every service serves it on its admin plane."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from loraport.telemetry.v1 import telemetry_service_pb2 as pb
from loraport.telemetry.v1 import telemetry_service_pb2_grpc as stubs
from services.shared import checks, telemetry, tracing
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.rpc.guard import REQUEST_ID_LENGTH
from services.shared.rpc.server import Server, run_blocking

_HEX = frozenset("0123456789abcdef")


class TelemetryServicer(stubs.TelemetryServiceServicer):
    """Serves one process's metrics, traces and checks."""

    def __init__(self, service: str, own_checks: Mapping[str, checks.Check], *, clock: Clock) -> None:
        self._service = service
        self._checks = own_checks
        self._clock = clock
        self._started = clock.now()

    async def GetProcess(self, request: pb.GetProcessRequest, context: Any) -> pb.Process:
        return pb.Process(
            service=self._service,
            version=release(),
            start_time=_time(self._started),
            now_time=_time(self._clock.now()),
            metrics_port=telemetry.metrics_port(),
        )

    async def GetTrace(self, request: pb.GetTraceRequest, context: Any) -> pb.Trace:
        wanted = request.WhichOneof("selector")
        if wanted == "trace_id" and not (len(request.trace_id) == 32 and _HEX.issuperset(request.trace_id)):
            raise LoraportError("INVALID_REQUEST", "trace_id is 32 hex digits", subject="trace_id")
        if wanted is None or len(request.request_id) > REQUEST_ID_LENGTH:
            raise LoraportError("INVALID_REQUEST", "a request is named by its id or its trace", subject="request_id")
        trace_id, spans = tracing.store().find(trace_id=request.trace_id, request_id=request.request_id)
        return pb.Trace(trace_id=trace_id, spans=[_span(span, self._service) for span in spans])

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.Metrics:
        return pb.Metrics(exposition=(await run_blocking(telemetry.exposition)).decode())

    async def RunChecks(self, request: pb.RunChecksRequest, context: Any) -> pb.RunChecksResponse:
        found = await checks.run(self._checks)
        return pb.RunChecksResponse(
            checks=[
                pb.Check(name=name, state=f"STATE_{one.state}", detail=one.detail, advice=one.advice)
                for name, one in found.items()
            ]
        )


def add_telemetry(server: Server, service: str, own_checks: Mapping[str, checks.Check], *, clock: Clock) -> None:
    """Lets a server serve it; the checks are run in the given order."""
    server.add(stubs.add_TelemetryServiceServicer_to_server, TelemetryServicer(service, own_checks, clock=clock))


def release() -> str:
    """Returns this release's version."""
    try:
        return version("loraport")
    except PackageNotFoundError:
        return "unknown"


def _span(span: Any, service: str) -> pb.Span:
    return pb.Span(
        span_id=f"{span.context.span_id:016x}",
        parent_span_id=f"{span.parent.span_id:016x}" if span.parent is not None else "",
        name=span.name,
        service=service,
        start_time=_time(span.start_time / 1e9),
        elapsed_ms=(span.end_time - span.start_time) / 1e6,
        attributes={key: str(value) for key, value in (span.attributes or {}).items()},
    )


def _time(seconds: float) -> Timestamp:
    time = Timestamp()
    time.FromNanoseconds(int(seconds * 1e9))
    return time
