"""Uploads into a running loader: real S3, real signatures, a registry that notes what it is told."""

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loraport.bundle.envelope import SigningKey
from loraport.loader.v1 import loader_service_pb2 as pb
from services.loader.receive import MAX_CONFIG_BYTES
from services.shared.errors import LoraportError
from services.shared.statements import seal
from tests.bundle_files import config, encode
from tests.loader_rig import Rig, State, reason, running, s3_server, s3_store, stored, tiny_folder, until, upload_parts


@pytest.fixture
async def rig(tmp_path: Path, address: str, folder: Path) -> AsyncIterator[Rig]:
    async with running(tmp_path, address, folder, upload_idle_s=60.0) as rig:
        yield rig
        await until(lambda: stored(folder, "quarantine") == [])


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that sends nothing keeps its place for as long as a test needs it."""
    monkeypatch.setattr("services.loader.receive.PATIENCE_S", 600.0)
    monkeypatch.setattr("services.loader.intake.PATIENCE_S", 600.0)


async def test_good_bundle_is_verified_and_kept_under_its_digest(rig: Rig) -> None:
    bundle = rig.registry.register()
    answer = await rig.upload(bundle)
    assert answer.admitted
    assert answer.revision_id == bundle.revision_id
    assert not answer.violations
    [statement] = rig.registry.admitted
    assert statement.admitted
    assert (statement.weights_digest, statement.weights_size) == (bundle.digest, len(bundle.weights))
    assert rig.stored_path(bundle).read_bytes() == bundle.weights


async def test_a_second_upload_of_a_judged_revision_gets_the_same_answer(rig: Rig) -> None:
    bundle = rig.registry.register(seed=1)
    first = await rig.upload(bundle)
    again = await rig.upload(bundle, content=bundle.weights[:-1] + b"x")
    assert (again.admitted, again.revision_id) == (first.admitted, first.revision_id)
    assert len(rig.registry.admitted) == 1


async def test_two_uploads_at_once_are_judged_once(rig: Rig) -> None:
    bundle = rig.registry.register(seed=2)
    answers = await asyncio.gather(*(rig.upload(bundle) for _ in range(3)))
    assert all(answer.admitted for answer in answers)
    assert len(rig.registry.admitted) == 1


async def test_a_newer_session_of_a_revision_takes_its_turn_over(
    tmp_path: Path, address: str, folder: Path, patient: None
) -> None:
    async with running(tmp_path, address, folder, upload_idle_s=600.0) as rig:
        bundle = rig.registry.register(seed=40)
        first, *_ = upload_parts(seal(bundle.session, rig.registry.key), bundle.config, bundle.weights)

        async def never_ends() -> AsyncIterator[object]:
            yield first
            await asyncio.Event().wait()

        held = rig.uploads.Upload(never_ends(), timeout=60)
        await until(lambda: bundle.revision_id in rig.service.intake._turns._one._of_key)
        newer = replace(bundle, session=replace(bundle.session, expires=bundle.session.expires + 1))
        assert (await rig.upload(newer)).admitted
        assert await reason(held) == "OVERLOADED"


async def test_equal_weights_of_several_tenants_share_one_object(rig: Rig) -> None:
    bundles = [rig.registry.register(seed=24, tenant=f"tenant-{i}") for i in range(6)]
    answers = await asyncio.gather(*(rig.upload(bundle) for bundle in bundles))
    assert all(answer.admitted for answer in answers)
    assert len({answer.revision_id for answer in answers}) == 6
    assert rig.stored_path(bundles[0]).read_bytes() == bundles[0].weights


async def test_tampered_weights_are_quarantined_with_the_reason(rig: Rig) -> None:
    bundle = rig.registry.register(seed=3)
    answer = await rig.upload(bundle, content=bundle.weights[:-4] + b"\0\0\x80\x3f")
    assert not answer.admitted
    assert [(v.code, v.subject) for v in answer.violations] == [("DIGEST_MISMATCH", "adapter_model.safetensors")]
    assert rig.registry.revisions[bundle.revision_id].state == State.STATE_QUARANTINED
    assert not rig.stored_path(bundle).exists()
    # The same session again: the verdict stands.
    again = await rig.upload(bundle)
    assert [v.code for v in again.violations] == ["DIGEST_MISMATCH"]


async def test_hostile_weights_list_everything_that_is_wrong(rig: Rig) -> None:
    bundle = rig.registry.register(seed=4)
    answer = await rig.upload(bundle, content=b"\xff" * len(bundle.weights))
    codes = [violation.code for violation in answer.violations]
    assert codes[0] == "DIGEST_MISMATCH"
    assert "HEADER_LENGTH" in codes


async def test_tampered_config_is_quarantined_and_its_new_meaning_named(rig: Rig) -> None:
    bundle = rig.registry.register(seed=5)
    answer = await rig.upload(bundle, settings=encode(config(lora_alpha=8)))
    assert not answer.admitted
    found = {violation.code: violation for violation in answer.violations}
    assert set(found) == {"DIGEST_MISMATCH", "IDENTITY_MISMATCH"}
    assert found["DIGEST_MISMATCH"].subject == "adapter_config.json"
    assert "modules" in found["IDENTITY_MISMATCH"].detail


@pytest.mark.parametrize("file", ["config", "weights"])
async def test_one_byte_too_many_ends_the_upload(rig: Rig, file: str) -> None:
    bundle = rig.registry.register(seed=6)
    if file == "config":
        call = rig.upload(bundle, settings=b"{" + b" " * MAX_CONFIG_BYTES)
    else:
        call = rig.upload(bundle, content=bundle.weights + b"x")
    assert await reason(call) == "UPLOAD_TOO_LARGE"
    assert rig.registry.revisions[bundle.revision_id].state == State.STATE_PENDING


async def test_short_upload_may_be_repeated(rig: Rig) -> None:
    bundle = rig.registry.register(seed=7)
    assert await reason(rig.upload(bundle, content=bundle.weights[:-1])) == "INVALID_REQUEST"
    assert await reason(rig.upload(bundle, settings=b"")) == "INVALID_REQUEST"
    assert (await rig.upload(bundle)).admitted


async def test_parts_out_of_order_are_refused(rig: Rig) -> None:
    bundle = rig.registry.register(seed=8)
    session = seal(bundle.session, rig.registry.key)
    parts = upload_parts(session, bundle.config, bundle.weights)
    assert await reason(rig.send(parts[1:])) == "INVALID_REQUEST"
    assert await reason(rig.send([parts[0], *reversed(parts)])) == "INVALID_REQUEST"
    assert await reason(rig.send([])) == "INVALID_REQUEST"
    unknown = pb.UploadRequest(chunk=pb.FileChunk(data=b"x"))
    assert await reason(rig.send([parts[0], unknown])) == "INVALID_REQUEST"
    empty = pb.UploadRequest(chunk=pb.FileChunk(file=pb.FileChunk.FILE_CONFIG))
    assert await reason(rig.send([parts[0], empty])) == "INVALID_REQUEST"


async def test_sessions_prove_themselves(rig: Rig) -> None:
    bundle = rig.registry.register(seed=9)
    other = rig.registry.register(seed=10)
    key = rig.registry.key

    async def answer(session: bytes) -> str:
        parts = upload_parts(session, bundle.config, bundle.weights)
        return await reason(rig.send(parts))

    good = bundle.session
    assert await answer(seal(replace(good, expires=int(time.time()) - 60), key)) == "INVALID_SESSION"
    assert await answer(seal(good, SigningKey.generate())) == "INVALID_SESSION"
    assert await answer(seal(good, rig.loader_key)) == "INVALID_SESSION"
    assert await answer(b"{}") == "INVALID_SESSION"
    assert await answer(seal(replace(good, tenant="../x"), key)) == "INVALID_SESSION"
    assert await answer(seal(replace(good, revision_id="sha256:" + "0" * 64), key)) == "REVISION_NOT_FOUND"
    # A registry that signs one revision's session over another's bytes contradicts its own manifest.
    assert await answer(seal(replace(good, revision_id=other.revision_id), key)) == "DIGEST_MISMATCH"
    await rig.registry.move(bundle.revision_id, State.STATE_REVOKED)
    assert await answer(seal(good, key)) == "INVALID_SESSION"
    assert rig.registry.admitted == []


async def test_session_of_another_revision_quarantines_that_revision(rig: Rig) -> None:
    bundle, other = rig.registry.register(seed=11), rig.registry.register(seed=12)
    answer = await rig.upload(other, settings=bundle.config, content=bundle.weights)
    assert [violation.code for violation in answer.violations] == ["DIGEST_MISMATCH"]
    assert rig.registry.revisions[bundle.revision_id].state == State.STATE_PENDING


async def test_client_gone_half_way_leaves_nothing(rig: Rig, folder: Path) -> None:
    bundle = rig.registry.register(seed=13)
    parts = upload_parts(seal(bundle.session, rig.registry.key), bundle.config, bundle.weights)
    call = rig.uploads.Upload()
    for part in parts[: len(parts) // 2]:
        await call.write(part)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    # Its turn is free again, nothing is stored, and the revision still waits for its bytes.
    assert (await asyncio.wait_for(rig.upload(bundle), 60)).admitted


async def test_upload_that_stalls_is_ended(tmp_path: Path, address: str, folder: Path) -> None:
    async with running(tmp_path, address, folder, upload_idle_s=0.3) as rig:
        bundle = rig.registry.register(seed=14)

        async def stalls() -> AsyncIterator[object]:
            yield pb.UploadRequest(session=seal(bundle.session, rig.registry.key))
            await asyncio.Event().wait()

        assert await reason(rig.uploads.Upload(stalls(), timeout=60)) == "DEADLINE_EXCEEDED"


async def test_registry_that_is_slow_to_answer_is_asked_again(rig: Rig) -> None:
    bundle = rig.registry.register(seed=15)
    failures = iter([True, True])

    def hook() -> None:
        if next(failures, False):
            raise LoraportError("REGISTRY_UNAVAILABLE")

    rig.registry.admit_hook = hook
    assert (await rig.upload(bundle)).admitted


async def test_registry_down_is_said_so(rig: Rig) -> None:
    bundle = rig.registry.register(seed=16)
    await rig.registry_server.stop(0)
    assert await reason(rig.upload(bundle)) == "REGISTRY_UNAVAILABLE"


async def test_store_down_is_said_so_and_recovers(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    with s3_server(folder) as address:
        pass
    async with running(tmp_path, address, folder) as rig:
        bundle = rig.registry.register()
        assert await reason(rig.upload(bundle)) == "STORE_UNAVAILABLE"
        assert rig.registry.revisions[bundle.revision_id].state == State.STATE_PENDING
        assert rig.registry.admitted == []
        with s3_server(folder, address):
            assert (await rig.upload(bundle)).admitted


@pytest.mark.parametrize("full", ["store", "spool"])
async def test_full_disk_is_said_so_and_nothing_is_kept(tmp_path: Path, address: str, folder: Path, full: str) -> None:
    with tiny_folder(tmp_path / "tiny") as tiny:
        if full == "spool":
            async with running(tmp_path, address, folder, spool_dir=str(tiny)) as rig:
                await full_disk(rig, tiny)
            return
        with s3_server(tiny) as own:
            async with running(tmp_path, own, tiny) as rig:
                await full_disk(rig, tiny)
            assert stored(tiny, "quarantine") == []


async def full_disk(rig: Rig, tiny: Path) -> None:
    bundle = rig.registry.register(seed=17)
    with contextlib.suppress(OSError), (tiny / "filler").open("wb", buffering=0) as filler:
        while filler.write(b"x" * 4096):
            pass
    assert await reason(rig.upload(bundle)) == "STORAGE_FULL"
    assert rig.registry.revisions[bundle.revision_id].state == State.STATE_PENDING
    (tiny / "filler").unlink()
    assert (await rig.upload(bundle)).admitted


async def test_judging_goes_on_when_the_client_is_gone(rig: Rig) -> None:
    """Once every byte is here, the verdict is the registry's to have."""
    bundle = rig.registry.register(seed=18)
    reached = asyncio.Event()
    failures = iter([True])

    def hook() -> None:
        reached.set()
        if next(failures, False):
            raise LoraportError("REGISTRY_UNAVAILABLE")

    rig.registry.admit_hook = hook
    call = asyncio.create_task(rig.upload(bundle))
    await reached.wait()
    call.cancel()
    await until(lambda: rig.registry.admitted)
    assert rig.registry.revisions[bundle.revision_id].state == State.STATE_VERIFIED


async def test_object_that_changes_in_quarantine_is_caught(rig: Rig) -> None:
    """What is verified is what is read back, not what came over the wire."""
    bundle = rig.registry.register(seed=19)
    store = rig.service.intake._store

    class Liar:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def read(self, area: str, key: str) -> Iterator[bytes]:
            for piece in store.read(area, key):
                yield piece if area == "verified" or key.endswith("config") else piece[:-1] + b"x"

    rig.service.intake._store = Liar()
    answer = await rig.upload(bundle)
    assert "DIGEST_MISMATCH" in [violation.code for violation in answer.violations]


async def test_store_that_does_not_keep_what_it_takes_is_caught(rig: Rig) -> None:
    bundle = rig.registry.register(seed=20)
    store = rig.service.intake._store

    class Liar:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def put(self, area: str, key: str, data: io.BytesIO, size: int) -> None:
            store.put(area, key, io.BytesIO(b"x" * size) if area == "verified" else data, size)

    rig.service.intake._store = Liar()
    assert await reason(rig.upload(bundle)) == "DIGEST_MISMATCH"
    assert rig.registry.admitted == []
    rig.service.intake._store = store
    # The wrong object under the digest is replaced by the next good upload.
    assert (await rig.upload(bundle)).admitted
    assert rig.stored_path(bundle).read_bytes() == bundle.weights


async def test_uploads_of_one_tenant_take_turns(tmp_path: Path, address: str, folder: Path, patient: None) -> None:
    async with running(tmp_path, address, folder, turns={"uploads": 2, "uploads_per_tenant": 1}) as rig:
        slow, other = rig.registry.register(seed=21), rig.registry.register(seed=22)
        foreign = rig.registry.register(seed=23, tenant="globex")
        call = rig.uploads.Upload(timeout=60)
        await call.write(pb.UploadRequest(session=seal(slow.session, rig.registry.key)))
        await until(lambda: rig.service.intake._turns._places._of_key)
        waiting = asyncio.create_task(rig.upload(other))
        assert (await rig.upload(foreign)).admitted
        assert not waiting.done()
        call.cancel()
        assert (await waiting).admitted


async def test_a_second_upload_of_a_revision_waits_without_a_place(
    tmp_path: Path, address: str, folder: Path, patient: None
) -> None:
    async with running(tmp_path, address, folder, turns={"uploads": 2, "uploads_per_tenant": 2}) as rig:
        bundle, other = rig.registry.register(seed=31), rig.registry.register(seed=32)
        session = pb.UploadRequest(session=seal(bundle.session, rig.registry.key))
        calls = [rig.uploads.Upload(timeout=60) for _ in range(2)]
        turns = rig.service.intake._turns
        for call in calls:
            await call.write(session)
        await until(lambda: [users for _, users in turns._one._of_key.values()] == [2])
        await until(lambda: "acme" in turns._places._of_key)
        assert [users for _, users in turns._places._of_key.values()] == [1], "one of two places is left"
        assert (await rig.upload(other)).admitted
        for call in calls:
            call.cancel()
        assert (await rig.upload(bundle)).admitted


async def test_an_upload_that_trickles_is_ended(
    tmp_path: Path, address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if it had been going on for long: whatever comes is too little.
    monkeypatch.setattr("services.loader.receive.PATIENCE_S", -1e6)
    async with running(tmp_path, address, folder) as rig:
        assert await reason(rig.upload(rig.registry.register(seed=33))) == "DEADLINE_EXCEEDED"


async def test_restart_sweeps_quarantine(tmp_path: Path, address: str, folder: Path) -> None:
    for key in ("loader/an-old-run/weights", "other-loader/running/weights"):
        s3_store(address).put("quarantine", key, io.BytesIO(b"left behind"), 11)
    async with running(tmp_path, address, folder):
        assert stored(folder, "quarantine") == ["other-loader/running/weights"]
    s3_store(address).delete("quarantine", "other-loader/running/weights")


async def test_upload_address_serves_nothing_else(rig: Rig) -> None:
    call = rig.uploads.EnsureHost(pb.EnsureHostRequest(revision_id="sha256:" + "0" * 64), timeout=60)
    assert await reason(call) == "NOT_ALLOWED"
    assert await reason(rig.uploads.Inventory(pb.InventoryRequest(), timeout=60)) == "NOT_ALLOWED"
