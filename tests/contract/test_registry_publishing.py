"""From a manifest to a revision that serves, over a real connection: the rules of AdapterService."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from loraport.bundle.digest import is_digest
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, SigningKey, sign_envelope
from loraport.bundle.manifest import parse_manifest
from loraport.registry.v1 import adapter_service_pb2 as pb
from loraport.registry.v1 import key_service_pb2 as key_pb
from services.shared.statements import Record, UploadSession, open_session, open_statement
from tests.contract.registry_rig import (
    REGISTRY_KEY,
    TIMEOUT,
    Rig,
    base_spec,
    info_of,
    manifest,
    module,
    reason_of,
    serving,
    status_of,
    verification,
    write_config,
)

TRUSTED = {REGISTRY_KEY.key_id: REGISTRY_KEY.public_pem}
State = pb.Revision.State


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url)) as rig:
        await rig.base()
        await rig.tenant("acme")
        yield rig


async def get(rig: Rig, name: str) -> pb.Revision:
    return await rig.adapters().GetRevision(pb.GetRevisionRequest(name=name), timeout=TIMEOUT)


async def test_a_revision_becomes_active(rig: Rig) -> None:
    payload = manifest("acme", "pirate", 3)
    registered = await rig.register("acme", payload)
    revision = registered.revision
    assert revision.name == "tenants/acme/adapters/pirate/revisions/v3"
    assert revision.revision_id == parse_manifest(payload).revision_id
    assert (revision.state, revision.version, revision.max_rank, revision.module_count) == (
        State.STATE_PENDING,
        3,
        8,
        2,
    )
    session = open_session(registered.upload_session, TRUSTED, now=registered.session_expire_time.seconds - 1)
    assert session == UploadSession(
        upload_id=session.upload_id,
        tenant="acme",
        revision_id=revision.revision_id,
        base_model="base",
        weights_digest=revision.weights_digest,
        weights_size=4096,
        config_digest=parse_manifest(payload).config_digest,
        expires=registered.session_expire_time.seconds,
    )
    verified = await rig.admit(payload)
    assert verified.state == State.STATE_VERIFIED
    assert [warning.code for warning in verified.warnings] == ["NO_EFFECT"]
    assert verified.record_envelope == b""
    active = await rig.approve(revision.revision_id)
    assert active.state == State.STATE_ACTIVE
    assert active.etag != verified.etag
    record = open_statement(Record, active.record_envelope, TRUSTED)
    assert (record.revision_id, record.tenant, record.adapter, record.version) == (
        revision.revision_id, "acme", "pirate", 3,
    )  # fmt: skip
    assert record.state == "ACTIVE"
    assert record.weights_digest == revision.weights_digest
    shown = await get(rig, revision.name)
    assert shown.manifest_envelope == rig.sign("acme", payload)
    assert shown.record_envelope == active.record_envelope
    # Said again, everything stays as it is.
    assert (await rig.admit(payload)).state == State.STATE_ACTIVE
    assert await rig.approve(revision.name) == active


async def test_a_manifest_must_be_signed_by_an_active_signer_of_the_tenant(rig: Rig) -> None:
    await rig.tenant("globex")
    payload = manifest("acme", "pirate", 1)

    def register(envelope: bytes, parent: str = "tenants/acme") -> grpc.aio.UnaryUnaryCall:
        request = pb.RegisterRevisionRequest(parent=parent, manifest_envelope=envelope)
        return rig.adapters().RegisterRevision(request, timeout=TIMEOUT)

    assert await reason_of(register(rig.sign("globex", payload))) == "UNTRUSTED_SIGNER"
    stranger = sign_envelope(IN_TOTO_PAYLOAD_TYPE, payload, SigningKey.generate())
    assert await reason_of(register(stranger)) == "UNTRUSTED_SIGNER"
    assert await reason_of(register(rig.sign("globex", payload), "tenants/globex")) == "INVALID_MANIFEST"
    assert await reason_of(register(rig.sign("acme", payload), "tenants/nobody")) == "TENANT_NOT_FOUND"
    other_type = sign_envelope("text/plain", payload, rig.signers["acme"])
    assert await reason_of(register(other_type)) == "INVALID_MANIFEST"
    assert await reason_of(register(rig.sign("acme", payload + b" "))) == "INVALID_MANIFEST"
    assert await reason_of(register(b"junk")) == "INVALID_MANIFEST"
    assert await reason_of(register(b"{" * (300 << 10))) == "INVALID_MANIFEST"
    await rig.keys().RevokeSigner(key_pb.RevokeSignerRequest(name="tenants/acme/signers/ci"), timeout=TIMEOUT)
    assert await reason_of(register(rig.sign("acme", payload))) == "UNTRUSTED_SIGNER"


async def test_every_fault_of_the_module_table_is_listed(rig: Rig) -> None:
    modules = (
        module("model.layers.0.self_attn.q_proj", width=32),
        module("model.layers.7.self_attn.q_proj"),
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.register("acme", manifest("acme", "pirate", 1, modules=modules))
    assert info_of(caught.value).reason == "INVALID_MANIFEST"
    assert "model.layers.0" in status_of(caught.value).message
    assert "model.layers.7" in status_of(caught.value).message
    assert await reason_of(rig.register("acme", manifest("acme", "pirate", 1, size=2 << 30))) == "INVALID_MANIFEST"
    high = (module("model.layers.0.self_attn.q_proj", rank=300),)
    assert await reason_of(rig.register("acme", manifest("acme", "pirate", 1, modules=high))) == "INVALID_MANIFEST"


async def test_an_unknown_base_is_refused(rig: Rig) -> None:
    payload = manifest("acme", "pirate", 1, base=base_spec("another"))
    assert await reason_of(rig.register("acme", payload)) == "BASE_MODEL_UNKNOWN"


async def test_versions_rise_and_content_is_registered_once(rig: Rig) -> None:
    one = await rig.active("acme", "pirate", 5, "one")
    assert await reason_of(rig.register("acme", manifest("acme", "pirate", 5, content="two"))) == "VERSION_NOT_RISING"
    far = manifest("acme", "pirate", 5 + 2**32, content="two")
    assert await reason_of(rig.register("acme", far)) == "VERSION_TOO_FAR"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.register("acme", manifest("acme", "pirate", 6, content="one"))
    assert info_of(caught.value).reason == "REVISION_EXISTS"
    assert dict(info_of(caught.value).metadata) == {"name": one.name, "version": "5", "state": "ACTIVE"}
    # The refused version was not used up, and another adapter of the tenant is no way around.
    assert await reason_of(rig.register("acme", manifest("acme", "other", 1, content="one"))) == "REVISION_EXISTS"
    await rig.register("acme", manifest("acme", "pirate", 6, content="two"))
    adapter = await rig.adapters().GetAdapter(
        pb.GetAdapterRequest(name="tenants/acme/adapters/pirate"), timeout=TIMEOUT
    )
    assert (adapter.latest_version, adapter.base_model) == (6, "baseModels/base")
    # Another tenant may hold the same weights: its revision has another id.
    await rig.tenant("globex")
    foreign = await rig.active("globex", "pirate", 1, "one")
    assert foreign.revision_id != one.revision_id
    assert foreign.weights_digest == one.weights_digest


async def test_the_same_manifest_again_gives_a_new_session(rig: Rig) -> None:
    payload = manifest("acme", "pirate", 1)
    first, second = await rig.register("acme", payload), await rig.register("acme", payload)
    assert first.revision == second.revision
    assert first.upload_session != second.upload_session
    await rig.admit(payload)
    assert await reason_of(rig.register("acme", payload)) == "REVISION_EXISTS"


async def test_a_spoiled_upload_costs_a_version_and_no_more(rig: Rig) -> None:
    bad = manifest("acme", "pirate", 1)
    await rig.register("acme", bad)
    quarantined = await rig.admit(bad, admitted=False, weights_digest="sha256:" + "0" * 64, weights_size=7)
    assert quarantined.state == State.STATE_QUARANTINED
    assert [reason.code for reason in quarantined.reasons] == ["DIGEST_MISMATCH"]
    assert await reason_of(rig.admit(bad)) == "INVALID_STATE"
    assert await reason_of(rig.register("acme", bad)) == "VERSION_NOT_RISING"
    again = await rig.active("acme", "pirate", 2, "c")
    assert again.state == State.STATE_ACTIVE
    assert again.revision_id == quarantined.revision_id
    assert (await get(rig, again.revision_id)).version == 2
    history = await get(rig, quarantined.name)
    assert [reason.code for reason in history.reasons] == ["DIGEST_MISMATCH", "SUPERSEDED"]
    # Revoking the history must not look as if the content were revoked.
    assert await reason_of(rig.revoke(quarantined.name)) == "INVALID_STATE"


async def test_an_announcement_without_an_upload_does_not_block_the_publisher(rig: Rig) -> None:
    first = await rig.register("acme", manifest("acme", "pirate", 1))
    second = await rig.register("acme", manifest("acme", "pirate", 2))
    assert second.revision.revision_id == first.revision.revision_id
    assert (await get(rig, first.revision.name)).state == State.STATE_QUARANTINED
    assert (await get(rig, first.revision.revision_id)).name == second.revision.name


async def test_validate_only_stores_nothing(rig: Rig) -> None:
    payload = manifest("acme", "pirate", 1)
    checked = await rig.register("acme", payload, validate_only=True)
    assert checked.revision.state == State.STATE_PENDING
    assert checked.upload_session == b""
    assert await reason_of(get(rig, checked.revision.revision_id)) == "REVISION_NOT_FOUND"
    assert await reason_of(rig.register("acme", manifest("acme", "x", 1, size=2 << 30), validate_only=True)) == (
        "INVALID_MANIFEST"
    )


async def test_only_a_trusted_loaders_word_on_this_revision_counts(rig: Rig) -> None:
    payload = manifest("acme", "pirate", 1)
    await rig.register("acme", payload)
    assert await reason_of(rig.admit(payload, key=SigningKey.generate())) == "UNTRUSTED_VERIFIER"
    assert await reason_of(rig.admit(payload, key=REGISTRY_KEY)) == "UNTRUSTED_VERIFIER"
    for change in (
        {"tenant": "globex"},
        {"base_id": "sha256:" + "1" * 64},
        {"weights_digest": "sha256:" + "1" * 64},
        {"weights_size": 4097},
        {"violations": (("RANK_MISMATCH", "x", "y"),)},
        {"verified_time": 1_700_000_000},
    ):
        assert await reason_of(rig.admit(payload, **change)) == "INVALID_VERIFICATION", change
    assert await reason_of(rig.admit(payload, admitted=False, violations=())) == "INVALID_VERIFICATION"
    assert await reason_of(rig.admit(payload, revision_id="sha256:" + "2" * 64)) == "REVISION_NOT_FOUND"
    junk = pb.AdmitRevisionRequest(verification_envelope=b"{}")
    assert await reason_of(rig.adapters("loader").AdmitRevision(junk, timeout=TIMEOUT)) == "INVALID_VERIFICATION"
    by_admin = pb.AdmitRevisionRequest(verification_envelope=verification(payload))
    assert await reason_of(rig.adapters().AdmitRevision(by_admin, timeout=TIMEOUT)) == "NOT_ALLOWED"
    assert (await get(rig, parse_manifest(payload).revision_id)).state == State.STATE_PENDING


async def test_a_later_bad_upload_cannot_take_a_verified_revision_down(rig: Rig) -> None:
    active = await rig.active("acme", "pirate", 1, "c")
    assert await reason_of(rig.admit(manifest("acme", "pirate", 1), admitted=False)) == "INVALID_STATE"
    assert (await get(rig, active.name)).state == State.STATE_ACTIVE


async def test_revocation_is_final_and_keeps_its_reason(rig: Rig) -> None:
    active = await rig.active("acme", "pirate", 1, "c")
    assert await reason_of(rig.revoke(active.name, etag="e0")) == "STALE_ETAG"
    assert await reason_of(rig.revoke(active.name, reason="")) == "INVALID_REQUEST"
    assert await reason_of(rig.revoke(active.name, reason="x" * 513)) == "INVALID_REQUEST"
    revoked = await rig.revoke(active.name, reason="leaked data", etag=active.etag)
    assert revoked.state == State.STATE_REVOKED
    assert [(reason.code, reason.detail) for reason in revoked.reasons] == [("REVOKED", "leaked data")]
    assert await rig.revoke(active.revision_id, reason="again") == revoked
    assert await reason_of(rig.approve(active.name)) == "INVALID_STATE"
    assert await reason_of(rig.admit(manifest("acme", "pirate", 1))) == "INVALID_STATE"
    assert await reason_of(rig.register("acme", manifest("acme", "pirate", 2))) == "REVISION_EXISTS"


async def test_approval_needs_verification_and_the_present_etag(rig: Rig) -> None:
    payload = manifest("acme", "pirate", 1)
    pending = (await rig.register("acme", payload)).revision
    assert await reason_of(rig.approve(pending.name)) == "INVALID_STATE"
    verified = await rig.admit(payload)
    assert await reason_of(rig.approve(pending.name, etag=pending.etag)) == "STALE_ETAG"
    assert (await rig.approve(pending.name, etag=verified.etag)).state == State.STATE_ACTIVE


@pytest.mark.parametrize(
    "name",
    ["", "sha256:12", "tenants/acme/adapters/pirate/revisions/1", "tenants/acme/adapters/../revisions/v1", "x" * 9999],
)
async def test_revision_names_are_checked(rig: Rig, name: str) -> None:
    assert not is_digest(name)
    assert await reason_of(get(rig, name)) == "INVALID_NAME"


async def test_unknown_revisions_and_adapters(rig: Rig) -> None:
    assert await reason_of(get(rig, "sha256:" + "a" * 64)) == "REVISION_NOT_FOUND"
    assert await reason_of(get(rig, "tenants/acme/adapters/pirate/revisions/v1")) == "REVISION_NOT_FOUND"
    assert await reason_of(rig.approve("tenants/acme/adapters/pirate/revisions/v1")) == "REVISION_NOT_FOUND"
    listing = pb.ListRevisionsRequest(parent="tenants/acme/adapters/pirate")
    assert await reason_of(rig.adapters().ListRevisions(listing, timeout=TIMEOUT)) == "ADAPTER_NOT_FOUND"
