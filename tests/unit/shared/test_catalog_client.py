"""A miss is answered from a view that is at least as new as the question; many misses are few calls."""

import asyncio
import gc
from collections.abc import AsyncIterator

import grpc
import pytest

from loraport.bundle.envelope import SigningKey
from loraport.log.checkpoint import Floor
from loraport.log.leaf import Kind
from loraport.registry.v1 import catalog_service_pb2 as pb
from services.shared.catalog_client import CatalogClient
from tests.support.translog import FakeLog


class Registry:
    """Answers GetEpoch when told to, with the epoch of the moment in which the question arrived."""

    def __init__(self) -> None:
        self.epoch = 1
        self.asked = 0
        self.gate = asyncio.Event()
        self.down = False

    async def GetEpoch(self, request: pb.GetEpochRequest, timeout: float) -> pb.GetEpochResponse:
        self.asked += 1
        epoch = self.epoch
        await self.gate.wait()
        if self.down:
            raise grpc.RpcError
        return pb.GetEpochResponse(epoch=epoch)


def client(registry: Registry) -> CatalogClient:
    made = CatalogClient(grpc.aio.insecure_channel("127.0.0.1:1"), artefacts_only=True)
    made._stub = registry
    return made


async def test_a_late_caller_does_not_join_an_older_question() -> None:
    registry = Registry()
    follower = client(registry)
    follower.view.epoch = 1
    early = asyncio.create_task(follower.catch_up(60))
    await asyncio.sleep(0.01)
    registry.epoch = 2  # something was written after the first question had arrived
    late = [asyncio.create_task(follower.catch_up(60)) for _ in range(100)]
    await asyncio.sleep(0.01)
    registry.gate.set()
    assert await early
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in late), "answered from a view older than the question"
    follower.view.epoch = 2
    async with follower._changed:
        follower._changed.notify_all()
    assert all(await asyncio.gather(*late))
    assert registry.asked == 2


async def test_a_registry_that_does_not_answer_is_no_hang() -> None:
    unseen: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    registry = Registry()
    follower = client(registry)
    assert not await follower.catch_up(0.05)
    registry.down = True
    registry.gate.set()
    assert not await follower.catch_up(60)
    registry.down = False
    follower.view.epoch = 1
    assert await follower.catch_up(60)
    gc.collect()
    assert unseen == [], "an answer that nobody waits for any more is no fault"


class Told(Registry):
    """Streams one full state, and ends."""

    def __init__(self, epoch: int, log: FakeLog) -> None:
        super().__init__()
        self.state = pb.WatchResponse(epoch=epoch, items=log.told(), synced=True)

    async def Watch(self, request: pb.WatchRequest) -> AsyncIterator[pb.WatchResponse]:
        yield self.state


async def test_a_new_connection_may_not_lead_behind_what_was_signed_and_only_that_counts() -> None:
    log, key = FakeLog(SigningKey.generate()), SigningKey.generate()
    log.restrict(Kind.REVOKED, "tenants/acme/adapters/bot/revisions/v1")
    floor = Floor()
    follower = client(Registry())
    follower._floor = lambda: floor
    follower._stub = Told(2**60, log)  # an epoch that nobody signed
    await follower._watch_once()
    assert follower.view.epoch == 2**60
    floor = Floor(catalog_epoch=7, restriction_count=1, restriction_head=log.as_list().heads[1].hex())
    for epoch, told, why in ((6, log, "went back"), (9, FakeLog(key), "lacks")):
        follower._stub = Told(epoch, told)
        with pytest.raises(ValueError, match=why):
            await follower._watch_once()
        assert follower.view.epoch == 2**60
    follower._stub = Told(8, log)
    await follower._watch_once()
    assert follower.view.epoch == 8, "the true one is not shut out"
