"""What a router takes: `make bench-router`.

A real router process on one core, between a registry that this process plays, and an executor that computes nothing
and callers that read nothing, which are processes on the other cores. Prints a line per figure (name, value, baseline,
target, PASS or FAIL). The baseline of what is started is a bare relay on the router's core, which only passes messages
on (bench/router_peers.py), with a call to the executor for each: the ceiling of this gRPC library on this machine for
routers of that kind. That of latencies is the executor called without a router. Writes bench/results/router.json.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.figures import RESULTS, Figure, report
from bench.policies import admissions
from bench.router_peers import EXECUTE, GENERATE, HELD
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from loraport.types.v1 import types_pb2
from tests.contract.router_world import SERVICE_CA, World, api_key

TENANTS = 20
STARTS, STARTS_S, RATE, RATE_S, OPEN, BATCH = 64, 6.0, 300, 8.0, 5000, 100
# A process that has just begun is a tenth slower for a second or two, relay and router alike.
WARM_S = 2.0
# How docs/operations.md starts a router whose memory is to lie in huge pages where the kernel has them.
HUGE_PAGES = (
    *("env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1", "PYTHONMALLOC=malloc"),
    *(sys.executable, "-m", "services.router"),
)
# Cores: the router alone on the first, everything else on the others.
ROUTER, OTHERS = {0}, set(range(1, os.cpu_count() or 1)) or {0}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a router between null peers.")
    parser.add_argument("--out", type=Path, default=RESULTS / "router.json", help="where the JSON goes")
    options = parser.parse_args()
    figures = list(admissions())
    os.sched_setaffinity(0, OTHERS)
    with tempfile.TemporaryDirectory(prefix="loraport-bench-") as folder:
        figures += asyncio.run(Bench(Path(folder)).run())
    with tempfile.TemporaryDirectory(prefix="loraport-bench-") as folder:
        apart = asyncio.run(Bench(Path(folder), HUGE_PAGES).run())
    figures += [replace(figure, name=f"huge pages: {figure.name}") for figure in apart]
    report(options.out, figures, {"cores": f"router on 1, everything else on {len(OTHERS)}"})
    return 0


class Bench:
    """The peers, the router, and the callers."""

    def __init__(self, folder: Path, command: tuple[str, ...] = (sys.executable, "-m", "services.router")) -> None:
        self._folder = folder
        self._command = command
        self._world = World(folder)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[grpc.aio.Channel] = []

    async def run(self) -> list[Figure]:
        """Starts everything, measures, stops everything."""
        try:
            return await self._measure()
        finally:
            for channel in self._channels:
                await channel.close()
            for process in reversed(self._processes):
                process.terminate()
                process.wait(30)
            await self._world.stop()

    async def _measure(self) -> list[Figure]:
        relay, router, user, executor, bare = await self._start()
        ceiling, relay_ms = await self._starts(relay, bare)
        started, router_ms = await self._starts(router, user)
        direct, _ = await self._callers(executor, EXECUTE, "rate", RATE, RATE_S / 2)
        through, _ = await self._callers(user, GENERATE, "rate", RATE, RATE_S)
        relayed, _ = await self._callers(bare, GENERATE, "rate", RATE, RATE_S / 2)
        figures = [
            Figure(name="streams started", value=started, baseline=ceiling, target=800, unit="/s", at_most=False),
            Figure(
                name="streams / bare relay's", value=started / ceiling, baseline=1.0, target=0.4, unit="x",
                at_most=False,
            ),
            # What one core could start if its peers cost nothing; it depends less on who else is on the machine.
            Figure(name="CPU of a stream", value=router_ms, baseline=relay_ms, target=1000 / 800, unit="ms"),
        ]  # fmt: skip
        for part, target in ((50, 4.0), (99, 15.0)):
            added, least = (_part(took, part) - _part(direct, part) for took in (through, relayed))
            figures.append(
                Figure(name=f"added p{part} at {RATE}/s", value=added, baseline=least, target=target, unit="ms")
            )
        return [*figures, await self._open(user, router.pid)]

    async def _start(self) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes], int, int, int]:
        world = self._world
        world.registry.items += [world.registry.base()]
        for number in range(TENANTS):
            world.registry.items += [*world.registry.tenant(_tenant(number))]
            world.registry.items += [*world.registry.adapter(_tenant(number), "a")]
        await world.start_registry()
        self._write_files()
        executor, user, admin, bare = (_free_port() for _ in range(4))
        world.addresses["e0"] = f"127.0.0.1:{executor}"
        peers = (sys.executable, "-m", "bench.router_peers")
        self._spawn(*peers, "executor", self._folder, "e0", executor, world.registry.base_id, cores=OTHERS)
        relay = self._spawn(*peers, "relay", self._folder, bare, executor, cores=ROUTER)
        world.overrides = {
            "user_address": f"127.0.0.1:{user}", "admin_address": f"127.0.0.1:{admin}", "max_queued": 20_000,
            "max_running": 20_000, "executor_window": 20_000, "poll_interval_s": 1.0,
        }  # fmt: skip
        config = self._folder / "router.json"
        config.write_text(json.dumps(world.config()))
        router = self._spawn(*self._command, "--config", config, cores=ROUTER)
        await self._ready(user)
        return relay, router, user, executor, bare

    def _write_files(self) -> None:
        certificate, key = self._world.leaf("service/executor/e0")
        (self._folder / "peer.pem").write_bytes(certificate)
        (self._folder / "peer.key").write_bytes(key)
        (self._folder / "request.bin").write_bytes(_request(4).SerializeToString())
        (self._folder / "keys.txt").write_text("\n".join(api_key(_tenant(number)) for number in range(TENANTS)))

    def _spawn(self, *command: object, cores: set[int]) -> subprocess.Popen[bytes]:
        words = [str(word) for word in command]
        with (self._folder / f"{len(self._processes)}.log").open("wb") as log:
            os.sched_setaffinity(0, cores)  # of this thread, and so of what it begins
            try:
                process = subprocess.Popen(words, stdout=log, stderr=log)
            finally:
                os.sched_setaffinity(0, OTHERS)
        self._processes.append(process)
        return process

    async def _starts(self, process: subprocess.Popen[bytes], port: int) -> tuple[float, float]:
        """Returns the streams that a process started per second, and the ms of a core that each took it."""
        await self._callers(port, GENERATE, "starts", STARTS, WARM_S)
        before = _cpu_ms(process.pid)
        started, answered = await self._callers(port, GENERATE, "starts", STARTS, STARTS_S)
        return started, (_cpu_ms(process.pid) - before) / answered

    async def _callers(self, port: int, method: str, mode: str, first: float, second: float) -> Any:
        words = (self._folder, port, method, mode, first, second)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.router_callers", *map(str, words), stdout=subprocess.PIPE
        )
        output, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"the callers failed: {mode}")
        return json.loads(output)

    def _stub(self, port: int) -> stubs.InferenceServiceStub:
        credentials = grpc.ssl_channel_credentials(SERVICE_CA[0])
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)
        self._channels.append(channel)
        return stubs.InferenceServiceStub(channel)

    async def _ready(self, user: int) -> None:
        stub = self._stub(user)
        for _ in range(300):
            try:
                async for _ in stub.Generate(_request(4), metadata=_metadata(0), timeout=10):
                    pass
                return
            except grpc.RpcError:
                await asyncio.sleep(0.1)
        logs = [path.read_text()[-2000:] for path in sorted(self._folder.glob("*.log"))]
        raise RuntimeError("the router answers nothing\n" + "\n".join(logs))

    async def _open(self, user: int, pid: int) -> Figure:
        """The router's memory with many streams open."""
        before = _resident_mib(pid)
        calls: list[Any] = []
        # A few at a time: of thousands that one grpc.aio process begins at once some never leave it, whoever serves.
        for number in range(0, OPEN, BATCH):
            if number % 500 == 0:
                stub = self._stub(user)
            some = [
                stub.Generate(_request(HELD), metadata=_metadata(number + index), timeout=300) for index in range(BATCH)
            ]
            async with asyncio.timeout(30):
                await asyncio.gather(*(call.read() for call in some))
            calls += some
        used = _resident_mib(pid)
        for call in calls:
            call.cancel()
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


def _part(took: list[float], part: int) -> float:
    return float(np.percentile(np.array(took), part))


def _cpu_ms(pid: int) -> float:
    """What all threads of a process have taken."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") * 1000


def _resident_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
