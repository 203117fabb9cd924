"""Whatever the bytes are, a parser answers with its own types, and bytes that are read mean one thing."""

import json
from typing import Any

import pytest
import rfc8785
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraport.bundle.canonical import CanonicalError, StrictJsonError, canonical, load_strict
from loraport.bundle.codes import VIOLATIONS, WARNINGS
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, EnvelopeError, SigningKey, sign_envelope, verify_envelope
from loraport.bundle.manifest import ManifestError, build_manifest, parse_manifest
from loraport.bundle.peft_config import parse_config
from loraport.bundle.safetensors_header import parse_header
from loraport.bundle.verdict import DEFAULT_LIMITS
from tests.bundle_files import config, encode, entries, pack, tensors, verify, weights

GOOD_CONFIG, GOOD_WEIGHTS = encode(config()), weights()
HEADER, DATA = entries(tensors())
KEY = SigningKey.generate()
MANIFEST = build_manifest(
    verify(), adapter="a", version=1, created_time="2026-01-01T00:00:00Z", source={"kind": "upload", "uri": "x"}
)
ENVELOPE = sign_envelope(IN_TOTO_PAYLOAD_TYPE, MANIFEST, KEY)

FAST = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def mutated(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with a few bytes changed, dropped or inserted."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["set", "cut", "insert", "drop"])):
            case "set" if data:
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case "drop":
                del data[at : at + draw(st.integers(1, 9))]
    return bytes(data)


def judge(configuration: bytes, content: bytes) -> None:
    verdict = verify(configuration, content)
    assert verdict.admitted == (not verdict.violations) == (verdict.revision_id is not None)
    assert {found.code for found in verdict.violations} <= VIOLATIONS.keys()
    assert {found.code for found in verdict.warnings} <= WARNINGS.keys()
    if verdict.admitted:
        assert verdict.identity is not None
        assert canonical(dict(verdict.identity))


@FAST
@given(st.binary(max_size=300) | mutated(GOOD_CONFIG), st.binary(max_size=300) | mutated(GOOD_WEIGHTS))
def test_a_bundle_of_any_bytes_gets_a_verdict(configuration: bytes, content: bytes) -> None:
    judge(configuration, content)


@FAST
@given(mutated(GOOD_CONFIG))
def test_a_mutated_config_gets_a_verdict(configuration: bytes) -> None:
    judge(configuration, GOOD_WEIGHTS)


@FAST
@given(mutated(json.dumps(HEADER).encode()))
def test_a_mutated_header_gets_a_verdict(raw: bytes) -> None:
    judge(GOOD_CONFIG, pack(raw, DATA))


@FAST
@given(st.sampled_from(sorted(config())), json_values)
def test_any_value_of_any_key_gets_a_verdict(key: str, value: Any) -> None:
    try:
        data = json.dumps({**config(), key: value}).encode()
    except UnicodeEncodeError:
        return
    judge(data, GOOD_WEIGHTS)


@FAST
@given(st.sampled_from(sorted(HEADER)), json_values, st.sampled_from(["dtype", "shape", "data_offsets", None]))
def test_any_entry_of_the_header_gets_a_verdict(name: str, value: Any, field: str | None) -> None:
    entry = value if field is None or name == "__metadata__" else {**HEADER[name], field: value}
    judge(GOOD_CONFIG, pack({**HEADER, name: entry}, DATA))


@FAST
@given(st.binary(max_size=200))
def test_the_single_parsers_answer_too(data: bytes) -> None:
    parse_config(data, limits=DEFAULT_LIMITS)
    parse_header(data, file_size=len(data) + 8, limits=DEFAULT_LIMITS)
    for parser, error in ((parse_manifest, ManifestError), (_read_envelope, EnvelopeError)):
        try:
            parser(data)
        except error:
            continue
        raise AssertionError("random bytes were accepted")


def _read_envelope(data: bytes) -> bytes:
    return verify_envelope(data, payload_type=IN_TOTO_PAYLOAD_TYPE, trusted={KEY.key_id: KEY.public_pem})


@FAST
@given(mutated(MANIFEST))
def test_a_mutated_manifest_is_refused_or_is_canonical(data: bytes) -> None:
    try:
        manifest = parse_manifest(data)
    except ManifestError:
        return
    assert canonical(json.loads(data)) == data
    assert manifest.revision_id.startswith("sha256:")


@FAST
@given(st.data())
def test_sign_mutate_verify_fails(data: st.DataObject) -> None:
    """An envelope either gives the very payload that was signed, or nothing."""
    try:
        payload = _read_envelope(data.draw(mutated(ENVELOPE)))
    except EnvelopeError:
        return
    assert payload == MANIFEST


@FAST
@given(st.integers(0, len(MANIFEST) - 1), st.integers(1, 255))
def test_another_payload_under_the_same_signature_fails(at: int, flip: int) -> None:
    changed = bytearray(MANIFEST)
    changed[at] ^= flip
    forged = json.loads(ENVELOPE)
    forged["payload"] = json.loads(sign_envelope(IN_TOTO_PAYLOAD_TYPE, bytes(changed), KEY))["payload"]
    with pytest.raises(EnvelopeError, match="UNTRUSTED"):
        _read_envelope(json.dumps(forged).encode())


@FAST
@given(json_values)
def test_what_is_canonical_is_that_of_the_standard_and_read_back_the_same(value: Any) -> None:
    try:
        data = canonical(value)
    except CanonicalError:
        return
    assert data == rfc8785.dumps(value)
    assert canonical(load_strict(data, max_bytes=10_000, max_depth=20)) == data


@FAST
@given(st.text(max_size=60) | json_values.map(json.dumps))
def test_strict_json_agrees_with_the_library_on_what_it_reads(text: str) -> None:
    try:
        data = text.encode()
        value = load_strict(data, max_bytes=10_000, max_depth=20, allow_floats=True)
    except (UnicodeEncodeError, StrictJsonError):
        return
    assert value == json.loads(text)
