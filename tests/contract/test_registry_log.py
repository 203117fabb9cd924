"""The transparency log of a serving registry: what becomes a leaf, proofs, checkpoints, triggers, speed of appending."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from loraport.bundle.digest import sha256_digest
from loraport.log import merkle
from loraport.log.checkpoint import Checkpoint, open_checkpoint
from loraport.log.leaf import Leaf, parse_leaf
from loraport.registry.v1 import adapter_service_pb2 as adapter_pb
from loraport.registry.v1 import catalog_service_pb2 as catalog_pb
from loraport.registry.v1 import key_service_pb2 as key_pb
from loraport.registry.v1 import log_service_pb2 as pb
from services.registry.store import log
from services.shared.clock import SystemClock
from tests.contract.registry_rig import (
    REGISTRY_KEY,
    TIMEOUT,
    Rig,
    manifest,
    reason_of,
    serving,
    write_config,
)

KEYS = {REGISTRY_KEY.key_id: REGISTRY_KEY.public_pem}


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url)) as rig:
        await rig.tenant("acme")
        await rig.base()
        yield rig


async def leaves(rig: Rig, **options: Any) -> list[Leaf]:
    found, token = [], ""
    while True:
        request = pb.ListLeavesRequest(page_size=3, page_token=token, **options)
        page = await rig.log().ListLeaves(request, timeout=TIMEOUT)
        assert len(page.leaves) <= 3
        for item in page.leaves:
            leaf = parse_leaf(item.body)
            assert leaf.index == item.index
            found.append(leaf)
        token = page.next_page_token
        if not token:
            return found


async def checkpoint(rig: Rig) -> Checkpoint:
    answer = await rig.log().GetCheckpoint(pb.GetCheckpointRequest(), timeout=TIMEOUT)
    opened = open_checkpoint(answer.envelope, KEYS, now=time.time())
    assert (answer.tree_size, answer.root_hash.hex()) == (opened.tree_size, opened.root_hash)
    assert (answer.catalog_epoch, answer.revocation_epoch) == (opened.catalog_epoch, opened.revocation_epoch)
    assert answer.expire_time.seconds == opened.expires
    return opened


async def test_every_change_is_a_leaf_and_nothing_else_is(rig: Rig) -> None:
    payload = manifest("acme", "pirate", 1)
    registered = await rig.register("acme", payload)
    await rig.register("acme", payload)  # a renewed session changes nothing
    await rig.admit(payload)
    active = await rig.approve(registered.revision.name)
    await rig.approve(registered.revision.name)
    alias = "tenants/acme/adapters/pirate/aliases/prod"
    await rig.alias(alias, active.revision_id)
    await rig.alias(alias, active.revision_id)
    await rig.adapters().DeleteAlias(adapter_pb.DeleteAliasRequest(name=alias), timeout=TIMEOUT)
    await rig.revoke(active.name)
    bad = manifest("acme", "pirate", 2, content="bad")
    await rig.register("acme", bad)
    await rig.admit(bad, admitted=False)
    await rig.register("acme", manifest("acme", "pirate", 3, content="bad"))
    key = await rig.keys().CreateApiKey(key_pb.CreateApiKeyRequest(parent="tenants/acme"), timeout=TIMEOUT)
    await rig.keys().RevokeApiKey(key_pb.RevokeApiKeyRequest(name=key.api_key.name), timeout=TIMEOUT)
    signer = key_pb.RevokeSignerRequest(name="tenants/acme/signers/ci")
    await rig.keys().RevokeSigner(signer, timeout=TIMEOUT)
    assert await reason_of(rig.register("acme", manifest("acme", "pirate", 4))) == "UNTRUSTED_SIGNER"

    found = await leaves(rig)
    first, name = "tenants/acme/adapters/pirate/revisions/v1", "tenants/acme/adapters/pirate/revisions"
    assert [(leaf.kind, leaf.resource) for leaf in found] == [
        ("TRUST_ROOT", "trustRoots/1"),
        ("SIGNER_CREATED", "tenants/acme/signers/ci"),
        ("DELEGATED", "tenants/acme/delegations/1"),
        ("BASE_MODEL", "baseModels/base"),
        ("ANNOUNCED", first),
        ("VERIFIED", first),
        ("RECORD", first),
        ("ALIAS_SET", alias),
        ("ALIAS_DELETED", alias),
        ("REVOKED", first),
        ("ANNOUNCED", f"{name}/v2"),
        ("QUARANTINED", f"{name}/v2"),
        ("QUARANTINED", f"{name}/v2"),
        ("ANNOUNCED", f"{name}/v3"),
        ("API_KEY_CREATED", key.api_key.name),
        ("API_KEY_REVOKED", key.api_key.name),
        ("SIGNER_REVOKED", "tenants/acme/signers/ci"),
        ("DELEGATED", "tenants/acme/delegations/2"),
    ]
    assert [leaf.index for leaf in found] == list(range(18))
    assert found[6].digest == sha256_digest(active.record_envelope)
    assert {found[7].digest, found[8].digest, found[9].digest} == {active.revision_id}
    for before, after in pairwise(found):
        assert after.previous == merkle.leaf_hash(before.body()).hex()
    assert [leaf.index for leaf in await leaves(rig, start_index=16)] == [16, 17]
    said = await checkpoint(rig)
    assert said.root_hash == merkle.root(merkle.leaf_hash(leaf.body()) for leaf in found).hex()
    assert (said.tree_size, said.revocation_epoch) == (18, 17)


async def test_a_change_that_is_refused_leaves_no_leaf(rig: Rig) -> None:
    before = len(await leaves(rig))
    assert await reason_of(rig.register("acme", manifest("acme", "pirate", 1, size=1 << 40))) == "INVALID_MANIFEST"
    await rig.register("acme", manifest("acme", "pirate", 1), validate_only=True)
    assert len(await leaves(rig)) == before


async def test_proofs_of_a_serving_registry_verify(rig: Rig) -> None:
    roots = {(await checkpoint(rig)).tree_size: bytes.fromhex((await checkpoint(rig)).root_hash)}
    for version in range(1, 6):
        await rig.active("acme", "pirate", version, f"c{version}")
        said = await checkpoint(rig)
        roots[said.tree_size] = bytes.fromhex(said.root_hash)
    size, found = max(roots), await leaves(rig)
    for leaf in found:
        proof = await rig.log().GetInclusionProof(pb.GetInclusionProofRequest(leaf_index=leaf.index), timeout=TIMEOUT)
        assert (proof.leaf_index, proof.tree_size) == (leaf.index, size)
        hashed = merkle.leaf_hash(leaf.body())
        assert (proof.leaf_hash, proof.body) == (hashed, leaf.body())
        assert merkle.verify_inclusion(hashed, leaf.index, size, list(proof.hashes), roots[size])
    for old, old_root in roots.items():
        for new, new_root in roots.items():
            if old <= new:
                request = pb.GetConsistencyProofRequest(old_tree_size=old, new_tree_size=new)
                proof = await rig.log().GetConsistencyProof(request, timeout=TIMEOUT)
                assert merkle.verify_consistency(old, new, list(proof.hashes), old_root, new_root)


async def test_questions_beyond_the_log_are_refused(rig: Rig) -> None:
    stub = rig.log()
    for call in (
        stub.GetInclusionProof(pb.GetInclusionProofRequest(leaf_index=4), timeout=TIMEOUT),
        stub.GetInclusionProof(pb.GetInclusionProofRequest(leaf_index=-1), timeout=TIMEOUT),
        stub.GetInclusionProof(pb.GetInclusionProofRequest(leaf_index=0, tree_size=5), timeout=TIMEOUT),
        stub.GetInclusionProof(pb.GetInclusionProofRequest(leaf_index=0, tree_size=-1), timeout=TIMEOUT),
        stub.GetConsistencyProof(pb.GetConsistencyProofRequest(old_tree_size=0), timeout=TIMEOUT),
        stub.GetConsistencyProof(pb.GetConsistencyProofRequest(old_tree_size=2, new_tree_size=1), timeout=TIMEOUT),
        stub.ListLeaves(pb.ListLeavesRequest(start_index=-1), timeout=TIMEOUT),
        stub.ListLeaves(pb.ListLeavesRequest(page_size=-1), timeout=TIMEOUT),
    ):
        assert await reason_of(call) == "INVALID_REQUEST"
    request = pb.ListLeavesRequest(page_token="made up")
    assert await reason_of(stub.ListLeaves(request, timeout=TIMEOUT)) == "INVALID_PAGE_TOKEN"


async def test_watchers_get_a_checkpoint_at_once_and_after_a_revocation(rig: Rig) -> None:
    active = await rig.active("acme", "pirate", 1, "c")
    stream = rig.catalog("executor").Watch(catalog_pb.WatchRequest(artefacts_only=True), timeout=TIMEOUT)
    part = await stream.read()
    while not part.synced:
        assert not part.checkpoint
        part = await stream.read()
    first = open_checkpoint(part.checkpoint, KEYS, now=time.time())
    assert (first.catalog_epoch, first.revocation_epoch) == (part.epoch, 1)
    await rig.revoke(active.name)
    while not (part := await stream.read()).checkpoint:
        pass
    second = open_checkpoint(part.checkpoint, KEYS, now=time.time())
    assert second.revocation_epoch == second.tree_size == first.tree_size + 1
    assert second.catalog_epoch == part.epoch > first.catalog_epoch
    stream.cancel()


async def test_checkpoints_come_by_themselves(tmp_path: Path) -> None:
    async with serving(write_config(tmp_path, checkpoint_interval_s=0.2)) as rig:
        stream = rig.catalog().Watch(catalog_pb.WatchRequest(), timeout=TIMEOUT)
        got = []
        while len(got) < 3:
            part = await stream.read()
            if part.checkpoint:
                got.append(open_checkpoint(part.checkpoint, KEYS, now=time.time()))
        (leaf,) = await leaves(rig)  # the trust root
        assert {(item.tree_size, item.root_hash) for item in got} == {
            (1, merkle.root([merkle.leaf_hash(leaf.body())]).hex())
        }
        assert all(item.expires - item.issued == 600 for item in got)
        stream.cancel()


class SetClock(SystemClock):
    """A clock that somebody sets."""

    off_s = 0.0

    def now(self) -> float:
        return super().now() + self.off_s


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
async def test_a_clock_that_is_set_and_set_right_leaves_no_peer_with_a_checkpoint_of_another_time(
    tmp_path: Path, off_s: float
) -> None:
    async with serving(write_config(tmp_path)) as rig:
        clock = rig.service._checkpoints._clock = SetClock()
        stream = rig.catalog().Watch(catalog_pb.WatchRequest(), timeout=TIMEOUT)

        async def next_age_s() -> float:
            while not (part := await stream.read()).checkpoint:
                pass
            return time.time() - open_checkpoint(part.checkpoint, KEYS, now=clock.now()).issued

        assert abs(await next_age_s()) < 60
        for clock.off_s in (off_s, 0.0):
            assert abs(await next_age_s() + clock.off_s) < 60
        stream.cancel()


@pytest.mark.parametrize("statement", ["UPDATE {} SET {} = {}", "DELETE FROM {}"])
@pytest.mark.parametrize(("table", "column"), [("log_leaves", "body"), ("log_nodes", "hash")])
async def test_the_database_itself_refuses_to_change_the_log(rig: Rig, statement: str, table: str, column: str) -> None:
    with pytest.raises(DBAPIError, match="append-only"), rig.service._database.exclusive() as connection:
        connection.execute(text(statement.format(table, column, column)))


async def test_a_registry_signs_no_second_history(rig: Rig) -> None:
    await rig.active("acme", "pirate", 1, "c")
    await checkpoint(rig)
    with rig.service._database.exclusive() as connection:
        sqlite = connection.dialect.name == "sqlite"
        connection.execute(
            text(f"DROP TRIGGER {'log_nodes_no_update' if sqlite else 'log_nodes_append_only ON log_nodes'}")
        )
        change = text("UPDATE log_nodes SET hash = :zeros WHERE level = 0 AND node_index = 6")
        connection.execute(change, {"zeros": bytes(32)})
    rig.service._hub.advance(rig.service._hub.epoch + 1)
    assert await reason_of(rig.log().GetCheckpoint(pb.GetCheckpointRequest(), timeout=TIMEOUT)) == "LOG_DAMAGED"


async def test_concurrent_writers_leave_one_log_without_a_gap(rig: Rig) -> None:
    async def publish(adapter: str) -> None:
        for version in range(1, 4):
            await rig.active("acme", adapter, version, f"{adapter} {version}")

    await asyncio.gather(*(publish(f"a{i}") for i in range(6)))
    found, said = await leaves(rig), await checkpoint(rig)
    assert [leaf.index for leaf in found] == list(range(4 + 6 * 3 * 3))
    assert merkle.root(merkle.leaf_hash(leaf.body()) for leaf in found).hex() == said.root_hash


async def test_appending_and_proving_read_few_rows_however_long_the_log(rig: Rig) -> None:
    database = rig.service._database
    with database.write() as transaction:
        for index in range(4, 700):
            made = log.append(transaction, log.Kind.RECORD, resource="r", digest=sha256_digest(b""), now_us=index)
            assert made == index
    counted: list[int] = []
    original = log._read

    def counting(connection: Any, nodes: Any) -> Any:
        found = original(connection, nodes)
        counted.append(len(found))
        return found

    with database.read() as connection, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "_read", counting)
        for index in (0, 1, 255, 256, 511, 512, 699):
            log.inclusion_proof(connection, index, 700)
            log.consistency_proof(connection, index + 1, 700)
    # log2(700) < 10; a right edge of the tree costs a few more.
    assert max(counted) <= 20
