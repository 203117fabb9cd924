"""What telemetry costs a call: `make bench-telemetry`.

Servers as services run them (TLS, the guard, metrics, traces), which differ in what they tell, on one core; callers on
the others ask each in turn, round after round, so that what disturbs one disturbs all. The handler computes nothing and
tells what a router tells of a request: parts of a span, points of histograms, counts. Prints a line per figure: CPU of
the server per call beyond that of one that tells nothing, which is the baseline. Writes bench/results/telemetry.json.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.figures import RESULTS, Figure, report
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from services.shared import metrics, telemetry, tracing
from services.shared.access import Principal
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import Server
from tests.contract.router_world import ADMIN_CA, SERVICE_CA, World

ROUNDS, ROUND_S, CALLERS = 8, 1.5, 16
CORE, OTHERS = {0}, set(range(1, os.cpu_count() or 1)) or {0}
# A twentieth of what a stream costs a router's core (make bench-router: some 240 of them a second).
TARGET_US = 200.0


@dataclass(frozen=True, slots=True)
class Kind:
    """What a server tells: metrics or none, and the part of calls that it traces."""

    metrics: bool
    ratio: float

    @property
    def name(self) -> str:
        return f"metrics {'on' if self.metrics else 'off'}, traced {self.ratio:g}"


KINDS = (Kind(False, 0), Kind(True, 0), Kind(True, 0.01), Kind(False, 1), Kind(True, 1))


class Handler(stubs.InferenceServiceServicer):
    """Tells what a router tells of a request, and nothing else."""

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        with tracing.part("router.admit"):
            pass
        with tracing.part("router.queue") as span:
            span.set_attribute("executor", "e0")
        telemetry.observe(metrics.QUEUE_RESIDENCE, 0.01, tenant_class="standard")
        with tracing.part("router.attempt", executor="e0"):
            tracing.outgoing()
        telemetry.count(metrics.ANSWERED, revision="right")
        telemetry.observe(metrics.TTFT, 0.1, start="warm", tenant_class="standard")
        telemetry.observe(metrics.TPOT, 0.01, tenant_class="standard")
        telemetry.count(metrics.ACCEPTED, verdict="met")
        tracing.note(revision_id="sha256:" + "0" * 64, start="warm", outcome="OK", tokens=8)
        return pb.ScoreResponse()


async def serve(kind: Kind) -> None:
    """Serves until stdin ends; answers each line of it with the CPU seconds that this process has used."""
    os.sched_setaffinity(0, CORE)
    config = telemetry.TelemetryConfig(metrics_listen="", trace_ratio=kind.ratio)
    if kind.metrics:
        telemetry.start("router", config)
    elif kind.ratio:
        from opentelemetry.sdk.resources import Resource

        tracing.start(Resource.create({}), config, export=False)

    async def authenticate(_metadata: dict[str, str]) -> Principal:
        return Principal("user", "acme", "tenants/acme", frozenset({"generate"}))

    authorities = CertificateAuthorities({"service": SERVICE_CA[0], "admin": ADMIN_CA[0]})
    server = Server(authorities, authenticate_user=authenticate)
    server.add(stubs.add_InferenceServiceServicer_to_server, Handler())
    certificate, key = World.leaf("service/router")
    port = server.listen("127.0.0.1:0", key=key, certificate=certificate, clients=False)
    await server.start()
    sys.stdout.write(json.dumps({"port": port, "ca": SERVICE_CA[0].decode()}) + "\n")
    sys.stdout.flush()
    while await asyncio.to_thread(sys.stdin.readline):
        used = resource.getrusage(resource.RUSAGE_SELF)
        sys.stdout.write(f"{used.ru_utime + used.ru_stime}\n")
        sys.stdout.flush()
    await server.stop(0)


class Served:
    """One server process and the connection to it."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        command = [sys.executable, "-m", "bench.telemetry", "--serve", json.dumps([kind.metrics, kind.ratio])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        found = json.loads(self._line())
        credentials = grpc.ssl_channel_credentials(found["ca"].encode())
        self.channel = grpc.aio.secure_channel(f"localhost:{found['port']}", credentials)
        self._score = stubs.InferenceServiceStub(self.channel).Score
        # Calls a second, and CPU microseconds per call, by round.
        self.rates: list[float] = []
        self.costs: list[float] = []

    async def round(self, seconds: float) -> None:
        """Asks for so long."""
        before, began, count = self._cpu(), time.monotonic(), 0

        async def caller() -> None:
            nonlocal count
            while time.monotonic() - began < seconds:
                await self._score(pb.ScoreRequest(), timeout=10)
                count += 1

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        self.rates.append(count / (time.monotonic() - began))
        self.costs.append((self._cpu() - before) / count * 1e6)

    def _cpu(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    async def close(self) -> None:
        await self.channel.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


async def measure() -> list[Figure]:
    """Returns a figure for each kind."""
    served = [Served(kind) for kind in KINDS]
    try:
        for one in served:
            await one.round(0.5)  # the first calls connect and import
            one.rates.clear()
            one.costs.clear()
        for _ in range(ROUNDS):
            for one in served:
                await one.round(ROUND_S)
    finally:
        for one in served:
            await one.close()
    silent, figures = served[0], []
    for one in served[1:]:
        more = statistics.median(a - b for a, b in zip(one.costs, silent.costs, strict=True))
        base = statistics.median(silent.costs)
        target = TARGET_US if one.kind.ratio < 1 else 5 * TARGET_US
        figures.append(Figure(name=one.kind.name, value=more, baseline=base, target=target, unit="us"))
    for one in served:
        print(
            f"{one.kind.name}: {statistics.median(one.rates):.0f} calls/s, {statistics.median(one.costs):.0f} us each"
        )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what telemetry costs a call.")
    parser.add_argument("--out", type=Path, default=RESULTS / "telemetry.json", help="where the JSON goes")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(Kind(*json.loads(options.serve))))
        return 0
    os.sched_setaffinity(0, OTHERS)
    figures = asyncio.run(measure())
    report(options.out, figures, {"rounds": ROUNDS, "callers": CALLERS})
    return 0


if __name__ == "__main__":
    sys.exit(main())
