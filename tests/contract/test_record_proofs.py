"""A record has to be in the log before its revision is loaded: the loader asks, and so does the executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract import executor_rig
from tests.loader_rig import Rig, reason, until
from tests.support.tiny import prompt_of

P = prompt_of(33)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("logged")
    executor_rig.two_adapters(root)
    return root


@pytest.fixture
async def executor(tmp_path: Path, family: Path) -> AsyncIterator[executor_rig.Rig]:
    peers = executor_rig.Peers()
    peers.publish_two(family)
    async with executor_rig.running(tmp_path, family / "base", peers) as rig:
        yield rig


async def tell(rig: executor_rig.Rig) -> None:
    """Makes the executor see what changed."""
    await rig.peers.tell()
    await until(lambda: rig.service._registry._catalog.view.epoch == rig.peers.epoch)


async def test_a_loader_loads_what_is_logged_and_asks_once(rig: Rig) -> None:
    bundle = await rig.admit(seed=101)
    for _ in range(3):
        await rig.ensure(bundle)
        rig.service.host._resolver._kept.clear()  # the manifest is asked for again, the proof is not
    assert rig.registry.log.inclusions == 1


@pytest.mark.parametrize("lie", ["never logged", "beyond the log", "another's leaf"])
async def test_a_loader_refuses_a_record_that_is_not_where_the_registry_says(rig: Rig, lie: str) -> None:
    good, bad = await rig.admit(seed=102), rig.registry.register(seed=103)
    assert (await rig.upload(bad)).admitted
    await rig.activate(bad)
    leaves = rig.registry.leaves
    leaves[bad.revision_id] = {"never logged": 0, "beyond the log": 999, "another's leaf": leaves[good.revision_id]}[
        lie
    ]
    await rig.activate(good)  # tells the followers
    assert await reason(rig.ensure(bad)) == "RECORD_NOT_LOGGED"
    assert await reason(rig.ensure(good)) == ""
    assert len((await rig.inventory()).entries) == 1, "nothing of the other was fetched"


async def test_a_loader_says_that_the_log_cannot_be_asked_and_asks_again(rig: Rig) -> None:
    bundle = await rig.admit(seed=104)
    rig.registry.log.dead = 2
    assert await reason(rig.ensure(bundle)) == "REGISTRY_UNAVAILABLE"
    rig.registry.log.dead = 1
    assert await reason(rig.ensure(bundle)) == ""


async def test_a_batch_of_loads_is_proven_each_once(rig: Rig) -> None:
    bundles = [await rig.admit(seed=110 + number, adapter=f"a{number}") for number in range(6)]
    await asyncio.gather(*(rig.ensure(bundle, by=f"executor-{n}") for bundle in bundles for n in range(3)))
    assert rig.registry.log.inclusions == len(bundles)


async def test_an_executor_asks_once_and_refuses_what_is_not_logged(executor: executor_rig.Rig) -> None:
    log, (one, two) = executor.peers.log, executor.peers.published
    await asyncio.gather(*(executor.answer(P, one) for _ in range(3)))
    assert log.inclusions == 1
    leaf = executor.peers.published[two].leaf
    executor.peers.published[two].leaf = executor.peers.published[one].leaf
    await tell(executor)
    assert await reason(executor.call(P, two)) == "RECORD_NOT_LOGGED"
    assert executor.peers.served == {one: 1}, "the loader was not even asked"
    executor.peers.published[two].leaf = leaf
    await tell(executor)
    await executor.answer(P, two)
    await executor.answer(P, one)
    asked = log.asked
    log.dead = 100
    await asyncio.gather(executor.answer(P, one), executor.answer(P, two))
    assert log.asked == asked, "warm requests ask nobody"


async def test_an_executor_says_that_the_log_cannot_be_asked(executor: executor_rig.Rig) -> None:
    one = next(iter(executor.peers.published))
    executor.peers.log.dead = 2
    assert await reason(executor.call(P, one)) == "REGISTRY_UNAVAILABLE"
    await executor.answer(P, one)
