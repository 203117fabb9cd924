"""A stuck step: health says so, the process ends, its keeper starts a clean one, which says what it holds: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraport.executor.v1 import executor_service_pb2 as pb
from loraport.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tests.contract.executor_rig import Peers, Rig, collect, running
from tests.loader_rig import ROOT
from tests.support.ports import free_port
from tests.support.tiny import ALL, greedy, make_adapter, make_base, prompt_of

POISON = 42
# For a process to start or to end: what is over sooner costs nothing.
PATIENCE_S = 240
P = tuple(token for token in prompt_of(40) if token != POISON)

# A device that never comes back on a prompt with one certain token: it waits, or it holds the interpreter as well, so
# that no thread of Python's runs any more. Only that step is judged quickly: on a busy machine any other may take long.
PROCESS = f"""
import ctypes, os, sys, threading, time
from functools import partial
from services.executor import watchdog
from services.executor.config import ExecutorConfig
from services.executor.engine.runner import Runner
from services.executor.service import build
from services.shared.rpc.service import main

watchdog.GRACE_S = 1.0
run, start, wind, detector = Runner.run, watchdog.Watchdog.start, watchdog.ProcessEnd.wind, watchdog.StuckDetector
dogs, detectors, winds = [], [], []


def started(self):
    self._poll_s = 0.1
    dogs.append(self)
    start(self)


def stuck(self, plan):
    if any({POISON} in row.tokens for row in plan.rows):
        dogs[0]._limit_s = detectors[0]._limit_s = 1.5
        seen = len(winds)
        while len(winds) == seen:
            time.sleep(0.01)
        threading.Event().wait() if os.environ["HOW"] == "waits" else ctypes.PyDLL(None).sleep(1000)
    time.sleep(0.04)  # what runs beside it has not ended when it comes
    return run(self, plan)


Runner.run = stuck
watchdog.Watchdog.start = started
watchdog.ProcessEnd.wind = lambda self, seconds: (winds.append(seconds), wind(self, seconds))
watchdog.StuckDetector = lambda *words, **more: (detectors.append(detector(*words, **more)), detectors[-1])[1]
sys.exit(main("executor", ExecutorConfig, partial(build, last_resort=watchdog.ProcessEnd())))
"""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("family")
    base = make_base(root / "base")
    (root / "base" / "tokenizer.json").write_text("{}")
    make_adapter(base, root / "pirate", seed=3, r=8, lora_alpha=16, target_modules=ALL)
    return root, base


@contextlib.asynccontextmanager
async def rig_with(tmp_path: Path, root: Path, **settings: Any) -> AsyncIterator[Rig]:
    peers = Peers()
    peers.publish(root / "base", root / "pirate", tenant="acme")
    async with running(tmp_path, root / "base", peers, **settings) as rig:
        yield rig


async def test_health_says_not_serving_and_the_service_ends(tmp_path: Path, family, monkeypatch) -> None:
    gate = threading.Event()
    async with rig_with(tmp_path, family[0], life={"drain_s": 2.0, "step_timeout_s": 0.4}) as rig:
        engine = rig.service._device.engine
        run = engine._runner.run
        monkeypatch.setattr(engine._runner, "run", lambda plan: (gate.wait(60), run(plan))[1])
        try:
            failed = asyncio.create_task(rig.service.failed())
            stream = rig.call(P)
            await asyncio.wait_for(failed, 60)
            channel = grpc.aio.secure_channel(f"127.0.0.1:{rig.service.port}", _credentials(tmp_path))
            async with channel:
                health = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
                state = await ExecutorServiceStub(channel).State(pb.StateRequest(), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert state.state == "FAILED"
            await asyncio.wait_for(rig.service.stop(), 60)
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(stream)
        finally:
            gate.set()


def _credentials(tmp_path: Path) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        *((tmp_path / name).read_bytes() for name in ("ca.pem", "router.key", "router.pem"))
    )


@pytest.mark.parametrize("how", ["waits", "holds the interpreter"])
async def test_a_clean_process_takes_the_place_of_a_stuck_one(tmp_path: Path, family, how: str) -> None:
    root, base = family
    async with rig_with(tmp_path, root) as rig:
        config = dataclasses.asdict(rig.service._config)
        port = free_port()
        config |= {"listen": f"127.0.0.1:{port}", "life": {"drain_s": 1.0, "step_timeout_s": 60.0}}
        config["checkpoint"]["state_file"] = ""
        (tmp_path / "executor.json").write_text(json.dumps(config))
        command = [sys.executable, "-c", PROCESS, "--config", str(tmp_path / "executor.json")]
        log = (tmp_path / "log").open("wb")
        keep = [sys.executable, "-m", "loraport.dev.keep", *command]
        keeper = subprocess.Popen(keep, cwd=ROOT, stderr=log, env={**os.environ, "HOW": how})
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200))
        try:
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", _credentials(tmp_path), options=options) as channel:
                await _check(dataclasses.replace(rig, stub=ExecutorServiceStub(channel)), base)
        except AssertionError as error:
            raise AssertionError((tmp_path / "log").read_text()[-3000:]) from error
        finally:
            keeper.send_signal(signal.SIGTERM)
            code = keeper.wait(PATIENCE_S)
            log.close()
        assert code == 0


async def _check(rig: Rig, base: Any) -> None:
    pirate = next(iter(rig.peers.published))
    before = await rig.stub.State(pb.StateRequest(), timeout=PATIENCE_S, wait_for_ready=True)
    assert (await rig.answer(P, pirate)).started.revision_id == pirate
    assert [r.revision_id for r in (await rig.state()).revisions] == [pirate]
    innocent = rig.call(P, max_tokens=200, ignore_eos=True)
    await anext(aiter(innocent))
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await collect(rig.call((*P, POISON)))
    assert lost.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in innocent:
            pass
    after = None

    async def back() -> bool:
        nonlocal after
        with contextlib.suppress(grpc.aio.AioRpcError):
            after = await rig.stub.State(pb.StateRequest(), timeout=10)
        return after is not None and after.epoch != before.epoch

    async with asyncio.timeout(PATIENCE_S):
        while not await back():
            await asyncio.sleep(0.1)
    assert after is not None
    assert after.epoch > before.epoch
    assert (after.state, list(after.revisions), after.running_count) == ("SERVING", [], 0)
    assert (await rig.answer(P)).tokens[0] == greedy(base, P, 12)
    again = await rig.answer(P, pirate)
    assert again.started.load_ms > 0
    assert [r.revision_id for r in (await rig.state()).revisions] == [pirate]
