"""An executor loads nothing by a stale checkpoint, serves what it has through the grace, and then nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.contract.executor_rig import Peers, Rig, running, two_adapters
from tests.loader_rig import reason, until
from tests.support.tiny import greedy, prompt_of, with_adapter
from tests.support.translog import FakeLog

P = prompt_of(33)
GRACE = 30.0


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("fresh")
    base = two_adapters(root)
    return root, greedy(with_adapter(base, root / "one"), P, 12)


@pytest.fixture
async def rig(tmp_path: Path, family) -> AsyncIterator[Rig]:
    root, _ = family
    peers = Peers()
    peers.publish_two(root)
    policy = {"state_file": str(tmp_path / "state" / "floor.json"), "grace_s": GRACE}
    async with running(tmp_path, root / "base", peers, checkpoint=policy) as rig:
        yield rig


async def tell(rig: Rig, make: Callable[[], bytes]) -> None:
    """Makes the registry say something new, and waits until the executor has judged it."""
    client, keeper = rig.service._registry, rig.service._registry._keeper
    await until(lambda: client._catalog.view.epoch == rig.peers.epoch and keeper._task and keeper._task.done())
    judged, rig.peers.checkpoint = keeper._task, make
    await rig.peers.tell()
    await until(lambda: keeper._task is not judged and keeper._task.done())


async def test_stale_serves_what_is_loaded_and_dead_does_not(rig: Rig, family) -> None:
    one, two = rig.peers.published
    answer = (await rig.answer(P, one)).tokens[0]
    assert answer == family[1]
    running_on = asyncio.create_task(rig.answer(P, one, max_tokens=200))
    rig.service._registry._keeper.newest = None
    await tell(rig, lambda: rig.peers.log.checkpoint(rig.peers.epoch, now=time.time() - 601))
    assert await reason(rig.call(P, two)) == "CHECKPOINT_STALE"
    assert (await rig.answer(P, one)).tokens[0] == answer
    rig.service._registry._keeper.newest = None
    await tell(rig, lambda: rig.peers.log.checkpoint(rig.peers.epoch, now=time.time() - 601 - GRACE))
    assert await reason(rig.call(P, one)) == "CHECKPOINT_STALE"
    assert (await rig.answer(P)).tokens[0], "the base model needs no revision's record"
    assert (await running_on).finished[0].usage.completion_token_count > 12, "what runs is not cut off"
    await tell(rig, lambda: rig.peers.log.checkpoint(rig.peers.epoch))
    assert (await rig.answer(P, two)).tokens[0]
    assert (await rig.answer(P, one)).tokens[0] == answer


async def test_rollback_and_split_view_load_nothing_and_have_their_own_names(rig: Rig) -> None:
    one, two = rig.peers.published
    log = rig.peers.log
    log.grow(4)
    await tell(rig, lambda: log.checkpoint(rig.peers.epoch))
    await rig.answer(P, one)
    believed = rig.service._registry.seen()
    assert believed is not None
    other = FakeLog(rig.peers.key, size=log.size, history="other")
    await tell(rig, lambda: other.checkpoint(rig.peers.epoch))
    assert await reason(rig.call(P, two)) == "LOG_SPLIT_VIEW"
    told = (await rig.state()).checkpoint
    assert (told.tree_size, told.root_hash) == (log.size, log.root().hex()), "it tells of the log that it believes"
    assert told.envelope == believed[1]
    assert (await rig.answer(P, one)).tokens[0]
    rig.service._registry._keeper.newest = None
    rig.service._registry._keeper.alarm = ""
    old = FakeLog(rig.peers.key)
    await tell(rig, lambda: old.checkpoint(rig.peers.epoch))
    assert await reason(rig.call(P, two)) == "CHECKPOINT_ROLLBACK"
    await tell(rig, lambda: log.checkpoint(rig.peers.epoch))
    assert (await rig.answer(P, two)).tokens[0]
