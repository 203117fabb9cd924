"""Sources as a publisher writes them, and what goes into the signed manifest about them."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loraport.bundle.canonical import canonical
from loraport.bundle.envelope import SigningKey
from loraport.bundle.manifest import parse_manifest
from loraport.cli.main import run
from loraport.errors import NotFoundError, PermissionDeniedError
from loraport.loader.v1.loader_service_pb2 import ImportRequest, UploadResponse
from loraport.publish import publish
from loraport.sources import Source, https_source, hub_source, s3_source
from loraport.types.v1.types_pb2 import StageReport
from tests.bundle_files import config, encode, small_base, tensors, weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_hub_source() -> None:
    source = hub_source(f"acme/pirate@{COMMIT}")
    assert (source.kind, source.uri) == ("hub", f"hf://acme/pirate@{COMMIT}")
    assert (source.request.hub.repository, source.request.hub.commit) == ("acme/pirate", COMMIT)


def test_an_s3_source() -> None:
    source = s3_source("lake/adapters/acme/v1/config.json,acme/v1/w.safetensors")
    assert (source.kind, source.uri) == ("s3", "s3://lake/adapters/acme/v1/config.json")
    found = source.request.s3
    assert (found.endpoint, found.bucket) == ("lake", "adapters")
    assert (found.config_key, found.weights_key) == ("acme/v1/config.json", "acme/v1/w.safetensors")


def test_an_https_source_keeps_its_signature_to_itself() -> None:
    source = https_source("https://files.example/c?sig=secret", "https://files.example/w?sig=secret")
    assert source.uri == "https://files.example/c"
    assert source.request.https.config_url.endswith("sig=secret")


@pytest.mark.parametrize(
    "text", ["acme/pirate", "acme/pirate@main", "pirate@" + COMMIT, "a/b/c@" + COMMIT, "", "/@" + COMMIT]
)
def test_a_hub_source_is_pinned(text: str) -> None:
    with pytest.raises(ValueError, match=r"hub source|40 hex digits"):
        hub_source(text)


@pytest.mark.parametrize("text", ["", "lake", "lake/adapters/c", "lake/adapters/c,", "lake/c,w", "lake//c,w"])
def test_an_s3_source_names_both_keys(text: str) -> None:
    with pytest.raises(ValueError, match="an s3 source is"):
        s3_source(text)


@pytest.mark.parametrize(
    "url", ["http://files.example/c", "https://user:password@files.example/c", "files.example/c", ""]
)
def test_an_https_source_names_no_user(url: str) -> None:
    for pair in ((url, "https://files.example/w"), ("https://files.example/c", url)):
        with pytest.raises(ValueError, match="an https source is"):
            https_source(*pair)


class Admin:
    """Stands in for the services: notes what the loader is asked to fetch. An upload would fail."""

    def __init__(self, *, admitted: bool = True) -> None:
        self.admitted = admitted
        self.manifest = b""
        self.asked: list[ImportRequest] = []

    def base_spec(self, name: str) -> Any:
        return small_base()

    def get_adapter(self, tenant: str, adapter: str) -> Any:
        raise NotFoundError("no", reason="ADAPTER_NOT_FOUND")

    def get_revision(self, name: str) -> Any:
        raise NotFoundError("no", reason="REVISION_NOT_FOUND")

    def register_revision(self, tenant: str, envelope: bytes) -> Any:
        self.manifest = envelope
        return SimpleNamespace(upload_session=b"session")

    def import_bundle(self, request: ImportRequest, *, observe: Any) -> UploadResponse:
        self.asked.append(request)
        observe(StageReport(elapsed_ms=1))
        return UploadResponse(admitted=self.admitted)


@pytest.mark.parametrize("admitted", [True, False])
def test_publishing_from_a_source(tmp_path: Path, admitted: bool) -> None:
    """The bytes in the directory are signed, the manifest says where the loader takes them from, nothing is sent."""
    (tmp_path / "adapter_config.json").write_bytes(encode(config()))
    (tmp_path / "adapter_model.safetensors").write_bytes(weights(tensors()))
    admin, stages = Admin(admitted=admitted), []
    source = hub_source(f"acme/pirate@{COMMIT}")
    key = SigningKey.generate()
    result = publish(
        admin, tmp_path, tenant="acme", adapter="pirate", base="small", signer=key, source=source, observe=stages.append
    )
    assert result.state == ("VERIFIED" if admitted else "QUARANTINED")
    [asked] = admin.asked
    assert (asked.session, asked.hub.commit) == (b"session", COMMIT)
    assert source.request.session == b""  # the source itself stays as it was
    assert len(stages) == 1
    assert _origin(admin.manifest) == {"kind": "hub", "uri": source.uri}


def _origin(envelope: bytes) -> dict[str, str]:
    payload = base64.b64decode(json.loads(envelope)["payload"])
    manifest = parse_manifest(payload)
    assert canonical(json.loads(payload)) == payload
    assert manifest.revision_id.startswith("sha256:")
    return json.loads(payload)["predicate"]["statement"]["source"]


def test_the_command_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["adapter", "import", str(tmp_path), "-t", "acme", "-n", "pirate", "-b", "small"]
    for wrong in ([], ["--hub", "acme/pirate@main"], ["--s3", "x"], ["--https", "a", "b"], ["--s3", "x", "--hub", "y"]):
        assert run([*common, *wrong]) == 2
        assert "adapter import --help" in capsys.readouterr().err
    assert run([*common, "--hub", f"acme/pirate@{COMMIT}", "--alias", "stable"]) == 2
    capsys.readouterr()

    seen: list[Source] = []

    def refuse(*arguments: object, source: Source, **options: object) -> None:
        seen.append(source)
        raise PermissionDeniedError("NO_HUB: no model hub is allowed", reason="SOURCE_NOT_ALLOWED")

    monkeypatch.setattr("loraport.publish.publish", refuse)
    monkeypatch.setattr("loraport.cli.imports.find_signer", lambda *arguments: None)
    monkeypatch.setattr("loraport.admin.AdminClient.local", lambda data: _Context())
    assert run([*common, "--hub", f"acme/pirate@{COMMIT}"]) == 1
    assert "`imports`" in capsys.readouterr().err
    assert [source.kind for source in seen] == ["hub"]


class _Context:
    def __enter__(self) -> None: ...

    def __exit__(self, *arguments: object) -> None: ...
