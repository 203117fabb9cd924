"""What a router takes: `make bench-router`.

A real router process on one core, between a registry that this process plays and an executor process that computes
nothing. Prints a line per figure (name, value, baseline, target, PASS or FAIL); the baseline of the latencies is the
same executor called without a router. Callers, registry and executor share the other cores, so on two cores the callers
are the limit as well. Writes bench/results/router.json.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.figures import RESULTS, Figure, report
from bench.router_peers import HELD
from loraport.executor.v1 import executor_service_pb2 as executor_pb
from loraport.executor.v1 import executor_service_pb2_grpc as executor_stubs
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from loraport.types.v1 import types_pb2
from services.router.fair_queue import FairQueue, Waiting
from services.router.ledger import Ledger
from services.router.placement import Placed
from tests.contract.router_world import SERVICE_CA, World, api_key, eventually

TENANTS = 20
STARTS, STARTS_S, RATE, RATE_S, OPEN = 64, 5.0, 300, 8.0, 5000
CHANNELS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a router between null peers.")
    parser.add_argument("--out", type=Path, default=RESULTS / "router.json", help="where the JSON goes")
    options = parser.parse_args()
    figures = list(admissions())
    with tempfile.TemporaryDirectory(prefix="loraport-bench-") as folder:
        figures += asyncio.run(Bench(Path(folder)).run())
    report(options.out, figures, {"cores": os.cpu_count()})
    return 0


def admissions() -> Iterator[Figure]:
    """What one admission costs, with 20,000 requests of so many tenants in the queue."""
    spot = Placed("e0", False, 0, "")
    costs = {}
    for tenants in (100, 1000, 10_000):
        best = float("inf")
        for _ in range(3):
            ledger = Ledger()
            queue = FairQueue(ledger, max_queued=20_000, max_running=20_000, residence_s=60)
            for number in range(20_000):
                queue.offer(_waiting(number, tenants))
            started = time.perf_counter()
            for number in range(20_000, 24_000):
                turn = queue.take({"tiny"}, lambda _: spot, now=0.0)
                assert turn is not None
                ledger.open(turn.request.tenant, prefill_ms=64.0)
                queue.finish(turn.request.id)
                queue.offer(_waiting(number, tenants))
            best = min(best, (time.perf_counter() - started) / 4000 * 1e6)
        costs[tenants] = best
    for tenants, cost in costs.items():
        yield Figure(
            name=f"admission, {tenants} tenants", value=cost, baseline=costs[100], target=2 * min(costs.values()),
            unit="us",
        )  # fmt: skip


def _waiting(number: int, tenants: int) -> Waiting:
    return Waiting(
        id=str(number), tenant=f"t{number % tenants}", base_model="tiny", revision_id="r", rank=8, prompt_tokens=64,
        priority=0, arrived=0.0,
    )  # fmt: skip


class Bench:
    """The peers, the router, and the callers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._world = World(folder)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[grpc.aio.Channel] = []

    async def run(self) -> list[Figure]:
        """Starts everything, measures, stops everything."""
        try:
            router, user = await self._start()
            direct = await self._latencies(self._direct(), RATE, RATE_S / 2)
            started = await self._starts(user)
            print(f"streams started: {started:.0f}/s, executor alone p99 {_ms(direct, 99):.1f} ms", flush=True)
            through = await self._latencies(self._through(user), RATE, RATE_S)
            figures = [
                Figure(name="streams started", value=started, baseline=800, target=800, unit="/s", at_most=False),
                *(
                    Figure(
                        name=f"added p{part} at {RATE}/s", value=_ms(through, part) - _ms(direct, part),
                        baseline=_ms(direct, part), target=target, unit="ms",
                    )
                    for part, target in ((50, 4.0), (99, 15.0))
                ),
            ]  # fmt: skip
            return [*figures, await self._open(user, router.pid)]
        finally:
            for channel in self._channels:
                await channel.close()
            for process in self._processes:
                process.terminate()
                process.wait(30)
            await self._world.stop()

    async def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        world = self._world
        world.registry.items += [world.registry.base()]
        for number in range(TENANTS):
            tenant = _tenant(number)
            world.registry.items += [*world.registry.tenant(tenant), *world.registry.adapter(tenant, "a")]
        await world.start_registry()
        certificate, key = world.leaf("service/executor/e0")
        (self._folder / "peer.pem").write_bytes(certificate)
        (self._folder / "peer.key").write_bytes(key)
        self._executor_port, user, admin = (_free_port() for _ in range(3))
        world.addresses["e0"] = f"127.0.0.1:{self._executor_port}"
        self._spawn("bench.router_peers", self._folder, "e0", self._executor_port, world.registry.base_id)
        world.overrides = {
            "user_address": f"127.0.0.1:{user}", "admin_address": f"127.0.0.1:{admin}", "max_queued": 20_000,
            "max_running": 20_000, "executor_window": 20_000, "max_unread_s": 120.0, "poll_interval_s": 1.0,
        }  # fmt: skip
        config = self._folder / "router.json"
        config.write_text(json.dumps(world.config()))
        router = self._spawn("services.router", "--config", config)
        os.sched_setaffinity(router.pid, {0})
        await self._ready(user)
        return router, user

    def _spawn(self, module: str, *arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        with (self._folder / f"{module}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def _channel(self, port: int) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(SERVICE_CA[0])
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)
        self._channels.append(channel)
        return channel

    async def _ready(self, user: int) -> None:
        call = self._through(user)
        for _ in range(200):
            try:
                await call(0)
                return
            except grpc.RpcError:
                await asyncio.sleep(0.1)
        raise RuntimeError((self._folder / "services.router.log").read_text()[-2000:])

    def _direct(self) -> Callable[[int], Awaitable[None]]:
        stub = executor_stubs.ExecutorServiceStub(self._channel(self._executor_port))
        request = executor_pb.ExecuteRequest(
            prompt_token_ids=[50] * 16, sampling=types_pb2.SamplingParams(max_tokens=4)
        )

        async def call(number: int) -> None:
            async for _ in stub.Execute(request):
                pass

        return call

    def _through(self, user: int) -> Callable[[int], Awaitable[None]]:
        several = [stubs.InferenceServiceStub(self._channel(user)) for _ in range(CHANNELS)]

        async def call(number: int) -> None:
            stub = several[number % CHANNELS]
            async for _ in stub.Generate(_request(4), metadata=_metadata(number), timeout=60):
                pass

        return call

    async def _starts(self, user: int) -> float:
        """Returns how many streams a second are answered when always so many are open."""
        call, done, until = self._through(user), 0, time.perf_counter() + STARTS_S

        async def caller(number: int) -> None:
            nonlocal done
            while time.perf_counter() < until:
                await call(number)
                done += 1

        started = time.perf_counter()
        await asyncio.gather(*(caller(number) for number in range(STARTS)))
        return done / (time.perf_counter() - started)

    async def _latencies(self, call: Callable[[int], Awaitable[None]], rate: int, seconds: float) -> list[float]:
        """Returns how long calls took, in seconds, that were begun at even gaps whatever became of the others."""
        took: list[float] = []

        async def one(number: int, at: float) -> None:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            begun = time.perf_counter()
            try:
                await call(number)
                took.append(time.perf_counter() - begun)
            except grpc.RpcError as error:
                # A call that failed is one that took for ever.
                print(f"call {number} failed: {error.code().name}")
                took.append(float("inf"))

        start = time.perf_counter() + 0.2
        await asyncio.gather(*(one(number, start + number / rate) for number in range(int(rate * seconds))))
        return took

    async def _open(self, user: int, pid: int) -> Figure:
        """The router's memory with many streams open."""
        before = _resident_mib(pid)
        calls: list[Any] = []
        for number in range(OPEN):
            if number % 500 == 0:
                stub = stubs.InferenceServiceStub(self._channel(user))
            calls.append(stub.Generate(_request(HELD), metadata=_metadata(number), timeout=300))
        begun = 0

        async def first(call: Any) -> None:
            nonlocal begun
            await call.read()
            begun += 1

        reading = [asyncio.create_task(first(call)) for call in calls]
        await eventually(lambda: begun == OPEN, 120)
        used = _resident_mib(pid)
        for call in calls:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        return Figure(name=f"memory, {OPEN} open streams", value=used, baseline=before, target=1024, unit="MiB")


def _request(tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        target=pb.Target(adapter="a", alias="prod"),
        prompt_token_ids=pb.TokenIds(ids=[50] * 16),
        sampling=types_pb2.SamplingParams(max_tokens=tokens),
    )


def _tenant(number: int) -> str:
    return f"t{number % TENANTS:03d}"


def _metadata(number: int) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key(_tenant(number))}"),)


def _ms(took: list[float], part: int) -> float:
    return float(np.percentile(np.array(took) * 1000, part))


def _resident_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
