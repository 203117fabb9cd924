"""`Score` through a real router, and what happens to a request whose executor goes away."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraport import (
    Client,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    Tokens,
    UnavailableError,
)
from services.router.validate import MAX_SCORE_ENTRIES
from services.shared.errors import LoraportError
from tests.contract.router_world import CONTEXT, World, api_key, digest, eventually

PIRATE = digest("acme/pirate/1")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """acme with the adapter `pirate`, globex with nothing, one executor that a request may wait for."""
    world = World(tmp_path)
    world.overrides = {"executor_wait_s": 60.0}
    world.registry.items += [
        world.registry.base(),
        *world.registry.tenant("acme"),
        *world.registry.tenant("globex"),
        *world.registry.adapter("acme", "pirate"),
    ]
    await world.start_registry()
    await world.start_executor("e0")
    await world.start_router()
    await eventually(lambda: world.router._fleet.view().serves("tiny"))
    yield world
    await world.stop()


async def test_a_score_names_what_made_it_and_has_every_token(world: World) -> None:
    executor = world.executors["e0"]
    executor.load_ms = 7.0
    async with world.client() as client:
        got = await client.score([5, 6], [7, 8, 9], adapter="pirate", top_logprobs=1)
        assert (await client.score([5], [6])).revision_id == ""
    assert (got.revision_id, got.version, got.base_id) == (PIRATE, "v1", world.registry.base_id)
    assert (got.executor, got.kernel_path, got.load_ms) == ("e0", "fake", 7.0)
    assert [(p.chosen.token_id, p.chosen.logprob, len(p.top)) for p in got.logprobs] == [
        (7, -0.5, 1), (8, -0.5, 1), (9, -0.5, 1),
    ]  # fmt: skip
    assert got.logprob == -1.5
    assert (got.usage.prompt_tokens, got.usage.cached_tokens) == (2, 1)
    ticket, request = executor.requests[0]
    assert (ticket.tenant, ticket.revision_id, request.revision_id) == ("acme", PIRATE, PIRATE)
    accounts = world.router._fleet, world.router._admission._dispatch.queue._ledger.accounts["acme"]
    assert accounts[1].prefill == (5 - 1) + (2 - 1), "prompt and continuation are charged, but for what was cached"
    assert accounts[1].load == 14.0
    assert not world.router._admission._dispatch.queue.states(0)


async def test_the_client_for_threads_scores_too(world: World) -> None:
    def use() -> float:
        address, ca = f"127.0.0.1:{world.router.user_port}", world.folder / "ca.pem"
        with Client(address, api_key=api_key("acme"), ca_certificate=ca) as client:
            return client.score([5], [6, 7], adapter="pirate").logprob

    assert await asyncio.to_thread(use) == -1.0


async def test_a_foreign_adapter_is_not_found_and_every_fault_is_listed(world: World) -> None:
    async with world.client("globex") as client:
        with pytest.raises(NotFoundError):
            await client.score([5], [6], revision_id=PIRATE)
        with pytest.raises(InvalidArgumentError) as caught:
            await client.score([], [999], top_logprobs=21)
        assert {fault.subject for fault in caught.value.faults} == {
            "prompt_token_ids", "continuation_token_ids[0]", "top_logprobs",
        }  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="entries"):
            await client.score([5], [6] * (MAX_SCORE_ENTRIES // 21 + 1), top_logprobs=20)
        with pytest.raises(InvalidArgumentError) as caught:
            await client.score([5] * CONTEXT, [6])
        assert caught.value.reason == "PROMPT_TOO_LONG"
        with pytest.raises(InvalidArgumentError, match="unknown argument"):
            await client.score([5], [6], temperature=1)
    assert not world.executors["e0"].requests


async def test_other_weights_are_not_passed_off(world: World) -> None:
    world.executors["e0"].began_with = digest("another")
    async with world.client() as client:
        with pytest.raises(InternalError):
            await client.score([5], [6], adapter="pirate")


async def test_cancelling_a_score_cancels_the_executor(world: World) -> None:
    executor = world.executors["e0"]
    executor.pause_s = 30.0
    async with world.client() as client:
        task = asyncio.create_task(client.score([5], [6]))
        await eventually(lambda: executor.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: executor.cancelled == 1)
        await eventually(lambda: not world.router._admission._dispatch.queue.states(0))


@pytest.mark.parametrize("call", ["generate", "score"])
async def test_the_only_executor_dies_before_the_first_token_and_comes_back(world: World, call: str) -> None:
    """The request waits for it like any other and is then answered; the caller sees nothing of it."""
    executor = world.executors["e0"]
    executor.pause_s = 30.0
    async with world.client() as client:
        asked = client.generate("x", adapter="pirate") if call == "generate" else client.score([5], [6])
        task = asyncio.create_task(asked)
        await eventually(lambda: executor.running == 1)
        await world.stop_server("e0")
        await eventually(lambda: not world.router._fleet.view().serves("tiny"))
        await asyncio.sleep(0.2)
        assert len(executor.requests) == 1, "nothing is sent to an executor that is gone"
        executor.pause_s = 0.0
        await world.start_executor("e0")
        assert (await task).executor == "e0"
    assert len(executor.requests) == 2
    first, second = (request.request_id for _, request in executor.requests)
    assert first == second
    assert world.router._admission._dispatch.queue._ledger.accounts["acme"].prefill <= 2, "its prompt is charged once"


async def test_a_request_is_tried_twice_at_most(world: World) -> None:
    executor = world.executors["e0"]

    def gone() -> None:
        raise LoraportError("DRAINING", retry_after_s=1.0)

    executor.fail_before = gone
    async with world.client() as client:
        with pytest.raises(UnavailableError) as caught:
            await client.generate("x", adapter="pirate")
    assert caught.value.reason == "DRAINING"
    assert len(executor.requests) == 2


async def test_an_executor_that_never_comes_back_is_said_in_time(world: World) -> None:
    await world.router.stop()
    world.overrides = {"executor_wait_s": 0.3}
    await world.start_router()
    executor = world.executors["e0"]
    executor.pause_s = 30.0
    async with world.client() as client:
        task = asyncio.create_task(client.generate("x", adapter="pirate"))
        await eventually(lambda: executor.running == 1)
        await world.stop_server("e0")
        with pytest.raises(UnavailableError) as caught:
            await task
    assert caught.value.reason == "EXECUTOR_UNAVAILABLE"
    assert not world.router._admission._dispatch.queue.states(0)


async def test_after_the_first_token_nothing_is_tried_again_and_the_message_says_so(world: World) -> None:
    executor = world.executors["e0"]
    executor.reply, executor.pause_s = [60] * 50, 0.2
    async with world.client() as client:
        with pytest.raises(UnavailableError, match="in the middle of the answer") as caught:
            async for event in client.stream("x", adapter="pirate", max_tokens=50):
                if isinstance(event, Tokens) and "e0" in world.servers:
                    await world.stop_server("e0")
    assert caught.value.reason == "EXECUTOR_UNAVAILABLE"
    assert len(executor.requests) == 1
    assert "No executor" not in str(caught.value)
    assert os.linesep not in str(caught.value)
