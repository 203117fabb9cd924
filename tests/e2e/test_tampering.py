"""Bytes that are not what was signed never serve; honest ones may still be published afterwards."""

import io
from pathlib import Path

import pytest

from loraport import FailedPreconditionError, PermissionDeniedError
from loraport.admin import AdminClient
from loraport.bundle.bundle_dir import read_bundle_dir
from loraport.bundle.envelope import SigningKey
from loraport.dev.layout import Layout
from loraport.publish import sign_manifest, state_name, upload_parts, verify_files
from tests.e2e.harness import Stack, add_tenant

pytestmark = pytest.mark.e2e


def offer(
    stack: Stack,
    bundle: Path,
    key: SigningKey,
    *,
    mark: str,
    flip: int | None,
    tenant: str = "acme",
    marked: bool = True,
) -> tuple[AdminClient, str, bool]:
    """Signs a bundle, sends it with one bit of the weights changed, and returns (admin, revision id, admitted).

    Unless `marked` the identity is the very one that `loraport adapter register` would sign.
    """
    admin = AdminClient.local(stack.data)
    with read_bundle_dir(bundle) as files:
        assert files.config is not None
        assert files.weights is not None
        verdict = verify_files(
            files, base=admin.base_spec("tiny"), tenant=tenant, training={"mark": mark} if marked else None
        )
        assert verdict.revision_id is not None
        envelope = sign_manifest(verdict, key, adapter=mark, version=1, source="test")
        session = admin.register_revision(tenant, envelope).upload_session
        weights = bytearray(files.weights.read())
        if flip is not None:
            weights[flip] ^= 1
        response = admin.upload(upload_parts(session, files.config, io.BytesIO(weights)))
    return admin, verdict.revision_id, response.admitted


@pytest.mark.parametrize(("mark", "flip"), [("first-data", 8192), ("last-byte", -1), ("header", 40)])
def test_a_changed_byte_is_quarantined_for_good(stack: Stack, world_dir: Path, mark: str, flip: int) -> None:
    key = SigningKey.load(Layout.at(stack.data).signer_key("acme", "default"))
    admin, revision_id, admitted = offer(stack, world_dir / "bundles" / "plain_r64", key, mark=mark, flip=flip)
    with admin:
        assert not admitted
        revision = admin.get_revision(revision_id)
        assert state_name(revision) == "QUARANTINED"
        assert [reason.code for reason in revision.reasons]
        with pytest.raises(FailedPreconditionError):
            admin.approve_revision(revision_id)
        with pytest.raises(FailedPreconditionError):
            admin.set_alias("acme", mark, "prod", revision_id)


def test_a_spoiled_upload_costs_the_honest_publisher_one_version(stack: Stack, world_dir: Path) -> None:
    add_tenant(stack, "umbrella")
    bundle = world_dir / "bundles" / "alpha_8"
    key = SigningKey.load(Layout.at(stack.data).signer_key("umbrella", "default"))
    admin, spoiled, admitted = offer(stack, bundle, key, mark="bot", flip=-1, tenant="umbrella", marked=False)
    admin.close()
    assert not admitted
    made = stack.ok(
        "adapter", "register", str(bundle), *("--tenant", "umbrella", "--name", "bot", "--base", "tiny"),
        "--approve", "--alias", "prod",
    )  # fmt: skip
    assert (made["state"], made["version"], made["revision_id"]) == ("ACTIVE", 2, spoiled)


def test_the_same_road_admits_honest_bytes(stack: Stack, world_dir: Path) -> None:
    key = SigningKey.load(Layout.at(stack.data).signer_key("acme", "default"))
    admin, revision_id, admitted = offer(stack, world_dir / "bundles" / "plain_r64", key, mark="honest", flip=None)
    with admin:
        assert admitted
        assert state_name(admin.get_revision(revision_id)) == "VERIFIED"


def test_a_stranger_signs_nothing(stack: Stack, world_dir: Path) -> None:
    globex = SigningKey.load(Layout.at(stack.data).signer_key("globex", "default"))
    for key in (SigningKey.generate(), globex):
        with pytest.raises(PermissionDeniedError) as caught:
            offer(stack, world_dir / "bundles" / "plain_r64", key, mark="stranger", flip=None)
        assert caught.value.reason == "UNTRUSTED_SIGNER"
