"""A loader that is told an old, frozen or second story loads nothing, and says which of the three it was."""

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from loraport.loader.v1 import loader_service_pb2 as pb
from services.shared.errors import LoraportError
from tests.loader_rig import Bundle, Rig, reason, running, until
from tests.support.translog import FakeLog

GRACE = 30.0


@pytest.fixture
async def rig(tmp_path: Path, address: str, folder: Path) -> AsyncIterator[Rig]:
    policy = {"state_file": str(tmp_path / "state" / "floor.json"), "grace_s": GRACE}
    async with running(tmp_path, address, folder, checkpoint=policy) as rig:
        yield rig


async def tell(rig: Rig, make: Callable[[], bytes] | None = None) -> None:
    """Makes the registry say something new, and waits until the loader has judged it."""
    client, keeper = rig.service._registry, rig.service._registry._keeper
    await until(lambda: client._following.view.epoch == rig.registry.epoch and keeper._task and keeper._task.done())
    judged = keeper._task
    if make is not None:
        rig.registry.checkpoint = make
    async with rig.registry._changed:
        rig.registry.epoch += 1
        rig.registry._changed.notify_all()
    await until(lambda: keeper._task is not judged and keeper._task.done())


def ensure(rig: Rig, bundle: Bundle) -> Any:
    return rig.executor("executor-0").EnsureHost(pb.EnsureHostRequest(revision_id=bundle.revision_id), timeout=60)


async def expired(rig: Rig, *, since_s: float) -> None:
    await tell(rig, lambda: rig.registry.log.checkpoint(rig.registry.epoch, now=time.time() - 600 - since_s))


async def test_freeze(rig: Rig) -> None:
    held, other = await rig.admit(seed=41), await rig.admit(seed=42)
    _, lease = await rig.ensure(held)
    await tell(rig)
    rig.service._registry._keeper.newest = None  # as after a start into a frozen world
    await expired(rig, since_s=1)
    assert await reason(ensure(rig, other)) == "CHECKPOINT_STALE"
    _, again = await rig.ensure(held)
    assert again.weights_digest == held.digest
    rig.service._registry._keeper.newest = None
    await expired(rig, since_s=GRACE + 1)
    assert await reason(ensure(rig, held)) == "CHECKPOINT_STALE"
    assert await rig.read(lease) == held.weights, "what was handed out is still read to its end"
    await tell(rig, lambda: rig.registry.log.checkpoint(rig.registry.epoch))
    assert (await rig.ensure(other))[1].weights_digest == other.digest


async def test_rollback(rig: Rig) -> None:
    bundle = await rig.admit(seed=43)
    log = rig.registry.log
    log.grow(5)
    await tell(rig)
    old = FakeLog(rig.registry.key)
    rig.service._registry._keeper.newest = None
    await tell(rig, lambda: old.checkpoint(rig.registry.epoch))
    assert await reason(ensure(rig, bundle)) == "CHECKPOINT_ROLLBACK"
    await tell(rig, lambda: log.checkpoint(rig.registry.epoch))
    assert (await rig.ensure(bundle))[1].weights_digest == bundle.digest


@pytest.mark.parametrize("size", [3, 9])
async def test_split_view(rig: Rig, size: int) -> None:
    bundle, log = await rig.admit(seed=44 + size), rig.registry.log
    other = FakeLog(rig.registry.key, size=size, history="other")
    log.prove = other.prove  # the liar proves as well as it can
    await tell(rig, lambda: other.checkpoint(rig.registry.epoch))
    assert await reason(ensure(rig, bundle)) == "LOG_SPLIT_VIEW"


async def test_mix_and_match_at_the_upload(rig: Rig) -> None:
    """The session and manifest of one revision with the bytes of another."""
    first, second = rig.registry.register(seed=51), rig.registry.register(seed=52)
    answer = await rig.upload(first, content=second.weights)
    assert not answer.admitted
    assert "DIGEST_MISMATCH" in {item.code for item in rig.registry.revisions[first.revision_id].reasons}


async def test_mix_and_match_in_the_store(rig: Rig) -> None:
    """The bytes of v2 put under the digest of v1, behind everybody's back."""
    first, second = await rig.admit(seed=53), await rig.admit(seed=54)
    rig.stored_path(first).write_bytes(second.weights)
    assert await reason(ensure(rig, first)) == "DIGEST_MISMATCH"


async def test_mix_and_match_of_manifest_and_record(rig: Rig) -> None:
    """The registry's database gives the manifest of v2 beside the record of v1."""
    first, second = await rig.admit(seed=55), await rig.admit(seed=56)
    rig.registry.revisions[first.revision_id].manifest_envelope = second.manifest
    assert await reason(ensure(rig, first)) == "DIGEST_MISMATCH"


async def test_the_floor_outlives_the_loader(rig: Rig, tmp_path: Path, address: str, folder: Path) -> None:
    bundle = await rig.admit(seed=57)
    rig.registry.log.grow(5)
    await tell(rig)
    policy = {"state_file": str(tmp_path / "state" / "floor.json")}
    (tmp_path / "second").mkdir()
    # The second registry of this rig has keys of its own, which a loader with a memory of roots would not follow.
    (tmp_path / "state" / "floor.roots.json").unlink()
    async with running(tmp_path / "second", address, folder, checkpoint=policy) as second:
        # Another registry, as restored from an old backup: an earlier state of the same catalog.
        known = second.registry.register(seed=57)
        assert known.revision_id == bundle.revision_id
        await second.activate(known)
        assert await reason(ensure(second, known)) == "CHECKPOINT_ROLLBACK"
        with pytest.raises(LoraportError, match="CHECKPOINT_ROLLBACK"):
            await second.service._registry.require_fresh()
