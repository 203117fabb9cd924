"""Bytes that are not what was signed never serve, and honest ones may still be published afterwards."""

import io
from pathlib import Path

import pytest

from loraport import FailedPreconditionError, PermissionDeniedError
from loraport.admin import AdminClient
from loraport.bundle.bundle_dir import read_bundle_dir
from loraport.bundle.envelope import SigningKey
from loraport.dev.layout import Layout
from loraport.publish import sign_manifest, state_name, upload_parts, verify_files
from tests.e2e.harness import Stack

pytestmark = pytest.mark.e2e


def offer(stack: Stack, bundle: Path, key: SigningKey, *, mark: str, flip: int | None) -> tuple[AdminClient, str, bool]:
    """Signs a bundle, sends it with one bit of the weights changed, and returns (admin, revision id, admitted)."""
    admin = AdminClient.local(stack.data)
    with read_bundle_dir(bundle) as files:
        assert files.config is not None
        assert files.weights is not None
        verdict = verify_files(files, base=admin.base_spec("tiny"), tenant="acme", training={"mark": mark})
        assert verdict.revision_id is not None
        envelope = sign_manifest(verdict, key, adapter=mark, version=1, source="test")
        session = admin.register_revision("acme", envelope).upload_session
        weights = bytearray(files.weights.read())
        if flip is not None:
            weights[flip] ^= 1
        response = admin.upload(upload_parts(session, files.config, io.BytesIO(weights)))
    return admin, verdict.revision_id, response.admitted


@pytest.mark.parametrize(("mark", "flip"), [("first-data", 8192), ("last-byte", -1), ("header", 40)])
def test_a_changed_byte_is_quarantined_for_good(stack: Stack, cases_dir: Path, mark: str, flip: int) -> None:
    key = SigningKey.load(Layout.at(stack.data).signer_key("acme", "default"))
    admin, revision_id, admitted = offer(stack, cases_dir / "bundles" / "plain_r4", key, mark=mark, flip=flip)
    with admin:
        assert not admitted
        revision = admin.get_revision(revision_id)
        assert state_name(revision) == "QUARANTINED"
        assert [reason.code for reason in revision.reasons]
        with pytest.raises(FailedPreconditionError):
            admin.approve_revision(revision_id)
        with pytest.raises(FailedPreconditionError):
            admin.set_alias("acme", mark, "prod", revision_id)


def test_the_same_road_admits_honest_bytes(stack: Stack, cases_dir: Path) -> None:
    key = SigningKey.load(Layout.at(stack.data).signer_key("acme", "default"))
    admin, revision_id, admitted = offer(stack, cases_dir / "bundles" / "plain_r4", key, mark="honest", flip=None)
    with admin:
        assert admitted
        assert state_name(admin.get_revision(revision_id)) == "VERIFIED"


def test_a_stranger_signs_nothing(stack: Stack, cases_dir: Path) -> None:
    globex = SigningKey.load(Layout.at(stack.data).signer_key("globex", "default"))
    for key in (SigningKey.generate(), globex):
        with pytest.raises(PermissionDeniedError) as caught:
            offer(stack, cases_dir / "bundles" / "plain_r4", key, mark="stranger", flip=None)
        assert caught.value.reason == "UNTRUSTED_SIGNER"
