"""One tenant asks for too much in every way it can; the router's other tenants do not notice."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from loraport import UnavailableError
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from loraport.types.v1 import types_pb2
from services.router import lanes
from services.router.text import BaseText
from services.shared.errors import LoraportError
from tests.contract.router_world import World, api_key, eventually, write_tokenizer

LONG = "x" * (lanes.SHORT_CHARS + 1)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """acme and globex with an adapter each, one executor with room for four answers."""
    world = World(tmp_path)
    world.registry.items += [world.registry.base()]
    for tenant in ("acme", "globex"):
        world.registry.items += [*world.registry.tenant(tenant), *world.registry.adapter(tenant, "pirate")]
    world.overrides = {"executor_window": 4, "life": {"drain_s": 0.2}}
    await world.start_registry()
    await world.start_executor("e0")
    await world.start_router()
    yield world
    await world.stop()


def test_long_text_does_not_stop_the_interpreter(tmp_path: Path) -> None:
    """The event loop must turn while a thread tokenizes; `Tokenizer.encode` would hold it all the time."""
    write_tokenizer(tmp_path)
    text = BaseText.load(tmp_path)

    def turns_meanwhile() -> int:
        turns, done = 0, threading.Event()
        worker = threading.Thread(target=lambda: (text.encode("the quick brown fox " * 20_000), done.set()))
        worker.start()
        while not done.is_set():
            time.sleep(0.001)
            turns += 1
        worker.join()
        return turns

    # Where other processes hold the processors, a thread may tokenize to its end before another one is let run.
    assert any(turns_meanwhile() > 5 for _ in range(20))


async def test_short_prompts_pass_long_ones(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    encode = BaseText.encode
    monkeypatch.setattr(
        BaseText, "encode", lambda self, text: (len(text) > 100 and gate.wait(60), encode(self, text))[1]
    )
    entered, run = [], lanes.Lanes.run
    monkeypatch.setattr(
        lanes.Lanes, "run", lambda self, tenant, *rest: (entered.append(1), run(self, tenant, *rest))[1]
    )
    async with world.client() as bad, world.client("globex") as good:
        asked = [asyncio.create_task(bad.count_tokens(LONG, adapter="pirate")) for _ in range(lanes.MAX_OPEN)]
        await eventually(lambda: len(entered) == lanes.MAX_OPEN)
        try:
            with pytest.raises(UnavailableError, match="long prompts"):
                await bad.count_tokens(LONG, adapter="pirate")
            # acme has one lane, whatever it asks for; the other lane and all short text are free.
            assert (await good.generate("the quick", adapter="pirate", max_tokens=2)).token_ids
        finally:
            gate.set()
        assert {count.token_count for count in await asyncio.gather(*asked)} == {len(world.ids(LONG))}
        assert (await bad.count_tokens(LONG, adapter="pirate")).token_count


async def test_a_cancelled_caller_keeps_its_lane_until_the_thread_ends() -> None:
    turns, gate, running = lanes.Lanes(), threading.Event(), []

    def work() -> None:
        running.append(1)
        gate.wait(60)

    for tenant in ("a", "b", "c", "a"):
        task = asyncio.create_task(turns.run(tenant, work))
        await asyncio.sleep(0.05)  # far enough to wait for a lane or to have a thread begun
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: len(running) == lanes.LANES)
    await asyncio.sleep(0.05)
    assert len(running) == lanes.LANES
    gate.set()
    assert await asyncio.wait_for(turns.run("a", lambda: 7), 60) == 7
    with pytest.raises(LoraportError, match="NOT_FOUND"):
        await turns.run("a", _fail)
    # The threads of those who left end when they do.
    await eventually(lambda: not turns._open and not turns._turns)


def _fail() -> None:
    raise LoraportError("ADAPTER_NOT_FOUND")


async def test_every_answer_of_a_request_takes_its_own_place(world: World) -> None:
    """Else a few requests for many answers each fill an executor's own queue, where nobody is fair."""
    executor = world.executors["e0"]
    executor.pause_s = 0.1
    async with world.client() as client:
        await asyncio.gather(*(client.generate("the", adapter="pirate", max_tokens=3, n=4) for _ in range(3)))
        assert executor.most_running == 1
        executor.held = asyncio.Event()
        running = asyncio.gather(*(client.generate("the", adapter="pirate", max_tokens=3) for _ in range(4)))
        await eventually(lambda: executor.running == 4)
        executor.held.set()
        await running


async def test_callers_that_do_not_read_lose_their_place(world: World) -> None:
    await world.router.stop()
    world.overrides["life"] = {"drain_s": 0.2, "max_unread_s": 2.0}
    await world.start_router()
    executor = world.executors["e0"]
    executor.reply = [50] * 40
    credentials = grpc.ssl_channel_credentials((world.folder / "ca.pem").read_bytes())
    # A small window that does not grow by itself: what is not read stays at the router.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)]
    address = f"127.0.0.1:{world.router.user_port}"
    async with (
        grpc.aio.secure_channel(address, credentials, options=options) as channel,
        world.client("globex") as good,
    ):
        request = pb.GenerateRequest(
            target=pb.Target(adapter="pirate"),
            prompt="the",
            sampling=types_pb2.SamplingParams(max_tokens=40, n=16, logprobs=20),
        )
        metadata = (("authorization", f"Bearer {api_key('acme')}"),)
        calls = []
        for _ in range(3):
            calls.append(stubs.InferenceServiceStub(channel).Generate(request, metadata=metadata))
            await eventually(lambda: executor.requests)  # the first call is the first to run, and to be cut
        for call in calls:
            await call.initial_metadata()
        await eventually(lambda: len(executor.requests) >= 2)
        answer = await good.generate("the quick", adapter="pirate", max_tokens=2)
        assert list(answer.token_ids) == executor.reply[:2]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in calls[0]:
                pass
        assert refused.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        for call in calls:
            call.cancel()
