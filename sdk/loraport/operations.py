"""What every process of a stack tells of itself: metrics, traces, checks. All are asked at once, on their admin planes.

One that does not answer is an error in its place, never of the whole.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from loraport.dev.layout import read_endpoints
from loraport.errors import LoraportError, error_from_rpc
from loraport.telemetry.v1 import telemetry_service_pb2 as pb
from loraport.telemetry.v1 import telemetry_service_pb2_grpc as stubs

TIMEOUT_S = 5.0
# Checks try things, and may wait for what does not answer.
CHECKS_TIMEOUT_S = 20.0
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 16 << 20),
)
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of a process's metrics as it is now."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metrics:
    """The metrics of one process."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.samples = tuple(samples)

    @classmethod
    def parse(cls, exposition: str) -> "Metrics":
        """Reads the text format of Prometheus; what is no sample is passed over."""
        found = (_SAMPLE.fullmatch(line) for line in exposition.splitlines())
        return cls(
            Sample(match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"]))
            for match in found
            if match is not None
        )

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of all series of a name that have these labels, 0 where there is none."""
        return sum(
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Returns the sums of a name's series by one of their labels."""
        found: dict[str, float] = {}
        for sample in self.samples:
            if sample.name == name and label in sample.labels:
                found[sample.labels[label]] = found.get(sample.labels[label], 0.0) + sample.value
        return found

    def quantile(self, name: str, part: float, **labels: str) -> float | None:
        """Returns the upper bound of the bucket that holds a histogram's quantile; None for an empty one."""
        buckets: dict[float, float] = {}
        for sample in self.samples:
            if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
        whole = buckets.get(float("inf"), 0.0)
        if not whole:
            return None
        return next(bound for bound in sorted(buckets) if buckets[bound] >= part * whole)


class OperationsClient:
    """Asks all processes under an admin's certificate. Close it, or use it in a `with` statement."""

    def __init__(self, addresses: Mapping[str, str], *, ca: bytes, certificate: bytes, key: bytes) -> None:
        """`addresses` maps names of processes to `host:port`; `ca`, `certificate` and `key` are PEM."""
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        self.addresses = dict(addresses)
        self._channels = {
            name: grpc.secure_channel(address, credentials, options=_OPTIONS) for name, address in addresses.items()
        }
        self._stubs: dict[str, Any] = {
            name: stubs.TelemetryServiceStub(channel) for name, channel in self._channels.items()
        }

    @classmethod
    def local(cls, data: str | Path = ".loraport") -> "OperationsClient":
        """Returns a client of the local stack at `data`.

        Raises:
            StackError: there is no such stack.
            OSError: its credentials cannot be read.
        """
        endpoints = read_endpoints(data)
        credentials = endpoints["credentials"]
        named = {"router": "router_admin", "registry": "registry", "loader": "loader"}
        return cls(
            {name: endpoints[key] for name, key in named.items()} | endpoints.get("executors", {}),
            ca=Path(credentials["ca"]).read_bytes(),
            certificate=Path(credentials["admin_certificate"]).read_bytes(),
            key=Path(credentials["admin_key"]).read_bytes(),
        )

    def processes(self) -> dict[str, pb.Process | LoraportError]:
        """Returns which processes these are, and their clocks, by name."""
        return self._ask(lambda stub: stub.GetProcess, pb.GetProcessRequest())

    def metrics(self) -> dict[str, Metrics | LoraportError]:
        """Returns the metrics of every process, by name."""
        found = self._ask(lambda stub: stub.GetMetrics, pb.GetMetricsRequest())
        return {
            name: one if isinstance(one, LoraportError) else Metrics.parse(one.exposition)
            for name, one in found.items()
        }

    def checks(self) -> dict[str, pb.RunChecksResponse | LoraportError]:
        """Returns what every process found when it looked at what it depends on, by name."""
        return self._ask(lambda stub: stub.RunChecks, pb.RunChecksRequest(), timeout_s=CHECKS_TIMEOUT_S)

    def trace(self, wanted: str) -> tuple[str, list[pb.Span], dict[str, LoraportError]]:
        """Returns a request's trace, its spans in order of their start, and who did not answer.

        `wanted` is a request id or 32 hex digits of a trace. An empty trace means that nobody knows it.
        """
        trace_id = wanted if re.fullmatch(r"[0-9a-f]{32}", wanted) else ""
        spans: list[pb.Span] = []
        silent: dict[str, LoraportError] = {}
        requests = [pb.GetTraceRequest(request_id=wanted)] if len(wanted) <= 64 else []
        if trace_id:
            requests = [pb.GetTraceRequest(trace_id=trace_id), *requests]
        for request in requests:
            found = self._ask(lambda stub: stub.GetTrace, request)
            trace_id = next((one.trace_id for one in found.values() if getattr(one, "trace_id", "")), "")
            if trace_id:
                break
        if trace_id:
            for name, one in self._ask(lambda stub: stub.GetTrace, pb.GetTraceRequest(trace_id=trace_id)).items():
                if isinstance(one, LoraportError):
                    silent[name] = one
                else:
                    spans += one.spans
        spans.sort(key=lambda span: span.start_time.ToNanoseconds())
        return trace_id, spans, silent

    def _ask(self, method: Callable[[Any], Any], request: Any, *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        calls = {name: method(stub).future(request, timeout=timeout_s) for name, stub in self._stubs.items()}
        found: dict[str, Any] = {}
        for name, call in calls.items():
            try:
                found[name] = call.result()
            except grpc.RpcError as error:
                found[name] = error_from_rpc(error, endpoint=self.addresses[name])
        return found

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
