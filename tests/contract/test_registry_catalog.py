"""What peers hear, aliases, lists of adapters and the audit log, over real connections."""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from loraport.registry.v1 import adapter_service_pb2 as pb
from loraport.registry.v1 import audit_service_pb2 as audit_pb
from loraport.registry.v1 import catalog_service_pb2 as catalog_pb
from loraport.registry.v1 import key_service_pb2 as key_pb
from services.registry.servicers.catalog import _parts
from services.registry.store import feed
from services.shared.catalog import RevisionItem, verified_record
from services.shared.catalog_client import CatalogClient
from tests.contract.registry_rig import (
    REGISTRY_KEY,
    TIMEOUT,
    Rig,
    info_of,
    manifest,
    reason_of,
    serving,
    write_config,
)

TRUSTED = {REGISTRY_KEY.key_id: REGISTRY_KEY.public_pem}
ALIAS = "tenants/acme/adapters/pirate/aliases/live"


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url)) as rig:
        await rig.base()
        await rig.tenant("acme")
        yield rig


async def follow(rig: Rig, identity: str = "router", *, artefacts_only: bool = False) -> CatalogClient:
    client = CatalogClient(rig.channel(identity), artefacts_only=artefacts_only)
    client.start()
    assert await client.wait_synced(TIMEOUT)
    return client


async def test_a_watcher_gets_everything_and_then_every_change(rig: Rig) -> None:
    one = await rig.active("acme", "pirate", 1, "one")
    await rig.alias(ALIAS, one.revision_id)
    client = await follow(rig)
    view = client.view
    assert set(view.tenants) == {"acme"}
    assert set(view.bases) == {"base"}
    assert view.aliases["acme", "pirate", "live"].revision_id == one.revision_id
    record = verified_record(view.revisions[one.revision_id], TRUSTED)
    assert (record.tenant, record.adapter, record.version) == ("acme", "pirate", 1)
    key = await rig.keys().CreateApiKey(key_pb.CreateApiKeyRequest(parent="tenants/acme"), timeout=TIMEOUT)
    two = await rig.active("acme", "pirate", 2, "two")
    assert await client.catch_up(TIMEOUT)
    key_id = key.api_key.name.rsplit("/", 1)[-1]
    assert view.revisions[two.revision_id].state == "ACTIVE"
    assert not view.keys[key_id].revoked
    await rig.revoke(one.name)
    await rig.keys().RevokeApiKey(key_pb.RevokeApiKeyRequest(name=key.api_key.name), timeout=TIMEOUT)
    await rig.alias(ALIAS, two.revision_id, now=True, reason="one was revoked")
    assert await client.catch_up(TIMEOUT)
    assert view.revisions[one.revision_id].state == "REVOKED"
    assert view.keys[key_id].revoked
    assert view.aliases["acme", "pirate", "live"].revision_id == two.revision_id
    await rig.adapters().DeleteAlias(pb.DeleteAliasRequest(name=ALIAS), timeout=TIMEOUT)
    assert await client.catch_up(TIMEOUT)
    assert view.aliases == {}
    await client.stop()


async def test_executors_hear_of_artefacts_only_but_of_every_epoch(rig: Rig) -> None:
    client = await follow(rig, "executor", artefacts_only=True)
    assert client.view.tenants == {}
    await rig.tenant("globex")
    assert await client.catch_up(TIMEOUT)
    assert (client.view.tenants, client.view.keys) == ({}, {})
    await client.stop()


@pytest.mark.parametrize("identity", ["loader", "executor"])
async def test_only_routers_hear_of_tenants_and_keys_whatever_is_asked(rig: Rig, identity: str) -> None:
    await rig.keys().CreateApiKey(key_pb.CreateApiKeyRequest(parent="tenants/acme"), timeout=TIMEOUT)
    active = await rig.active("acme", "pirate", 1, "one")
    client = await follow(rig, identity, artefacts_only=False)
    assert set(client.view.revisions) == {active.revision_id}
    assert (client.view.tenants, client.view.keys) == ({}, {})
    await rig.tenant("globex")
    await rig.keys().CreateApiKey(key_pb.CreateApiKeyRequest(parent="tenants/globex"), timeout=TIMEOUT)
    assert await client.catch_up(TIMEOUT)
    assert (client.view.tenants, client.view.keys) == ({}, {})
    await client.stop()


async def test_a_spoiled_upload_is_replaced_by_the_new_announcement(rig: Rig) -> None:
    client = await follow(rig)
    bad = manifest("acme", "pirate", 1)
    first = await rig.register("acme", bad)
    await rig.admit(bad, admitted=False)
    await rig.register("acme", manifest("acme", "pirate", 2))
    assert await client.catch_up(TIMEOUT)
    item = client.view.revisions[first.revision.revision_id]
    assert (item.version, item.state) == (2, "PENDING")
    await client.stop()
    fresh = await follow(rig)
    assert fresh.view.revisions == client.view.revisions
    await fresh.stop()


async def test_a_large_catalog_comes_in_bounded_messages(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "CHUNK", 3)
    for tenant in range(8):
        await rig.tenant(f"t{tenant}")
    seen, last = [], 0
    async for part in rig.catalog().Watch(catalog_pb.WatchRequest(), timeout=TIMEOUT):
        assert len(part.items) <= 3
        assert part.epoch >= last
        last = part.epoch
        seen += [item.tenant.tenant for item in part.items if item.HasField("tenant")]
        if part.synced:
            break
    assert sorted(seen) == ["acme", *(f"t{tenant}" for tenant in range(8))]


def test_items_that_are_large_come_in_messages_that_a_peer_takes() -> None:
    """An adapter that is shared with a thousand tenants says so with each of its revisions."""
    shared = frozenset(f"t{number:04}-{'x' * 57}" for number in range(1000))
    items = [
        RevisionItem(f"id{n}", "acme", "pirate", n, "ACTIVE", "base", "d", 1, 1, b"r" * 900, shared)
        for n in range(1, 161)
    ]
    parts = list(_parts(items, before=3, after=7, synced=False, checkpoint=b"c"))
    assert sum(part.ByteSize() for part in parts) > 8 << 20, "too much for one message"
    assert max(part.ByteSize() for part in parts) < 2 << 20
    assert [item.revision.version for part in parts for item in part.items] == list(range(1, 161))
    assert [(p.epoch, p.synced, p.checkpoint) for p in (parts[0], parts[-2])] == [(3, False, b"")] * 2
    assert (parts[-1].epoch, parts[-1].synced, parts[-1].checkpoint) == (7, True, b"c")
    assert [len(part.items) for part in _parts([], before=3, after=7, synced=True, checkpoint=b"")] == [0]


async def test_a_full_state_of_large_items_comes_in_bounded_messages(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.registry.servicers.catalog.PART_BYTES", 1)
    for tenant in range(4):
        await rig.tenant(f"t{tenant}")
    seen = 0
    async for part in rig.catalog().Watch(catalog_pb.WatchRequest(), timeout=TIMEOUT):
        assert len(part.items) <= 1
        seen += len(part.items)
        if part.synced:
            break
    assert seen >= 6


async def test_changes_of_one_moment_reach_their_epoch_with_the_last_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "CHUNK", 2)
    async with serving(write_config(tmp_path, poll_interval_s=3600.0)) as rig:
        stream = rig.catalog().Watch(catalog_pb.WatchRequest(), timeout=TIMEOUT)
        assert not (await stream.read()).synced  # the trust root
        assert not (await stream.read()).synced  # its leaf, a restriction
        assert (await stream.read()).synced
        # The watcher is told nothing while the changes are made, so they reach it together.
        rig.service._database.listen(lambda epoch: None)
        for tenant in ("t1", "t2", "t3", "t4", "t5"):
            await rig.tenant(tenant)
        # A tenant and a signer each.
        rig.service._hub.advance(11)
        got = [await stream.read() for _ in range(3)]
        assert [(part.epoch, len(part.items), part.synced) for part in got] == [
            (1, 2, True),
            (1, 2, True),
            (11, 1, True),
        ]
        stream.cancel()


async def test_a_watch_ends_when_the_registry_drains(tmp_path: Path) -> None:
    async with serving(write_config(tmp_path)) as rig:
        stream = rig.catalog().Watch(catalog_pb.WatchRequest(), timeout=TIMEOUT)
        await stream.read()
        ending = asyncio.create_task(rig.service.stop())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await stream.read()
        assert info_of(caught.value).reason == "DRAINING"
        await ending


async def test_two_registries_on_one_database_tell_each_others_changes(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with serving(config) as one, serving(config) as two:
        client = await follow(two)
        await one.tenant("acme")
        epoch = (await one.catalog().GetEpoch(catalog_pb.GetEpochRequest(), timeout=TIMEOUT)).epoch
        async with asyncio.timeout(TIMEOUT):
            while client.view.epoch < epoch:
                await asyncio.sleep(0.01)
        assert set(client.view.tenants) == {"acme"}
        await client.stop()


async def test_a_restart_keeps_everything_and_the_epoch(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with serving(config) as rig:
        await rig.base()
        await rig.tenant("acme")
        active = await rig.active("acme", "pirate", 1, "one")
        epoch = (await rig.catalog().GetEpoch(catalog_pb.GetEpochRequest(), timeout=TIMEOUT)).epoch
    async with serving(config) as rig:
        assert (await rig.catalog().GetEpoch(catalog_pb.GetEpochRequest(), timeout=TIMEOUT)).epoch == epoch
        assert await rig.approve(active.name) == active


async def test_aliases(rig: Rig) -> None:
    one, two = await rig.active("acme", "pirate", 1, "one"), await rig.active("acme", "pirate", 2, "two")
    made = await rig.alias(ALIAS, one.revision_id)
    assert (made.name, made.revision_id, made.version) == (ALIAS, one.revision_id, 1)
    assert await rig.alias(ALIAS, one.revision_id) == made
    assert await reason_of(rig.alias(ALIAS, two.revision_id)) == "ALIAS_LIVE"
    assert await reason_of(rig.alias(ALIAS, two.revision_id, now=True)) == "ALIAS_LIVE"
    assert await reason_of(rig.alias(ALIAS, two.revision_id, reason="because")) == "ALIAS_LIVE"
    assert await reason_of(rig.alias(ALIAS, two.revision_id, now=True, reason="x", etag="e0")) == "STALE_ETAG"
    assert await reason_of(rig.alias(ALIAS, two.revision_id, now=True, reason="x" * 513)) == "INVALID_REQUEST"
    moved = await rig.alias(ALIAS, two.revision_id, now=True, reason="hotfix", force=True, etag=made.etag)
    assert (moved.version, moved.etag == made.etag) == (2, False)
    delete = rig.adapters().DeleteAlias
    stale = pb.DeleteAliasRequest(name=ALIAS, etag=made.etag)
    assert await reason_of(delete(stale, timeout=TIMEOUT)) == "STALE_ETAG"
    gone = await delete(pb.DeleteAliasRequest(name=ALIAS, etag=moved.etag), timeout=TIMEOUT)
    assert await delete(pb.DeleteAliasRequest(name=ALIAS), timeout=TIMEOUT) == gone
    never = pb.DeleteAliasRequest(name=ALIAS + "x")
    assert await reason_of(delete(never, timeout=TIMEOUT)) == "ALIAS_NOT_FOUND"
    # A removed alias is made anew without ceremony, and an old etag does not fit it.
    assert await reason_of(rig.alias(ALIAS, one.revision_id, etag=moved.etag)) == "STALE_ETAG"
    assert (await rig.alias(ALIAS, one.revision_id)).version == 1


async def test_an_alias_points_to_an_active_revision_of_its_adapter(rig: Rig) -> None:
    one = await rig.active("acme", "pirate", 1, "one")
    other = await rig.active("acme", "other", 1, "other")
    pending = manifest("acme", "pirate", 2, content="two")
    waiting = (await rig.register("acme", pending)).revision
    assert await reason_of(rig.alias(ALIAS, other.revision_id)) == "REVISION_NOT_FOUND"
    assert await reason_of(rig.alias(ALIAS, "sha256:" + "9" * 64)) == "REVISION_NOT_FOUND"
    assert await reason_of(rig.alias(ALIAS, "v1")) == "REVISION_NOT_FOUND"
    assert await reason_of(rig.alias(ALIAS, waiting.revision_id)) == "REVISION_NOT_ACTIVE"
    await rig.revoke(one.name)
    assert await reason_of(rig.alias(ALIAS, one.revision_id)) == "REVISION_NOT_ACTIVE"
    nobody = "tenants/acme/adapters/nobody/aliases/live"
    assert await reason_of(rig.alias(nobody, one.revision_id)) == "ADAPTER_NOT_FOUND"
    assert await reason_of(rig.alias("tenants/acme/adapters/pirate/aliases/Live", one.revision_id)) == "INVALID_NAME"


async def test_lists_of_adapters_and_revisions(rig: Rig) -> None:
    await rig.tenant("globex")
    one = await rig.active("acme", "pirate", 1, "one")
    two = await rig.active("acme", "pirate", 7, "two")
    await rig.active("acme", "json", 1, "three")
    await rig.active("globex", "alpha", 1, "one")
    await rig.alias(ALIAS, two.revision_id)
    await rig.alias(ALIAS.replace("live", "beta"), one.revision_id)

    async def names(parent: str, size: int) -> list[str]:
        found, token = [], ""
        while True:
            request = pb.ListAdaptersRequest(parent=parent, page_size=size, page_token=token)
            part = await rig.adapters().ListAdapters(request, timeout=TIMEOUT)
            found += part.adapters
            token = part.next_page_token
            if not token:
                break
        for adapter in found:
            if adapter.name.endswith("pirate"):
                assert [(alias.name.rsplit("/", 1)[-1], alias.version) for alias in adapter.aliases] == [
                    ("beta", 1), ("live", 7),
                ]  # fmt: skip
        return [adapter.name for adapter in found]

    acme = ["tenants/acme/adapters/json", "tenants/acme/adapters/pirate"]
    assert await names("tenants/acme", 1) == acme
    assert await names("tenants/-", 2) == [*acme, "tenants/globex/adapters/alpha"]
    assert await reason_of(names("tenants/nobody", 5)) == "TENANT_NOT_FOUND"
    assert await reason_of(names("tenants/_", 5)) == "INVALID_NAME"
    request = pb.ListRevisionsRequest(parent="tenants/acme/adapters/pirate", page_size=1)
    first = await rig.adapters().ListRevisions(request, timeout=TIMEOUT)
    assert [revision.version for revision in first.revisions] == [7]
    assert first.revisions[0].manifest_envelope == first.revisions[0].record_envelope == b""
    request.page_token = first.next_page_token
    second = await rig.adapters().ListRevisions(request, timeout=TIMEOUT)
    assert ([revision.version for revision in second.revisions], second.next_page_token) == ([1], "")


async def test_every_change_is_audited_allowed_or_refused(rig: Rig) -> None:
    one = await rig.active("acme", "pirate", 1, "one")
    request_id = str(uuid.uuid4())
    await rig.alias(ALIAS, one.revision_id, request_id=request_id)
    await rig.alias(ALIAS, one.revision_id, request_id=request_id)
    assert await reason_of(rig.approve(one.revision_id, etag="e0")) == "STALE_ETAG"
    await rig.revoke(one.name, reason="leak\r\nforged line")
    assert await reason_of(rig.tenant("No\nName")) == "INVALID_NAME"

    async def events(tenant: str, size: int = 0) -> list[audit_pb.AuditEvent]:
        found, token = [], ""
        while True:
            request = audit_pb.ListAuditEventsRequest(tenant=tenant, page_size=size, page_token=token)
            part = await rig.audit().ListAuditEvents(request, timeout=TIMEOUT)
            found += part.events
            token = part.next_page_token
            if not token:
                return found

    of_acme = await events("tenants/acme")
    told = [(e.method.rsplit("/", 1)[-1], e.decision, e.reason, e.resource) for e in of_acme]
    assert told == [
        ("RevokeRevision", "allowed", "leak  forged line", one.name),
        ("ApproveRevision", "refused", "STALE_ETAG", one.name),
        ("SetAlias", "allowed", "", ALIAS),
        ("ApproveRevision", "allowed", "", one.name),
        ("AdmitRevision", "allowed", "VERIFIED", one.name),
        ("RegisterRevision", "allowed", "", one.name),
        ("CreateSigner", "allowed", "", "tenants/acme/signers/ci"),
        ("CreateTenant", "allowed", "", "tenants/acme"),
    ]
    assert of_acme[0].principal == "spiffe://loraport.local/admin/ops"
    assert of_acme[4].principal == "spiffe://loraport.local/service/loader"
    everything = await events("")
    assert everything == await events("", size=2)
    assert [event.sequence for event in everything] == sorted((e.sequence for e in everything), reverse=True)
    assert (everything[0].decision, everything[0].reason) == ("refused", "INVALID_NAME")
    assert "\n" not in everything[0].resource


async def test_a_watcher_hears_what_was_taken_back_while_a_checkpoint_takes_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.registry.servicers.catalog.RENEW_S", 0.01)
    async with serving(write_config(tmp_path)) as rig:
        await rig.base()
        await rig.tenant("acme")
        one = await rig.active("acme", "bot", 1, "one")
        checkpoints, go = rig.service._checkpoints, threading.Event()
        make = checkpoints._make
        monkeypatch.setattr(checkpoints, "_make", lambda: (go.wait(), make())[1])
        try:
            await rig.revoke(one.name)
            stream = rig.catalog().Watch(catalog_pb.WatchRequest(), timeout=TIMEOUT)
            states = []
            while not (part := await stream.read()).synced:
                states += [item.revision.state for item in part.items if item.HasField("revision")]
            assert pb.Revision.STATE_REVOKED in states
        finally:
            go.set()
        early = part.checkpoint
        while part.checkpoint in (b"", early):
            part = await stream.read()
        stream.cancel()
