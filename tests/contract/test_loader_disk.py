"""The disk tier of a running loader: it saves reads of the store, and is never believed."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loraport.loader.v1 import loader_service_pb2 as pb
from loraport.types.v1 import types_pb2
from tests.loader_rig import Bundle, Rig, State, reason, running, s3_store, until

STORE, DISK = types_pb2.TIER_STORE, types_pb2.TIER_DISK
FETCH, VERIFY = types_pb2.LOAD_STAGE_FETCH, types_pb2.LOAD_STAGE_VERIFY


@pytest.fixture
async def rig(tmp_path: Path, address: str, folder: Path) -> AsyncIterator[Rig]:
    async with running(tmp_path, address, folder, node={"disk_dir": str(tmp_path / "disk")}) as rig:
        yield rig
        rig.service.host._tier.check()
        rig.service._disk._tier.check()


def disk_path(tmp_path: Path, bundle: Bundle) -> Path:
    return tmp_path / "disk" / "sha256" / bundle.digest[7:9] / bundle.digest[9:]


async def load(rig: Rig, bundle: Bundle) -> list[tuple[int, int]]:
    """Loads from cold and gives the lease back; returns (stage, tier) of each stage."""
    call = rig.executor("executor-0").EnsureHost(pb.EnsureHostRequest(revision_id=bundle.revision_id), timeout=60)
    events = [event async for event in call]
    lease = events[-1].lease
    assert await rig.read(lease) == bundle.weights
    await rig.executor("executor-0").ReleaseHost(pb.ReleaseHostRequest(lease_id=lease.lease_id), timeout=60)
    return [(event.stage.stage, event.stage.tier) for event in events[:-1]]


async def forget(rig: Rig) -> None:
    """Empties host memory, as if other revisions had needed the room."""
    host = rig.service.host
    await until(lambda: not host._tasks)
    host._close(host._tier.reserve("test", host._tier.budget_bytes, tenants=("test",)))
    host._tier.cancel("test")
    assert host.inventory().entries == ()


async def test_the_second_load_comes_from_disk_even_without_a_store(rig: Rig, tmp_path: Path) -> None:
    bundle = await rig.admit()
    assert (FETCH, STORE) in await load(rig, bundle)
    await forget(rig)
    assert disk_path(tmp_path, bundle).read_bytes() == bundle.weights
    s3_store(rig.store_address).delete("verified", f"sha256/{bundle.digest[7:9]}/{bundle.digest[9:]}")
    assert (FETCH, DISK) in await load(rig, bundle)
    [entry] = (await rig.inventory()).entries
    assert [stage.tier for stage in entry.stages if stage.stage == FETCH] == [DISK]


@pytest.mark.parametrize("fault", ["changed", "shorter", "longer", "link"])
async def test_a_spoiled_file_is_deleted_and_the_store_is_read(rig: Rig, tmp_path: Path, fault: str) -> None:
    bundle = await rig.admit(seed=1)
    await load(rig, bundle)
    await forget(rig)
    path, good = disk_path(tmp_path, bundle), bundle.weights
    match fault:
        case "changed":
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        case "shorter":
            path.write_bytes(good[:-1])
        case "longer":
            path.write_bytes(good + b"x")
        case "link":
            path.unlink()
            path.symlink_to("/dev/zero")
    stages = await load(rig, bundle)
    tried = [(FETCH, DISK), (VERIFY, 0)] if fault == "changed" else []
    assert stages[1:-1] == [*tried, (FETCH, STORE), (VERIFY, 0)]
    assert rig.service._disk.spoiled_count == 1
    # What was read from the store is kept again.
    await forget(rig)
    assert path.read_bytes() == good
    assert (FETCH, DISK) in await load(rig, bundle)


async def test_spoiled_on_disk_and_in_the_store_is_never_served(rig: Rig, tmp_path: Path) -> None:
    bundle = await rig.admit(seed=2)
    await load(rig, bundle)
    await forget(rig)
    bad = bytes(len(bundle.weights))
    disk_path(tmp_path, bundle).write_bytes(bad)
    rig.stored_path(bundle).write_bytes(bad)
    call = rig.executor("executor-0").EnsureHost(pb.EnsureHostRequest(revision_id=bundle.revision_id), timeout=60)
    assert await reason(call) == "DIGEST_MISMATCH"
    assert not disk_path(tmp_path, bundle).exists()
    assert (await rig.inventory()).used_bytes == 0


async def test_deleting_the_whole_directory_costs_one_read(rig: Rig, tmp_path: Path) -> None:
    bundle = await rig.admit(seed=3)
    await load(rig, bundle)
    await forget(rig)
    shutil.rmtree(tmp_path / "disk")
    assert (FETCH, STORE) in await load(rig, bundle)
    await forget(rig)
    assert (FETCH, DISK) in await load(rig, bundle)


async def test_revocation_deletes_the_copy(rig: Rig, tmp_path: Path) -> None:
    bundle = await rig.admit(seed=4)
    await load(rig, bundle)
    await until(lambda: disk_path(tmp_path, bundle).exists())
    await rig.registry.move(bundle.revision_id, State.STATE_REVOKED)
    await until(lambda: not disk_path(tmp_path, bundle).exists())
    assert rig.service._disk.used_bytes == 0


async def test_a_restart_finds_what_is_there(tmp_path: Path, address: str, folder: Path) -> None:
    settings: dict[str, Any] = {"node": {"disk_dir": str(tmp_path / "disk")}}
    async with running(tmp_path, address, folder, **settings) as rig:
        bundle = await rig.admit(seed=5)
        await load(rig, bundle)
        await until(lambda: not rig.service.host._tasks)
    async with running(tmp_path, address, folder, **settings) as rig:
        again = await rig.admit(seed=5)
        assert again.digest == bundle.digest
        assert (FETCH, DISK) in await load(rig, again)


async def test_a_disk_without_room_costs_no_load(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    bundle = await rig.admit(seed=6)
    monkeypatch.setattr("services.loader.disk_cache.os.write", full)
    await load(rig, bundle)
    await until(lambda: not rig.service.host._tasks)
    monkeypatch.undo()
    assert [path for path in (tmp_path / "disk").rglob("*") if path.is_file()] == []
    await forget(rig)
    assert (FETCH, STORE) in await load(rig, bundle)
