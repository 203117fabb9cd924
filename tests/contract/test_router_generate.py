"""The life of a request through a real router: answer, stop, retry, cancel, failure; each ends exactly once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraport import (
    Client,
    DeadlineExceededError,
    FailedPreconditionError,
    Finished,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    Started,
    Tokens,
    UnavailableError,
)
from loraport.errors import LoraportError as ClientError
from loraport.executor.v1 import executor_service_pb2 as epb
from loraport.registry.v1 import catalog_service_pb2 as cpb
from services.executor.many import Events
from services.router import executor_link
from services.router.tickets import Tickets
from services.shared.errors import LoraportError
from tests.contract.router_world import CONTEXT, World, api_key, digest, eventually, said

PIRATE = digest("acme/pirate/1")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """acme with the adapter `pirate`, globex with nothing, one executor."""
    world = World(tmp_path)
    world.registry.items += [
        world.registry.base(),
        *world.registry.tenant("acme"),
        *world.registry.tenant("globex"),
        *world.registry.adapter("acme", "pirate"),
    ]
    await world.start_registry()
    await world.start_executor("e0")
    await world.start_router()
    yield world
    await world.stop()


async def test_an_answer_names_the_revision_that_made_it(world: World) -> None:
    executor = world.executors["e0"]
    executor.reply, executor.load_ms = world.ids("the quick fox"), 12.5
    async with world.client() as client:
        done = await client.generate("hello", adapter="pirate", max_tokens=20, logprobs=2)
    assert (done.text, list(done.token_ids)) == ("the quick fox", executor.reply)
    assert (done.revision_id, done.version, done.base_id) == (PIRATE, "v1", world.registry.base_id)
    assert (done.executor, done.finish_reason, done.kernel_path, done.load_ms) == ("e0", "stop", "fake", 12.5)
    assert list(done.prompt_token_ids) == world.ids("hello")
    assert [len(position.top) for position in done.logprobs] == [2] * len(executor.reply)
    ticket, request = executor.requests[0]
    assert (ticket.tenant, ticket.revision_id, ticket.base_id) == ("acme", PIRATE, world.registry.base_id)
    assert (request.revision_id, request.sampling.max_tokens) == (PIRATE, 20)


async def test_the_client_for_threads_sees_the_same(world: World) -> None:
    world.executors["e0"].reply = world.ids("the fox")

    def use() -> None:
        with Client(
            f"127.0.0.1:{world.router.user_port}", api_key=api_key("acme"), ca_certificate=world.folder / "ca.pem"
        ) as client:
            done = client.generate("x", adapter="pirate")
            assert (done.text, done.revision_id) == ("the fox", PIRATE)
            assert next(type(event) for event in client.stream("x")) is Started
            assert [adapter.adapter for adapter in client.list_adapters()] == ["pirate"]
            assert client.get_adapter("tenants/acme/adapters/pirate").base_model == "baseModels/tiny"
            assert client.count_tokens("the").token_ids == tuple(world.ids("the"))
            with pytest.raises(NotFoundError, match="ADAPTER_NOT_FOUND"):
                client.generate("x", adapter="nothing")

    await asyncio.to_thread(use)


async def test_by_revision_by_base_by_messages_and_by_ids(world: World) -> None:
    async with world.client() as client:
        assert (await client.generate("x", revision_id=PIRATE)).revision_id == PIRATE
        base = await client.generate("x")
        assert (base.revision_id, base.version) == ("", "")
        assert (await client.generate("x", base_model="tiny")).revision_id == ""
        chat = await client.generate(messages=[{"role": "user", "content": "hi"}])
        assert (
            world.tokenizer.decode(list(chat.prompt_token_ids), skip_special_tokens=False) == "<|user|>hi<|assistant|>"
        )
        ids = await client.generate(prompt_token_ids=[7, 8, 9], adapter="pirate", max_tokens=2)
        assert (ids.prompt_token_ids, ids.finish_reason, len(ids.token_ids)) == ((7, 8, 9), "length", 2)


async def test_a_stream_is_started_tokens_finished_and_never_splits_a_character(world: World) -> None:
    world.executors["e0"].reply = world.ids("é😀 ok")
    async with world.client() as client:
        events = [event async for event in client.stream("x", adapter="pirate")]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    texts = [event.text for event in events[1:-1] if isinstance(event, Tokens)]
    assert len(texts) == len(events) - 2
    assert "".join(texts) == "é😀 ok"
    assert not any("�" in text for text in texts)


async def test_a_stop_string_is_never_emitted_and_ends_the_executors_work(world: World) -> None:
    executor = world.executors["e0"]
    executor.reply, executor.pause_s = world.ids("one two STOP three") + [60] * 40, 0.01
    async with world.client() as client:
        done = await client.generate("x", adapter="pirate", stop=["STOP", "zzz"], max_tokens=60)
    assert (done.text, done.finish_reason, done.stop_match) == ("one two ", "stop", "STOP")
    assert done.usage.completion_tokens == len(done.token_ids) == len(world.ids("one two STOP"))
    assert done.kernel_path == "fake"
    await eventually(lambda: executor.running == 0)
    assert not executor.requests[0][1].sampling.stop


async def test_several_answers_end_one_by_one(world: World) -> None:
    world.executors["e0"].reply = world.ids("abc")
    async with world.client() as client:
        done = await client.generate("x", adapter="pirate", n=3)
    assert [answer.text for answer in done.answers] == ["abc"] * 3


async def test_requests_of_several_tenants_run_side_by_side(world: World) -> None:
    executor = world.executors["e0"]
    executor.held = asyncio.Event()
    async with world.client() as acme, world.client("globex") as globex:
        asked = [acme.generate("x", adapter="pirate") for _ in range(4)] + [globex.generate("x") for _ in range(4)]
        running = asyncio.gather(*asked)
        await eventually(lambda: executor.running == 8)
        executor.held.set()
        await running


async def test_cancelling_the_client_cancels_the_executor(world: World) -> None:
    executor = world.executors["e0"]
    executor.reply, executor.pause_s = [60] * 50, 0.2
    async with world.client() as client:
        async for event in client.stream("x", adapter="pirate", max_tokens=50):
            if isinstance(event, Tokens):
                break
    await eventually(lambda: executor.cancelled == 1 and executor.running == 0)
    queues = world.router._admission._dispatch.queue
    await eventually(lambda: not queues.states(0))


async def test_an_executor_that_has_told_everything_ends_its_call_or_is_made_to(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = world.executors["e0"]
    async with world.client() as client:
        await client.generate("x", adapter="pirate")
        await eventually(lambda: executor.running == 0)
        assert executor.cancelled == 0
        monkeypatch.setattr(executor_link, "END_S", 0.2)
        executor.lingers = True
        await client.generate("x", adapter="pirate")
        await eventually(lambda: executor.cancelled == 1 and executor.running == 0)


async def test_a_waiting_request_leaves_when_its_client_does(world: World) -> None:
    await world.router.stop()
    world.overrides = {"executor_window": 1}
    await world.start_router()
    executor = world.executors["e0"]
    executor.reply, executor.held = [60] * 40, asyncio.Event()
    async with world.client() as client:
        first = asyncio.create_task(client.generate("x", max_tokens=40))
        await eventually(lambda: executor.running == 1)
        with pytest.raises(DeadlineExceededError):
            await client.generate("x", timeout=0.2)
        executor.held.set()
        done = await first
    assert len(done.token_ids) == 40
    assert len(executor.requests) == 1


@pytest.mark.parametrize("reason", ["DRAINING", "INVALID_TICKET"])
async def test_an_executor_that_is_gone_or_takes_no_ticket_is_replaced_before_the_first_token(
    world: World, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = await world.start_executor("e1", resident=[PIRATE])
    await world.router.stop()
    await world.start_router()
    fleet = world.router._fleet
    await eventually(lambda: len([e for e in fleet.view().executors if e.serving]) == 2)

    def refuse() -> None:
        raise LoraportError(reason, retry_after_s=1.0)

    second.fail_before = refuse
    taken_out, forgotten, forget = [], [], Tickets.forget
    monkeypatch.setattr(fleet, "note_failure", lambda name, why: taken_out.append((name, why)))
    monkeypatch.setattr(Tickets, "forget", lambda tickets, **of: (forgotten.append(of), forget(tickets, **of)))
    async with world.client() as client:
        done = await client.generate("x", adapter="pirate")
    assert (done.executor, len(second.requests)) == ("e0", 1)
    # One tenant's ticket says nothing of an executor.
    assert taken_out == ([("e1", reason)] if reason == "DRAINING" else [])
    assert len(forgotten) == (reason == "INVALID_TICKET"), "the next one is made anew"


async def test_no_executor_is_unavailable_with_a_retry_delay_and_recovers(world: World) -> None:
    await world.stop_server("e0")
    async with world.client() as client:
        with pytest.raises(UnavailableError) as caught:
            await client.generate("x", adapter="pirate")
        assert (caught.value.reason, caught.value.retry_after) == ("EXECUTOR_UNAVAILABLE", 1.0)
        await world.start_executor("e0")
        await eventually(lambda: world.router._fleet.view().serves("tiny"))
        assert (await client.generate("x", adapter="pirate")).revision_id == PIRATE


async def test_a_failure_after_the_first_token_is_the_status(world: World) -> None:
    world.executors["e0"].fail_after = 2
    events = []
    async with world.client() as client:
        with pytest.raises(InternalError) as caught:
            async for event in client.stream("x", adapter="pirate"):
                events.append(event)
    assert caught.value.reason == "NON_FINITE_LOGITS"
    assert [type(event) for event in events] == [Started, Tokens, Tokens]


async def test_an_executor_dying_in_the_middle_is_unavailable(world: World) -> None:
    executor = world.executors["e0"]
    executor.reply, executor.pause_s = [60] * 50, 0.2
    async with world.client() as client:
        with pytest.raises(UnavailableError):
            async for event in client.stream("x", adapter="pirate", max_tokens=50):
                if isinstance(event, Tokens) and "e0" in world.servers:
                    await world.stop_server("e0")


async def test_other_weights_than_asked_for_are_never_relayed(world: World) -> None:
    world.executors["e0"].began_with = digest("another")
    async with world.client() as client:
        with pytest.raises(InternalError):
            await client.generate("x", adapter="pirate")


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("WRONG_BASE", "INTERNAL"),
        ("INVALID_TICKET", "EXECUTOR_UNAVAILABLE"),
        ("MERGED_MODE", "EXECUTOR_UNAVAILABLE"),
        ("LOAD_CANCELLED", "LOADER_UNAVAILABLE"),
    ],
)
async def test_a_fault_between_the_services_does_not_reach_the_caller(world: World, reason: str, told: str) -> None:
    def refuse() -> None:
        raise LoraportError(reason, "secret detail")

    world.executors["e0"].fail_before = refuse
    async with world.client() as client:
        with pytest.raises(ClientError) as caught:
            await client.generate("x", adapter="pirate")
    assert caught.value.reason == told
    assert "secret" not in str(caught.value)
    assert "incident" in str(caught.value)
    # A clock that is off is set right sooner or later: whoever asks again is told when.
    assert (caught.value.retry_after is not None) == (told != "INTERNAL")


async def test_first_token_timeout(world: World) -> None:
    world.executors["e0"].pause_s = 60.0
    async with world.client() as client:
        with pytest.raises(DeadlineExceededError):
            await client.generate("x", adapter="pirate", first_token_timeout=0.1)
    await eventually(lambda: world.executors["e0"].running == 0)


async def test_bad_requests_name_every_fault(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(InvalidArgumentError) as caught:
            await client.generate("", adapter="pirate", temperature=-1, top_p=0, max_tokens=10**6, n=99, seed=-3)
        assert {fault.subject for fault in caught.value.faults} == {
            "prompt", "sampling.temperature", "sampling.top_p", "sampling.max_tokens", "sampling.n", "sampling.seed",
        }  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="token id 999"):
            await client.generate(prompt_token_ids=[1, 999])
        with pytest.raises(InvalidArgumentError) as caught:
            await client.generate("word " * 200, adapter="pirate")
        assert caught.value.reason == "PROMPT_TOO_LONG"
        with pytest.raises(InvalidArgumentError) as caught:
            await client.generate(prompt_token_ids=[9] * 10, max_tokens=CONTEXT - 9)
        assert caught.value.reason == "PROMPT_TOO_LONG"
        with pytest.raises(InvalidArgumentError):
            await client.generate("x", revision_id=PIRATE, alias="prod")
    assert not world.executors["e0"].requests


async def test_a_full_queue_is_a_typed_refusal(world: World) -> None:
    await world.router.stop()
    world.overrides = {"executor_window": 1, "max_queued": 1}
    await world.start_router()
    executor = world.executors["e0"]
    executor.reply, executor.held = [60] * 50, asyncio.Event()
    async with world.client() as client:
        running = [asyncio.create_task(client.generate("x", max_tokens=30))]
        await eventually(lambda: executor.requests)
        # With the window full, three more are one that waits and two that are too many.
        running += [asyncio.create_task(client.generate("x", max_tokens=30)) for _ in range(3)]
        await eventually(lambda: sum(task.done() for task in running) == 2)
        executor.held.set()
        results = await asyncio.gather(*running, return_exceptions=True)
    refused = [result for result in results if isinstance(result, UnavailableError)]
    assert len(refused) == 2
    assert {(error.reason, error.retry_after) for error in refused} == {("OVERLOADED", 1.0)}
    assert len(results) - len(refused) == len(executor.requests)


async def test_a_revision_that_no_executor_can_hold(world: World) -> None:
    await world.put(*world.registry.adapter("acme", "huge", rank=128))
    async with world.client() as client:
        await eventually(lambda: world.router._fleet.view().serves("tiny"))
        with pytest.raises(ResourceExhaustedError) as caught:
            await client.generate("x", adapter="huge")
    assert caught.value.reason == "POOL_TOO_SMALL"


async def test_a_revoked_revision_is_a_reason_for_its_owner_only(world: World) -> None:
    revoked = world.registry.revision("acme", "pirate", state="REVOKED", shared=("globex",))
    await world.put(cpb.CatalogItem(revision=revoked))
    async with world.client() as acme, world.client("globex") as globex:
        with pytest.raises(FailedPreconditionError) as caught:
            await acme.generate("x", adapter="pirate")
        assert (caught.value.reason, caught.value.metadata["state"]) == ("REVISION_NOT_ACTIVE", "REVOKED")
        with pytest.raises(NotFoundError):
            await globex.generate("x", revision_id=PIRATE)


@pytest.mark.parametrize(
    "wrong",
    [
        [epb.ExecuteResponse.Event()],
        said(started=epb.ExecuteResponse.Started(revision_id=PIRATE)),
        said(tokens=epb.ExecuteResponse.Tokens(index=5, token_ids=[1])),
        said(finished=epb.ExecuteResponse.Finished(index=-1)),
    ],
    ids=["unknown", "again", "index", "negative"],
)
async def test_what_an_executor_may_not_say_ends_that_request_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, wrong: Events
) -> None:
    executor = world.executors["e0"]
    executor.reply = [50]

    async def says(*_: object) -> AsyncIterator[Events]:
        yield wrong

    async with world.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(executor, "_answer", says)
            with pytest.raises(InternalError):
                await client.generate("the", adapter="pirate")
        await eventually(lambda: executor.running == 0)
        assert (await client.generate("the", adapter="pirate", max_tokens=1)).token_ids == (50,)
