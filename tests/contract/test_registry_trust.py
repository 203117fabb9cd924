"""TrustService and what revocations since a place in the log stop, on both databases."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from structlog.testing import capture_logs

from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, EnvelopeError, SigningKey, sign_envelope
from loraport.registry.v1 import adapter_service_pb2 as adapter_pb
from loraport.registry.v1 import catalog_service_pb2 as catalog_pb
from loraport.registry.v1 import key_service_pb2 as key_pb
from loraport.registry.v1 import log_service_pb2 as log_pb
from loraport.registry.v1 import trust_service_pb2 as pb
from loraport.registry.v1.trust_service_pb2_grpc import TrustServiceStub
from loraport.trust.delegation import open_delegation
from loraport.trust.edit import leaked_earlier, next_root
from loraport.trust.root import Role, TrustRoot, open_first
from services.registry.publishing import find_revision
from tests.contract.registry_rig import REGISTRY_KEY, TIMEOUT, Rig, manifest, reason_of, serving, write_config
from tests.support.roots import sealed


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url)) as rig:
        await rig.tenant("acme")
        await rig.tenant("globex")
        await rig.base()
        yield rig


State = adapter_pb.Revision.State


def trust(rig: Rig, role: str = "admin") -> TrustServiceStub:
    return TrustServiceStub(rig.channel(role))


async def chain(rig: Rig) -> list[pb.TrustRoot]:
    answer = await trust(rig).ListTrustRoots(pb.ListTrustRootsRequest(page_size=1), timeout=TIMEOUT)
    found = list(answer.trust_roots)
    while answer.next_page_token:
        request = pb.ListTrustRootsRequest(page_size=1, page_token=answer.next_page_token)
        answer = await trust(rig).ListTrustRoots(request, timeout=TIMEOUT)
        found += answer.trust_roots
    return found


async def newest(rig: Rig) -> TrustRoot:
    return open_first((await chain(rig))[-1].envelope)


async def submit(rig: Rig, root: TrustRoot, *signers: SigningKey) -> pb.TrustRoot:
    return await trust(rig).SubmitTrustRoot(pb.SubmitTrustRootRequest(envelope=sealed(root, *signers)), timeout=TIMEOUT)


async def size(rig: Rig) -> int:
    return (await rig.log().GetCheckpoint(log_pb.GetCheckpointRequest(), timeout=TIMEOUT)).tree_size


async def state(rig: Rig, name: str) -> tuple[str, list[str]]:
    found = await rig.adapters().GetRevision(adapter_pb.GetRevisionRequest(name=name), timeout=TIMEOUT)
    return State.Name(found.state).removeprefix("STATE_"), [reason.code for reason in found.reasons]


async def test_a_root_is_taken_logged_and_told(rig: Rig) -> None:
    first = await newest(rig)
    second = next_root(first, now=first.issued + 1)
    taken = await submit(rig, second)
    assert (taken.name, taken.version) == ("trustRoots/2", 2)
    leaves = await rig.log().ListLeaves(log_pb.ListLeavesRequest(start_index=taken.log_index), timeout=TIMEOUT)
    assert b'"kind":"TRUST_ROOT"' in leaves.leaves[0].body
    before = await size(rig)
    assert await submit(rig, second) == taken, "again is nothing new"
    assert await size(rig) == before
    assert [item.version for item in await chain(rig)] == [1, 2]
    for role in ("router", "loader", "executor"):
        stream = rig.catalog(role).Watch(catalog_pb.WatchRequest(artefacts_only=role != "router"), timeout=TIMEOUT)
        part = await stream.read()
        assert [item.trust_root.version for item in part.items] == [1, 2]
        stream.cancel()


async def test_what_does_not_follow_is_refused_and_an_alarm(rig: Rig) -> None:
    first = await newest(rig)
    second = next_root(first, now=first.issued + 1)
    for root, signers in ((second, (SigningKey.generate(),)), (next_root(second, now=first.issued + 1), ())):
        with capture_logs() as logs:
            assert await reason_of(submit(rig, root, *signers)) == "INVALID_TRUST_ROOT"
        assert [line["event"] for line in logs if line["log_level"] == "critical"] == ["ALARM: trust root refused"]
    assert len(await chain(rig)) == 1


async def test_only_an_admin_submits(rig: Rig) -> None:
    for role in ("router", "loader", "executor"):
        call = trust(rig, role).SubmitTrustRoot(pb.SubmitTrustRootRequest(envelope=b"x"), timeout=TIMEOUT)
        assert await reason_of(call) == "NOT_ALLOWED"
        assert (await trust(rig, role).ListTrustRoots(pb.ListTrustRootsRequest(), timeout=TIMEOUT)).trust_roots


@pytest.mark.parametrize("table", ["trust_roots", "delegations"])
async def test_the_database_itself_keeps_what_was_said(rig: Rig, table: str) -> None:
    for statement in (f"UPDATE {table} SET version = 9", f"DELETE FROM {table}"):
        with pytest.raises(DBAPIError, match="append-only"), rig.service._database.exclusive() as connection:
            connection.execute(text(statement))


async def test_records_that_a_leaked_key_signed_since_are_withdrawn_and_signed_anew(rig: Rig) -> None:
    old = await rig.active("acme", "pirate", 1, "one")
    place = await size(rig)
    late = await rig.active("acme", "pirate", 2, "two")
    root, key = await newest(rig), SigningKey.generate()
    key.save(f"{rig.service._config.signing_key_file.removesuffix('.key')}.next.key")
    keys = {"role": Role.REGISTRY, "public_keys": [key.public_pem], "since": place, "compromised": True}
    taken = await submit(rig, next_root(root, now=root.issued + 1, **keys))
    assert taken.stopped_revision_count == 1
    assert await state(rig, old.name) == ("ACTIVE", [])
    assert await state(rig, late.name) == ("VERIFIED", ["RECORD_WITHDRAWN"])
    again = await rig.approve(late.name)
    assert key.key_id.encode() in again.record_envelope
    assert REGISTRY_KEY.key_id.encode() in old.record_envelope


async def test_records_of_a_key_that_was_replaced_in_peace_stop_when_it_had_leaked(rig: Rig) -> None:
    first, second = [await rig.active("acme", "pirate", n, f"content {n}") for n in (1, 2)]
    old = await newest(rig)
    replaced = next_root(
        old, now=old.issued, role=Role.REGISTRY, public_keys=[SigningKey.generate().public_pem], since=await size(rig)
    )
    assert (await submit(rig, replaced)).stopped_revision_count == 0
    place = (await rig.service._desk.read(lambda view: find_revision(view, second.name))).record_leaf
    worse = leaked_earlier(replaced, REGISTRY_KEY.key_id, since=place, now=old.issued)
    assert (await submit(rig, worse)).stopped_revision_count == 1
    assert (await state(rig, first.name))[0] == "ACTIVE"
    assert await state(rig, second.name) == ("VERIFIED", ["RECORD_WITHDRAWN"])


async def test_a_delegation_behind_a_rotation_is_signed_by_the_new_key(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the rotation's commit and the process hearing of it."""
    monkeypatch.setattr(rig.service._roots, "follow", lambda: None)
    old, new = await newest(rig), SigningKey.generate()
    new.save(tmp_path / "signing.new.key")
    rotation = next_root(
        old, now=old.issued, role=Role.REGISTRY, public_keys=[new.public_pem], since=await size(rig), compromised=True
    )
    await submit(rig, rotation)
    request = key_pb.RevokeSignerRequest(name="tenants/acme/signers/ci")
    await rig.keys().RevokeSigner(request, timeout=TIMEOUT)
    said = await rig.keys().GetDelegation(key_pb.GetDelegationRequest(parent="tenants/acme"), timeout=TIMEOUT)
    assert not open_delegation(said.envelope, {new.key_id: new.public_pem}).publishers[0].valid


async def test_a_verification_behind_the_rotation_that_ends_its_key_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the rotation's commit and the process hearing of it."""
    monkeypatch.setattr(rig.service._roots, "follow", lambda: None)
    payload = manifest("acme", "pirate", 1, content="one")
    await rig.register("acme", payload)
    old = await newest(rig)
    keys = {"role": Role.LOADER, "public_keys": [SigningKey.generate().public_pem], "since": await size(rig)}
    await submit(rig, next_root(old, now=old.issued, compromised=True, **keys))
    assert await reason_of(rig.admit(payload)) == "UNTRUSTED_VERIFIER"


class Silent:
    """A signer that fails, as a program that hangs or a key file that is not there yet."""

    asked = 0

    @property
    def key_id(self) -> str:
        self.asked += 1
        raise EnvelopeError("SIGNER", "it took longer than 10 s")


async def test_a_signer_that_fails_for_a_while_is_asked_again(rig: Rig) -> None:
    checkpoints, silent = rig.service._checkpoints, Silent()
    revision = await rig.active("acme", "pirate", 1, "one")
    good, checkpoints._key = checkpoints._key, silent  # type: ignore[assignment]
    assert await reason_of(rig.log().GetCheckpoint(log_pb.GetCheckpointRequest(), timeout=TIMEOUT)) == (
        "REGISTRY_UNAVAILABLE"
    )
    stream = rig.catalog().Watch(catalog_pb.WatchRequest(), timeout=TIMEOUT)
    while not (await stream.read()).synced:
        pass
    before = silent.asked
    await rig.revoke(revision.name)
    while not any(item.revision.state == State.STATE_REVOKED for item in (await stream.read()).items):
        pass
    while silent.asked == before:  # now it was for the checkpoint that a revocation gets
        await asyncio.sleep(0.01)
    checkpoints._key = good
    while not (await stream.read()).checkpoint:
        pass
    stream.cancel()


async def test_a_verdict_of_a_leaked_key_is_no_verdict(rig: Rig) -> None:
    old = await rig.active("acme", "pirate", 1, "one")
    place = await size(rig)
    late = await rig.active("acme", "pirate", 2, "two")
    root, key = await newest(rig), SigningKey.generate()
    replaced = next_root(root, now=root.issued + 1, role=Role.LOADER, public_keys=[key.public_pem], since=place)
    # One that was merely replaced is believed for what it had verified.
    assert (await submit(rig, replaced)).stopped_revision_count == 0
    assert await state(rig, late.name) == ("ACTIVE", [])
    worse = next_root(replaced, now=root.issued + 2)
    leaked = replace(worse, ended=tuple(replace(item, until=0) for item in worse.ended))
    assert (await submit(rig, leaked)).stopped_revision_count == 1
    assert await state(rig, old.name) == ("ACTIVE", [])
    assert await state(rig, late.name) == ("QUARANTINED", ["VERIFIER_REVOKED"])


async def test_a_publishers_revisions_stop_from_a_place_on(rig: Rig) -> None:
    old = await rig.active("acme", "pirate", 1, "one")
    place = await size(rig)
    late = await rig.active("acme", "pirate", 2, "two")
    pending = (await rig.register("acme", manifest("acme", "pirate", 3, content="three"))).revision
    foreign = await rig.active("globex", "pirate", 1, "one")
    name = "tenants/acme/signers/ci"
    await rig.keys().RevokeSigner(key_pb.RevokeSignerRequest(name=name), timeout=TIMEOUT)
    assert (await state(rig, late.name))[0] == "ACTIVE"
    for since in (place, place + 5, None):  # a later place than was said before changes nothing
        request = key_pb.RevokeSignerRequest(name=name, since_log_index=since)
        assert (await rig.keys().RevokeSigner(request, timeout=TIMEOUT)).since_log_index == place
    assert await state(rig, old.name) == ("ACTIVE", [])
    for revision in (late, pending):
        assert await state(rig, revision.name) == ("QUARANTINED", ["SIGNER_REVOKED"])
    assert (await state(rig, foreign.name))[0] == "ACTIVE"
    # It may turn out to have leaked earlier.
    await rig.keys().RevokeSigner(key_pb.RevokeSignerRequest(name=name, since_log_index=0), timeout=TIMEOUT)
    assert (await state(rig, old.name))[0] == "QUARANTINED"
    negative = key_pb.RevokeSignerRequest(name=name, since_log_index=-1)
    assert await reason_of(rig.keys().RevokeSigner(negative, timeout=TIMEOUT)) == "INVALID_REQUEST"


async def test_versions_that_a_stolen_key_used_up_are_given_back(rig: Rig) -> None:
    await rig.active("acme", "pirate", 1, "one")
    place, thief = await size(rig), rig.signers["acme"]
    far = 2**32
    stolen = {}
    for version, content in ((2, "w"), (far, "x"), (far + 1, "x"), (far + 2, "y"), (far + 3, "z")):  # one is superseded
        stolen[version] = (await rig.register("acme", manifest("acme", "pirate", version, content=content))).revision
    await rig.revoke(stolen[far + 3].name)
    await rig.admit(manifest("acme", "pirate", far + 2, content="y"), admitted=False)
    second = SigningKey.generate()
    signer = key_pb.Signer(public_key_pem=second.public_pem.decode())
    made = key_pb.CreateSignerRequest(parent="tenants/acme", signer_id="second", signer=signer)
    await rig.keys().CreateSigner(made, timeout=TIMEOUT)
    rig.signers["acme"] = second
    wanted = manifest("acme", "pirate", 3, content="two")
    assert await reason_of(rig.register("acme", wanted)) == "VERSION_NOT_RISING"
    request = key_pb.RevokeSignerRequest(name="tenants/acme/signers/ci", since_log_index=place)
    await rig.keys().RevokeSigner(request, timeout=TIMEOUT)
    shown = await rig.adapters().GetAdapter(
        adapter_pb.GetAdapterRequest(name="tenants/acme/adapters/pirate"), timeout=TIMEOUT
    )
    assert shown.latest_version == 2, "the number after it is free"
    assert (await rig.register("acme", wanted)).revision.version == 3
    # Their names stay taken: the log has said something of each.
    for version in stolen:
        again = manifest("acme", "pirate", version, content=f"new {version}")
        assert await reason_of(rig.register("acme", again)) == "VERSION_NOT_RISING"
    rig.signers["acme"] = thief
    assert await reason_of(rig.register("acme", manifest("acme", "pirate", 4, content="4"))) == "UNTRUSTED_SIGNER"


async def test_a_threshold_counts_valid_signers(rig: Rig) -> None:
    second = SigningKey.generate()
    before = await rig.active("acme", "pirate", 1, "one")

    async def set_threshold(number: int) -> key_pb.Delegation:
        request = key_pb.SetSignerThresholdRequest(parent="tenants/acme", threshold=number)
        return await rig.keys().SetSignerThreshold(request, timeout=TIMEOUT)

    for number in (2, 0, -1, 17):
        assert await reason_of(set_threshold(number)) == "INVALID_REQUEST"
    signer = key_pb.Signer(public_key_pem=second.public_pem.decode())
    made = key_pb.CreateSignerRequest(parent="tenants/acme", signer_id="second", signer=signer)
    await rig.keys().CreateSigner(made, timeout=TIMEOUT)
    said = await set_threshold(2)
    assert await set_threshold(2) == said
    statement = open_delegation(said.envelope, {REGISTRY_KEY.key_id: REGISTRY_KEY.public_pem})
    assert (statement.tenant, statement.threshold, statement.version) == ("acme", 2, said.version)
    assert [item.signer for item in statement.publishers] == ["ci", "second"]

    async def register(payload: bytes, *keys: SigningKey) -> adapter_pb.RegisterRevisionResponse:
        envelope = sign_envelope(IN_TOTO_PAYLOAD_TYPE, payload, keys)
        request = adapter_pb.RegisterRevisionRequest(parent="tenants/acme", manifest_envelope=envelope)
        return await rig.adapters().RegisterRevision(request, timeout=TIMEOUT)

    payload, first = manifest("acme", "pirate", 2, content="two"), rig.signers["acme"]
    for keys in ((first,), (second,), (first, SigningKey.generate())):
        assert await reason_of(register(payload, *keys)) == "UNTRUSTED_SIGNER"
    late = (await register(payload, first, second)).revision
    # One of the two leaks: what both signed stops, what one signed when one was enough stays.
    request = key_pb.RevokeSignerRequest(name="tenants/acme/signers/second", since_log_index=1)
    await rig.keys().RevokeSigner(request, timeout=TIMEOUT)
    assert (await state(rig, late.name))[0] == "QUARANTINED"
    assert (await state(rig, before.name))[0] == "ACTIVE"


async def test_a_registry_finds_its_chain_again(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with serving(config) as rig:
        first = await newest(rig)
        await submit(rig, next_root(first, now=first.issued + 1))
    async with serving(config) as rig:
        assert [item.version for item in await chain(rig)] == [1, 2]
        assert rig.service._trust.version == 2
        with pytest.raises(grpc.aio.AioRpcError):
            await submit(rig, next_root(first, now=first.issued + 2))
