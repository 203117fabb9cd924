"""The signed manifest: what goes in comes out, and nothing else is read."""

from collections.abc import Callable
from typing import Any

import pytest

from loraport.bundle.base import base_id
from loraport.bundle.canonical import canonical, load_strict
from loraport.bundle.identity import alpha_text
from loraport.bundle.manifest import MAX_MANIFEST_BYTES, ManifestError, build_manifest, is_name, parse_manifest
from loraport.bundle.verdict import Verdict
from tests.bundle_files import config, small_base, verify

GIVEN: dict[str, Any] = {
    "adapter": "helper",
    "version": 17,
    "created_time": "2026-01-31T12:00:00Z",
    "source": {"kind": "upload", "uri": "file:bundle"},
    "notes": "first",
}
VERDICT = verify(training={"dataset": "sha256:00"})


def manifest(verdict: Verdict = VERDICT, **changes: Any) -> bytes:
    return build_manifest(verdict, **{**GIVEN, **changes})


def test_round_trip() -> None:
    read = parse_manifest(manifest())
    assert read.revision_id == VERDICT.revision_id
    assert (read.tenant, read.adapter, read.version) == ("acme", "helper", 17)
    assert (read.weights_digest, read.weights_size) == (VERDICT.weights_digest, VERDICT.weights_size)
    assert (read.config_digest, read.config_size) == (VERDICT.config_digest, VERDICT.config_size)
    assert read.modules == VERDICT.modules
    assert read.dtype == "F32"
    assert read.training == {"dataset": "sha256:00"}
    base = small_base()
    found = (read.base_weights_digest, read.base_config_digest, read.base_tokenizer_digest)
    assert found == (base.weights_digest, base.config_digest, base.tokenizer_digest)


def test_the_statement_does_not_change_the_revision() -> None:
    other = manifest(
        adapter="other", version=18, created_time="2027-01-01T00:00:00.5Z", notes="", source={"kind": "s3", "uri": "x"}
    )
    assert parse_manifest(other).revision_id == VERDICT.revision_id
    assert other != manifest()


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "globex"},
        {"base": small_base(weights="d")},
        {"configuration": config(lora_alpha=8)},
        {"configuration": config(use_rslora=True)},
        {"training": {"dataset": "other"}},
    ],
)
def test_what_changes_the_meaning_changes_the_revision(changes: dict[str, Any]) -> None:
    assert verify(**changes).revision_id not in (None, VERDICT.revision_id, verify().revision_id)


def test_a_refused_bundle_has_no_manifest() -> None:
    with pytest.raises(ManifestError, match="admitted"):
        manifest(verify(config(use_dora=True)))


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": "Helper"}, {"adapter": ""}, {"adapter": "a" * 64}, {"adapter": "-a"}, {"adapter": "a-"},
        {"version": 0}, {"version": True}, {"version": 1.5}, {"version": 2**53}, {"created_time": "yesterday"},
        {"created_time": "2026-01-31T12:00:00+01:00"}, {"created_time": "2026-13-31T12:00:00Z"},
        {"source": {"kind": "upload"}}, {"source": {"kind": "", "uri": "x"}}, {"source": {"kind": "a", "uri": 1}},
        {"notes": "x" * 2001}, {"notes": "\ud800"}, {"notes": None},
    ],
)  # fmt: skip
def test_bad_statements(changes: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        manifest(**changes)


def _edit(change: Callable[[dict[str, Any]], Any]) -> bytes:
    document = load_strict(manifest(), max_bytes=MAX_MANIFEST_BYTES, max_depth=9)
    change(document)
    return canonical(document)


def identity(document: dict[str, Any]) -> dict[str, Any]:
    return document["predicate"]["identity"]  # type: ignore[no-any-return]


def row(document: dict[str, Any]) -> dict[str, Any]:
    return identity(document)["modules"][0]  # type: ignore[no-any-return]


EDITS: list[Callable[[dict[str, Any]], Any]] = [
    lambda d: d.update(_type="x"),
    lambda d: d.update(predicateType="x"),
    lambda d: d.update(more=1),
    lambda d: d.update(predicate=[]),
    lambda d: d["subject"].reverse(),
    lambda d: d["subject"].pop(),
    lambda d: d["subject"][0]["digest"].update(sha256="0" * 64),
    lambda d: d["predicate"].update(more={}),
    lambda d: d["predicate"]["statement"].update(config_sha256="0" * 64),
    lambda d: d["predicate"]["statement"].pop("notes"),
    lambda d: d["predicate"]["statement"].update(config_size_bytes=0),
    lambda d: identity(d).update(schema="loraport.adapter-identity.v2"),
    lambda d: identity(d).update(tenant="Acme"),
    lambda d: identity(d)["base"].update(weights="0" * 64),
    lambda d: identity(d)["base"].pop("tokenizer"),
    lambda d: identity(d)["weights"].update(size_bytes=-1),
    lambda d: identity(d)["weights"].update(sha256="0" * 64),
    lambda d: identity(d).update(dtype="F64"),
    lambda d: identity(d).update(naming="kohya"),
    lambda d: identity(d).update(activation={"mode": "alora", "tokens": [1]}),
    lambda d: identity(d).update(training=[]),
    lambda d: identity(d).update(training={"a": 1}),
    lambda d: identity(d).update(training={str(i): "x" for i in range(33)}),
    lambda d: identity(d).update(modules=[]),
    lambda d: identity(d).update(modules={}),
    lambda d: identity(d)["modules"].reverse(),
    lambda d: identity(d)["modules"].append(row(d)),
    lambda d: row(d).update(rank=3),
    lambda d: row(d).update(rank=True),
    lambda d: row(d).update(path=""),
    lambda d: row(d).update(a_shape=[2]),
    lambda d: row(d).update(b_shape=[16, 3]),
    lambda d: row(d).update(alpha="4.0"),
    lambda d: row(d).update(alpha="nan"),
    lambda d: row(d).update(alpha="-4"),
    lambda d: row(d).update(alpha="four"),
    lambda d: row(d).update(scaling="2.0"),
    lambda d: row(d).update(scaling="inf"),
    lambda d: row(d).update(scaling="0x1.0p+99999"),
    lambda d: row(d).update(scaling="-0x1.0000000000000p+1"),
    lambda d: row(d).update(scaling="x"),
]


@pytest.mark.parametrize("change", EDITS)
def test_a_document_with_a_fault_is_not_a_manifest(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(_edit(change))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"null", manifest() + b" ", b" " + manifest(), manifest().replace(b'":', b'": ', 1)]
)
def test_bytes_that_are_not_canonical_are_not_a_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(data)


def test_names() -> None:
    assert is_name("a")
    assert is_name("a" * 63)
    for wrong in ("", "A", "1a", "a_b", "a-", "a" * 64, "a\n", "../a", "é", None, 1):
        assert not is_name(wrong)


@pytest.mark.parametrize(
    ("alpha", "text"), [(16, "16"), (16.0, "16"), (22.5, "22.5"), (0.1, "0.1"), (10**20, "1" + "0" * 20)]
)
def test_alpha_has_one_text(alpha: float, text: str) -> None:
    assert alpha_text(alpha) == text


def test_the_base_id_covers_the_three_digests_and_nothing_else() -> None:
    assert base_id(small_base()) == base_id(small_base(layers=3))
    assert base_id(small_base()) != base_id(small_base(weights="d"))
