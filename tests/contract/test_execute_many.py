"""Many prompts over one stream of a running executor: what one of them does or suffers is nobody else's matter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty

from loraport.executor.v1 import executor_service_pb2 as pb
from loraport.types.v1 import types_pb2
from services.router.executor_link import Link
from services.shared.errors import LoraportError
from tests.contract.executor_rig import Peers, Rig, collect, next_id, running, slowly, two_adapters
from tests.loader_rig import reason, until
from tests.support.tiny import prompt_of

P = prompt_of(33)
Item, Begin = pb.ExecuteManyRequest.Item, pb.ExecuteManyRequest.Begin


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("family")
    two_adapters(root)
    return root


@pytest.fixture
async def rig(tmp_path: Path, root: Path) -> AsyncIterator[Rig]:
    peers = Peers()
    peers.publish_two(root)
    async with running(tmp_path, root / "base", peers) as rig:
        rig.link = Link(rig.stub.ExecuteMany)
        yield rig


def begin(rig: Rig, key: int = 1, *, timeout_s: float = 60, **changes: Any) -> Item:
    fields = {
        "ticket": rig.ticket(), "prompt_token_ids": P, "request_id": next_id(),
        "sampling": types_pb2.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), **changes,
    }  # fmt: skip
    return Item(key=key, begin=Begin(request=pb.ExecuteRequest(**fields), timeout_s=timeout_s))


def open_requests(rig: Rig) -> int:
    return rig.service._device.engine.state().open_requests


async def told(call: Any, *keys: int) -> dict[int, list[Any]]:
    """Reads the parts of prompts until all of them have ended."""
    parts: dict[int, list[Any]] = {key: [] for key in keys}
    left = set(keys)
    while left:
        message = await call.read()
        assert message is not grpc.aio.EOF, f"{left} have no end"
        for part in message.parts:
            assert part.key in left, "nothing of a prompt that has ended, or of none"
            parts[part.key].append(part)
            if part.HasField("end"):
                left.remove(part.key)
    return parts


async def test_the_same_answers_as_by_a_call_each(rig: Rig) -> None:
    revisions = ["", *rig.peers.published]
    prompts = [(P[: 5 + at], revisions[at % 3]) for at in range(12)]
    together = await asyncio.gather(*(rig.answer(*prompt, n=2) for prompt in prompts))
    rig.link = None
    for prompt, answer in zip(prompts, together, strict=True):
        assert (await rig.answer(*prompt, n=2)).tokens == answer.tokens


async def test_a_fault_of_the_stream_ends_it_and_all_that_runs(rig: Rig) -> None:
    slowly(rig)
    faults = {
        "no action": Item(key=2),
        "a key in use": begin(rig, 1),
        "a key of before": begin(rig, 0),
        "no time": begin(rig, 2, timeout_s=0),
        "time that is none": begin(rig, 2, timeout_s=float("nan")),
    }
    for name, item in faults.items():
        call = rig.stub.ExecuteMany()
        long = types_pb2.SamplingParams(max_tokens=200, ignore_eos=True)
        await call.write(pb.ExecuteManyRequest(items=[begin(rig, 1, sampling=long)]))
        await until(lambda: open_requests(rig) == 1)
        await call.write(pb.ExecuteManyRequest(items=[item]))
        assert await reason(call) == "INVALID_REQUEST", name
        await until(lambda: open_requests(rig) == 0)
    assert len((await rig.answer(P)).tokens[0]) == 12


async def test_a_refused_prompt_is_told_so_in_its_own_end(rig: Rig) -> None:
    call = rig.stub.ExecuteMany()
    items = [begin(rig, 1), begin(rig, 2, ticket=b"{}"), begin(rig, 3, prompt_token_ids=[]), begin(rig, 4)]
    await call.write(pb.ExecuteManyRequest(items=items))
    parts = await told(call, 1, 2, 3, 4)
    assert [parts[key][-1].end.code for key in (1, 2, 3, 4)] == [0, 7, 3, 0]
    assert sum(len(part.events) for part in parts[1]) >= 3
    # What is said of prompts that have ended, or never began, is no fault.
    await call.write(pb.ExecuteManyRequest(items=[Item(key=1, cancel=Empty()), Item(key=9, hold=True)]))
    await call.write(pb.ExecuteManyRequest(items=[begin(rig, 5)]))
    await told(call, 5)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK


async def test_a_stream_that_is_lost_frees_its_rows(rig: Rig) -> None:
    slowly(rig)
    call = rig.stub.ExecuteMany()
    long = types_pb2.SamplingParams(max_tokens=200, ignore_eos=True)
    await call.write(pb.ExecuteManyRequest(items=[begin(rig, key, sampling=long) for key in range(5)]))
    await until(lambda: open_requests(rig) == 5)
    call.cancel()
    await until(lambda: open_requests(rig) == 0)


async def test_what_is_cancelled_at_once_leaves_nothing(rig: Rig) -> None:
    call = rig.stub.ExecuteMany()
    items = [item for key in range(20) for item in (begin(rig, key), Item(key=key, cancel=Empty()))]
    await call.write(pb.ExecuteManyRequest(items=[*items, begin(rig, 99)]))
    await told(call, 99)
    await until(lambda: open_requests(rig) == 0)


async def test_a_held_prompt_goes_on_and_tells_later(rig: Rig) -> None:
    call = rig.stub.ExecuteMany()
    await call.write(pb.ExecuteManyRequest(items=[begin(rig, 1), Item(key=1, hold=True), begin(rig, 2)]))
    await told(call, 2)
    await until(lambda: open_requests(rig) == 0)
    await call.write(pb.ExecuteManyRequest(items=[Item(key=1, hold=False)]))
    events = [event for part in (await told(call, 1))[1] for event in part.events]
    assert sum(len(event.tokens.token_ids) for event in events) == 4


async def test_a_prompt_ends_at_its_time_on_both_sides(rig: Rig) -> None:
    slowly(rig)
    call = rig.stub.ExecuteMany()
    long = types_pb2.SamplingParams(max_tokens=200, ignore_eos=True)
    await call.write(pb.ExecuteManyRequest(items=[begin(rig, 1, sampling=long, timeout_s=0.3)]))
    assert (await told(call, 1))[1][-1].end.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert await reason(rig.call(P, max_tokens=200, ignore_eos=True, timeout=0.3)) == "DEADLINE_EXCEEDED"
    await until(lambda: open_requests(rig) == 0)


async def test_a_prompts_time_is_kept_while_its_revision_loads(rig: Rig) -> None:
    rig.peers.hold.clear()
    revision = next(iter(rig.peers.published))
    call = rig.stub.ExecuteMany()
    item = begin(rig, 1, ticket=rig.ticket(revision), revision_id=revision, timeout_s=0.3)
    try:
        await call.write(pb.ExecuteManyRequest(items=[item]))
        assert (await told(call, 1))[1][-1].end.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    finally:
        rig.peers.hold.set()


async def test_a_process_that_stops_ends_the_stream_with_its_last_prompt(rig: Rig) -> None:
    slowly(rig)
    calls: list[Any] = []
    await collect(_linked(rig, Link(_recorded(rig, calls))))
    rig.link = Link(_recorded(rig, calls))
    running_one = rig.call(P, max_tokens=20, ignore_eos=True)
    await anext(aiter(running_one))
    stopping = asyncio.create_task(rig.service.stop())
    await until(lambda: rig.service._device.engine.state().draining)
    assert await reason(rig.call(P)) == "DRAINING"
    assert await reason(running_one) == ""
    await stopping
    # By the process, and not by the end of its grace.
    assert [await call.code() for call in calls] == [grpc.StatusCode.OK] * 2


def _recorded(rig: Rig, calls: list[Any]) -> Any:
    def opened() -> Any:
        calls.append(rig.stub.ExecuteMany())
        return calls[-1]

    return opened


def _linked(rig: Rig, link: Link) -> Any:
    before, rig.link = rig.link, link
    try:
        return rig.call(P)
    finally:
        rig.link = before


async def test_an_executor_that_is_not_there_is_unavailable(rig: Rig) -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        link = Link(type(rig.stub)(channel).ExecuteMany)
        for _ in range(2):
            assert await reason(_linked(rig, link)) == "EXECUTOR_UNAVAILABLE"


async def test_a_stream_that_has_its_age_makes_room_for_another(rig: Rig) -> None:
    slowly(rig)
    calls: list[Any] = []
    rig.link = Link(_recorded(rig, calls), max_age_s=0.05)
    first = rig.call(P, max_tokens=20, ignore_eos=True)
    await anext(aiter(first))
    await asyncio.sleep(0.1)
    second = rig.call(P)
    assert await asyncio.gather(reason(first), reason(second)) == ["", ""]
    assert len(calls) == 2
    await until(lambda: calls[0].done())
    assert await calls[0].code() == grpc.StatusCode.OK


async def test_a_request_that_fits_no_message_fails_alone(rig: Rig) -> None:
    slowly(rig)
    other = rig.call(P, max_tokens=20, ignore_eos=True)
    await anext(aiter(other))
    with pytest.raises(LoraportError) as caught:
        rig.call((1 << 30,) * (1 << 18))
    assert caught.value.reason == "PROMPT_TOO_LONG"
    # The longest that is sent is refused by its own end: an executor takes the message.
    assert await reason(rig.call((1 << 20,) * ((1 << 20) // 3 - 1000))) == "INVALID_REQUEST"
    assert await reason(other) == ""


async def test_only_routers_open_streams(rig: Rig) -> None:
    assert await reason(rig.admin.ExecuteMany()) == "NOT_ALLOWED"
