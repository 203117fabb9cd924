"""EnsureHost, ReadBlob and their kin on a running loader: real S3, real signatures, sealed memory."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from loraport.bundle.envelope import SigningKey
from loraport.loader.v1 import loader_service_pb2 as pb
from loraport.log.checkpoint import open_checkpoint
from loraport.types.v1 import types_pb2
from services.loader.store import verified_key
from services.shared.errors import LoraportError
from tests.loader_rig import Bundle, Rig, State, reason, running, s3_store, until

STAGES = [
    types_pb2.LOAD_STAGE_RESOLVE,
    types_pb2.LOAD_STAGE_FETCH,
    types_pb2.LOAD_STAGE_VERIFY,
    types_pb2.LOAD_STAGE_STAGE_HOST,
]


class SlowStore:
    """Counts reads of verified objects and holds each until the test lets it go."""

    def __init__(self, rig: Rig, *, held: bool = True) -> None:
        self.reads: list[str] = []
        self.held = held
        self._inner: Any = rig.service.host._store
        rig.service.host._store = self

    def read(self, area: Any, key: str) -> Any:
        self.reads.append(key)
        for piece in self._inner.read(area, key):
            yield piece[:10]
            while self.held:
                time.sleep(0.005)
                yield b""
            yield piece[10:]


def overwrite(rig: Rig, bundle: Bundle, content: bytes) -> None:
    """Changes a verified object behind the loader's back."""
    import io

    s3_store(rig.store_address).put("verified", verified_key(bundle.digest), io.BytesIO(content), len(content))


def ensure(rig: Rig, bundle: Bundle, *, by: str = "executor-0") -> Any:
    return rig.executor(by).EnsureHost(pb.EnsureHostRequest(revision_id=bundle.revision_id), timeout=60)


async def test_active_revision_is_brought_to_sealed_memory_and_read(rig: Rig) -> None:
    bundle = await rig.admit()
    stages, lease = await rig.ensure(bundle)
    assert stages == STAGES
    assert (lease.weights_digest, lease.size_bytes) == (bundle.digest, len(bundle.weights))
    assert lease.manifest_envelope == bundle.manifest
    assert lease.record_envelope == rig.registry.records[bundle.revision_id]
    assert await rig.read(lease) == bundle.weights
    inventory = await rig.inventory()
    [entry] = inventory.entries
    assert (entry.weights_digest, entry.size_bytes, entry.lease_count) == (bundle.digest, len(bundle.weights), 1)
    assert [stage.stage for stage in entry.stages] == STAGES
    assert inventory.used_bytes == len(bundle.weights)
    # The second time there is nothing to fetch.
    stages, again = await rig.ensure(bundle, by="executor-1")
    assert stages == STAGES[:1]
    assert again.lease_id != lease.lease_id


async def test_leases_belong_to_their_holder(rig: Rig) -> None:
    bundle = await rig.admit()
    _, lease = await rig.ensure(bundle)
    stranger = rig.executor("executor-1")
    stolen = stranger.ReadBlob(pb.ReadBlobRequest(lease_id=lease.lease_id), timeout=60)
    assert await reason(stolen) == "LEASE_NOT_FOUND"
    await stranger.ReleaseHost(pb.ReleaseHostRequest(lease_id=lease.lease_id), timeout=60)
    assert await rig.read(lease) == bundle.weights
    for _ in range(2):
        await rig.executor("executor-0").ReleaseHost(pb.ReleaseHostRequest(lease_id=lease.lease_id), timeout=60)
    gone = rig.executor("executor-0").ReadBlob(pb.ReadBlobRequest(lease_id=lease.lease_id), timeout=60)
    assert await reason(gone) == "LEASE_NOT_FOUND"
    assert (await rig.inventory()).entries[0].lease_count == 0


async def test_unused_leases_are_taken_back(tmp_path: Path, address: str, folder: Path) -> None:
    async with running(tmp_path, address, folder, lease_ttl_s=0.2) as rig:
        bundle = await rig.admit()
        await rig.ensure(bundle)
        await until(lambda: [entry[2] for entry in rig.service.host.inventory().entries] == [0])


async def test_fifty_callers_are_one_read(rig: Rig) -> None:
    bundle = await rig.admit()
    store = SlowStore(rig)
    calls = [asyncio.create_task(rig.ensure(bundle, by=f"executor-{i % 5}")) for i in range(50)]
    await until(lambda: [load[2] for load in rig.service.host.inventory().loads] == [50])
    assert (await rig.inventory()).loads[0].stage == types_pb2.LOAD_STAGE_FETCH
    store.held = False
    results = await asyncio.gather(*calls)
    assert len(store.reads) == 1
    assert len({lease.lease_id for _, lease in results}) == 50
    assert all(stages == STAGES for stages, _ in results)
    inventory = await rig.inventory()
    assert (inventory.entries[0].lease_count, len(inventory.loads)) == (50, 0)


async def test_overwritten_object_is_never_served(rig: Rig) -> None:
    bundle = await rig.admit(seed=1)
    store = SlowStore(rig, held=False)
    overwrite(rig, bundle, bytes([bundle.weights[0] ^ 1]) + bundle.weights[1:])
    assert await reason(ensure(rig, bundle)) == "DIGEST_MISMATCH"
    # Remembered: the store is not read again for a while.
    assert await reason(ensure(rig, bundle)) == "DIGEST_MISMATCH"
    assert len(store.reads) == 1
    inventory = await rig.inventory()
    assert (len(inventory.entries), inventory.used_bytes) == (0, 0)


@pytest.mark.parametrize("change", ["longer", "shorter", "gone"])
async def test_object_of_another_size_is_never_served(tmp_path: Path, address: str, folder: Path, change: str) -> None:
    async with running(tmp_path, address, folder, bad_digest_ttl_s=0.0) as rig:
        bundle = await rig.admit(seed=2)
        content = {"longer": bundle.weights * 2, "shorter": bundle.weights[:-1]}.get(change)
        if content is None:
            s3_store(address).delete("verified", verified_key(bundle.digest))
        else:
            overwrite(rig, bundle, content)
        assert await reason(ensure(rig, bundle)) == "DIGEST_MISMATCH"
        # Once the object is right again, so is the answer.
        overwrite(rig, bundle, bundle.weights)
        _, lease = await rig.ensure(bundle)
        assert await rig.read(lease) == bundle.weights


async def test_what_is_in_memory_outlives_the_store(rig: Rig) -> None:
    bundle = await rig.admit(seed=3)
    await rig.ensure(bundle)
    overwrite(rig, bundle, b"something else")
    _, lease = await rig.ensure(bundle)
    assert await rig.read(lease) == bundle.weights


async def test_only_active_revisions_load(rig: Rig) -> None:
    bundle = rig.registry.register(seed=4)
    missing = rig.executor("executor-0").EnsureHost(pb.EnsureHostRequest(revision_id="sha256:" + "0" * 64), timeout=60)
    assert await reason(missing) == "REVISION_NOT_FOUND"
    malformed = rig.executor("executor-0").EnsureHost(pb.EnsureHostRequest(revision_id="../x"), timeout=60)
    assert await reason(malformed) == "INVALID_REQUEST"
    for state in (State.STATE_PENDING, State.STATE_VERIFIED, State.STATE_QUARANTINED, State.STATE_REVOKED):
        await rig.registry.move(bundle.revision_id, state)
        assert await reason(ensure(rig, bundle)) == "REVISION_NOT_ACTIVE"


async def test_record_of_a_strange_key_loads_nothing(rig: Rig) -> None:
    bundle = rig.registry.register(seed=5)
    await rig.upload(bundle)
    await rig.registry.move(bundle.revision_id, State.STATE_ACTIVE, record_key=SigningKey.generate())
    assert await reason(ensure(rig, bundle)) == "REVISION_NOT_ACTIVE"


async def test_manifest_of_another_revision_loads_nothing(rig: Rig) -> None:
    bundle, other = await rig.admit(seed=6), rig.registry.register(seed=7)
    rig.registry.revisions[bundle.revision_id].manifest_envelope = other.manifest
    assert await reason(ensure(rig, bundle)) == "DIGEST_MISMATCH"


async def test_revoked_revision_leaves_with_its_last_lease(rig: Rig) -> None:
    bundle = await rig.admit(seed=8)
    _, lease = await rig.ensure(bundle)
    await rig.registry.move(bundle.revision_id, State.STATE_REVOKED)
    await until(lambda: not rig.service.host._registry.is_active(bundle.revision_id))
    assert await reason(ensure(rig, bundle)) == "REVISION_NOT_ACTIVE"
    assert await rig.read(lease) == bundle.weights
    await rig.executor("executor-0").ReleaseHost(pb.ReleaseHostRequest(lease_id=lease.lease_id), timeout=60)
    assert len((await rig.inventory()).entries) == 0


async def test_a_loader_that_hears_of_no_revocation_any_more_does_not_look_alive(rig: Rig) -> None:
    bundle = await rig.admit(seed=8)

    def broken(items: object) -> None:
        raise KeyError("a bug")

    rig.service._registry._catalog._on_gone = broken
    failed = asyncio.create_task(rig.service.failed())
    await asyncio.sleep(0)
    await rig.registry.move(bundle.revision_id, State.STATE_REVOKED)
    await asyncio.wait_for(failed, 60)


async def test_revocation_during_the_load_wins(rig: Rig) -> None:
    bundle = await rig.admit(seed=9)
    store = SlowStore(rig)
    call = asyncio.create_task(reason(ensure(rig, bundle)))
    await until(lambda: store.reads)
    await rig.registry.move(bundle.revision_id, State.STATE_REVOKED)
    await until(lambda: not rig.service.host._registry.is_active(bundle.revision_id))
    store.held = False
    assert await call == "REVISION_NOT_ACTIVE"
    assert len((await rig.inventory()).entries) == 0


async def test_two_tenants_share_bytes_but_not_a_verdict(rig: Rig) -> None:
    ours, theirs = await rig.admit(seed=10), rig.registry.register(seed=10, tenant="globex")
    assert ours.digest == theirs.digest
    assert ours.revision_id != theirs.revision_id
    await rig.ensure(ours)
    assert await reason(ensure(rig, theirs)) == "REVISION_NOT_ACTIVE"
    await rig.upload(theirs)
    await rig.activate(theirs)
    stages, lease = await rig.ensure(theirs)
    assert stages == STAGES[:1]
    assert lease.manifest_envelope == theirs.manifest
    # One of the two revoked: the bytes stay for the other.
    await rig.registry.move(ours.revision_id, State.STATE_REVOKED)
    assert await rig.read(lease) == theirs.weights
    assert (await rig.ensure(theirs))[0] == STAGES[:1]


async def test_last_caller_gone_stops_the_load(rig: Rig) -> None:
    bundle = await rig.admit(seed=11)
    store = SlowStore(rig)
    calls = [ensure(rig, bundle, by=f"executor-{i}") for i in range(2)]
    for call in calls:
        assert (await call.read()).WhichOneof("event") == "stage"
    await until(lambda: [load[2] for load in rig.service.host.inventory().loads] == [2])
    calls[0].cancel()
    await until(lambda: [load[2] for load in rig.service.host.inventory().loads] == [1])
    calls[1].cancel()
    await until(lambda: not rig.service.host.inventory().loads and not rig.service.host.inventory().used_bytes)
    store.held = False
    _, lease = await rig.ensure(bundle)
    assert await rig.read(lease) == bundle.weights
    assert len(store.reads) == 2


async def test_cancel_stops_only_what_nobody_else_waits_for(rig: Rig) -> None:
    bundle = await rig.admit(seed=12)
    store = SlowStore(rig)
    request = pb.CancelLoadRequest(revision_id=bundle.revision_id)
    first, second = (rig.executor(f"executor-{i}") for i in range(2))
    assert await reason(first.CancelLoad(request, timeout=60)) == "LOAD_NOT_FOUND"
    calls = [asyncio.create_task(reason(ensure(rig, bundle, by=f"executor-{i}"))) for i in range(2)]
    await until(lambda: [load[2] for load in rig.service.host.inventory().loads] == [2])
    assert not (await first.CancelLoad(request, timeout=60)).cancelled
    calls[1].cancel()
    await until(lambda: [load[2] for load in rig.service.host.inventory().loads] == [1])
    assert not (await second.CancelLoad(request, timeout=60)).cancelled
    assert (await first.CancelLoad(request, timeout=60)).cancelled
    assert await calls[0] == "LOAD_CANCELLED"
    await until(lambda: not rig.service.host.inventory().used_bytes)
    store.held = False
    assert (await rig.ensure(bundle))[0] == STAGES


async def test_load_that_waits_for_its_turn_can_be_stopped(tmp_path: Path, address: str, folder: Path) -> None:
    async with running(tmp_path, address, folder, turns={"loads": 1, "loads_per_tenant": 1}) as rig:
        first, second = await rig.admit(seed=13), await rig.admit(seed=14)
        store = SlowStore(rig)
        calls = [asyncio.create_task(reason(ensure(rig, first)))]
        await until(lambda: store.reads)
        calls.append(asyncio.create_task(reason(ensure(rig, second))))
        await until(lambda: len(rig.service.host.inventory().loads) == 2)
        request = pb.CancelLoadRequest(revision_id=second.revision_id)
        assert (await rig.executor("executor-0").CancelLoad(request, timeout=60)).cancelled
        assert await calls[1] == "LOAD_CANCELLED"
        store.held = False
        assert await calls[0] == ""
        assert len(store.reads) == 1
        assert (await rig.ensure(second))[0] == STAGES
        rig.service.host._tier.check()


async def test_host_tier_holds_its_budget_and_its_leases(tmp_path: Path, address: str, folder: Path) -> None:
    async with running(tmp_path, address, folder) as rig:
        bundles = [await rig.admit(seed=20 + i) for i in range(3)]
        size = len(bundles[0].weights)
        rig.service.host._tier.budget_bytes = 2 * size + 100
        leases = [(await rig.ensure(bundle))[1] for bundle in bundles[:2]]
        assert await reason(ensure(rig, bundles[2])) == "HOST_TIER_FULL"
        await rig.executor("executor-0").ReleaseHost(pb.ReleaseHostRequest(lease_id=leases[0].lease_id), timeout=60)
        await rig.ensure(bundles[2])
        held = {entry.weights_digest for entry in (await rig.inventory()).entries}
        assert held == {bundles[1].digest, bundles[2].digest}
        assert await rig.read(leases[1]) == bundles[1].weights
        rig.service.host._tier.check()


async def test_weights_larger_than_the_budget_are_refused(tmp_path: Path, address: str, folder: Path) -> None:
    async with running(tmp_path, address, folder, host_budget_bytes=100) as rig:
        bundle = await rig.admit(seed=30)
        assert await reason(ensure(rig, bundle)) == "HOST_TIER_FULL"


async def test_store_down_fails_the_load_and_is_not_remembered(rig: Rig) -> None:
    bundle = await rig.admit(seed=31)
    good = rig.service.host._store

    class Down:
        def read(self, area: Any, key: str) -> Any:
            raise LoraportError("STORE_UNAVAILABLE", retry_after_s=1.0)

    rig.service.host._store = Down()
    assert await reason(ensure(rig, bundle)) == "STORE_UNAVAILABLE"
    rig.service.host._store = good
    assert (await rig.ensure(bundle))[0] == STAGES


async def test_a_fault_of_our_own_ends_every_caller(rig: Rig) -> None:
    bundle = await rig.admit(seed=32)

    class Broken:
        def read(self, area: Any, key: str) -> Any:
            raise RuntimeError("a bug")

    rig.service.host._store = Broken()
    answers = await asyncio.gather(*(reason(ensure(rig, bundle)) for _ in range(3)))
    assert answers == ["INTERNAL"] * 3
    assert (await rig.inventory()).used_bytes == 0


async def test_registry_down_serves_what_is_known(rig: Rig) -> None:
    bundle, unknown = await rig.admit(seed=33), rig.registry.register(seed=34)
    await rig.ensure(bundle)
    await rig.registry_server.stop(0)
    assert (await rig.ensure(bundle))[0] == STAGES[:1]
    assert await reason(ensure(rig, unknown)) == "REGISTRY_UNAVAILABLE"


async def test_other_roles_may_look_but_not_load(rig: Rig) -> None:
    router = rig.executor("router", role="router")
    found = await router.Inventory(pb.InventoryRequest(), timeout=60)
    assert len(found.entries) == 0
    call = router.EnsureHost(pb.EnsureHostRequest(revision_id="sha256:" + "0" * 64), timeout=60)
    assert await reason(call) == "NOT_ALLOWED"


async def test_it_tells_which_log_it_believes(rig: Rig) -> None:
    await until(lambda: rig.service._registry.seen() is not None)
    told, log = (await rig.inventory()).checkpoint, rig.registry.log
    trusted = {log.key.key_id: log.key.public_pem}
    proven = open_checkpoint(told.envelope, trusted, now=time.time())
    assert (told.tree_size, told.root_hash) == (proven.tree_size, proven.root_hash) == (log.size, log.root().hex())
