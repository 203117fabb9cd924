"""Sealed memory from a running loader into an executor's client: handed over on one host, read everywhere else."""

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraport.loader.v1 import loader_service_pb2 as pb
from services.executor.handover import HandoverFailed, take_over
from services.executor.loader_client import LoaderClient
from services.executor.ports import Stage
from services.shared.errors import LoraportError
from tests.loader_rig import Bundle, Rig, running, until


@pytest.fixture
async def rig(tmp_path: Path, address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    # Both sides of the socket are in this process, which may be slow.
    monkeypatch.setattr("services.executor.loader_client.take_over", partial(take_over, patience_s=60.0))
    async with running(tmp_path, address, folder, node={"handover_socket": str(tmp_path / "s")}) as rig:
        rig.service._handover._patience_s = 60.0
        yield rig
        rig.service.host._tier.check()
    assert not (tmp_path / "s").exists()


class Client(LoaderClient):
    """The executor's client under an executor's identity; counts the bytes that were read instead."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(grpc.aio.insecure_channel("127.0.0.1:1"), timeout_s=60)
        self._stub = rig.executor("executor-0")
        self.stages: list[Stage] = []
        self.reads = 0

    async def _read(self, lease_id: str, size_bytes: int) -> bytearray:
        self.reads += 1
        return await super()._read(lease_id, size_bytes)

    async def get(self, bundle: Bundle) -> Any:
        return await self.fetch(bundle.revision_id, size_bytes=len(bundle.weights), on_stage=self.stages.append)


async def leases(rig: Rig) -> list[int]:
    return [entry.lease_count for entry in (await rig.inventory()).entries]


async def test_memory_is_handed_over_and_held_only_while_it_is_used(rig: Rig) -> None:
    bundle, client = await rig.admit(), Client(rig)
    for _ in range(2):
        host = await client.get(bundle)
        assert host.data.readonly
        assert host.data == bundle.weights
        assert host.manifest_envelope == bundle.manifest
        assert await leases(rig) == [1]
        host.give_back()
        await until(lambda: [entry[2] for entry in rig.service.host.inventory().entries] == [0])
    assert client.reads == 0
    assert [(stage.name, stage.tier) for stage in client.stages][:3] == [
        ("RESOLVE", ""),
        ("FETCH", "STORE"),
        ("VERIFY", ""),
    ]
    assert len(rig.service.host._tokens) == 0
    await client.close()


def memory_files() -> int:
    """Descriptors of weights in this process, which is loader and executor at once."""
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "memfd:loraport-weights" in os.readlink(f"/proc/self/fd/{name}")
    return found


async def test_descriptors_do_not_add_up(rig: Rig) -> None:
    bundle, client = await rig.admit(seed=1), Client(rig)
    before = memory_files()
    hosts = [await client.get(bundle) for _ in range(10)]
    # One of the loader's, and one behind each mapping; the loader closes what it has handed over.
    await until(lambda: memory_files() == before + 11)
    for host in hosts:
        host.give_back()
    del hosts, host
    await until(lambda: [entry[2] for entry in rig.service.host.inventory().entries] == [0])
    await until(lambda: memory_files() == before + 1)
    await client.close()


async def test_without_a_socket_bytes_are_read(tmp_path: Path, address: str, folder: Path) -> None:
    async with running(tmp_path, address, folder) as rig:
        bundle, client = await rig.admit(seed=2), Client(rig)
        _, lease = await rig.ensure(bundle)
        assert (lease.handover_token, lease.handover_socket) == (b"", "")
        assert (await client.get(bundle)).data == bundle.weights
        assert client.reads == 1
        await client.close()


async def test_a_socket_that_cannot_be_reached_means_reading(rig: Rig, tmp_path: Path) -> None:
    """As from another host: the path means nothing there."""
    bundle, client = await rig.admit(seed=3), Client(rig)
    (tmp_path / "s").rename(tmp_path / "elsewhere")
    assert (await client.get(bundle)).data == bundle.weights
    assert client.reads == 1
    await until(lambda: [entry[2] for entry in rig.service.host.inventory().entries] == [0])
    (tmp_path / "elsewhere").unlink()
    await client.close()


async def test_memory_that_could_not_be_sealed_is_read_instead(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, client = await rig.admit(seed=4), Client(rig)
    monkeypatch.setattr("services.loader.sealed.Blob.seal", lambda _: None)
    assert (await client.get(bundle)).data == bundle.weights
    assert client.reads == 1
    await client.close()


async def test_a_token_ends_with_its_lease(rig: Rig, tmp_path: Path) -> None:
    bundle = await rig.admit(seed=5)
    (_, lease), (_, expired) = await rig.ensure(bundle), await rig.ensure(bundle)
    await rig.executor("executor-0").ReleaseHost(pb.ReleaseHostRequest(lease_id=lease.lease_id), timeout=60)
    rig.service.host.expire_leases(idle_s=-1.0)
    for gone in (lease, expired):
        with pytest.raises(HandoverFailed, match="refused"):
            await asyncio.to_thread(
                take_over, gone.handover_socket, gone.handover_token, gone.lease_id, size_bytes=gone.size_bytes
            )
    assert len(rig.service.host._tokens) == 0


async def test_another_size_than_signed_is_no_bytes_at_all(rig: Rig) -> None:
    bundle, client = await rig.admit(seed=6), Client(rig)
    with pytest.raises(LoraportError) as caught:
        await client.fetch(bundle.revision_id, size_bytes=len(bundle.weights) + 1, on_stage=client.stages.append)
    assert caught.value.reason == "DIGEST_MISMATCH"
    await until(lambda: [entry[2] for entry in rig.service.host.inventory().entries] == [0])
    await client.close()


async def test_what_is_mapped_outlives_loader_and_revocation(rig: Rig) -> None:
    bundle, client = await rig.admit(seed=7), Client(rig)
    host = await client.get(bundle)
    await rig.service.host.close()
    assert host.data == bundle.weights
    host.give_back()
    await client.close()
