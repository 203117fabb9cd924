"""Signed envelopes: what proves something, and what does not."""

import base64
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from loraport.bundle.envelope import (
    IN_TOTO_PAYLOAD_TYPE,
    EnvelopeError,
    SigningKey,
    claimed_payload,
    key_id,
    sign_envelope,
    signed_by,
    verify_envelope,
)

ONE, TWO, THREE = SigningKey.generate(), SigningKey.generate(), SigningKey.generate()
PAYLOAD = b'{"a":1}'


def trust(*keys: SigningKey) -> dict[str, bytes]:
    return {key.key_id: key.public_pem for key in keys}


def refusal(envelope: bytes, *, trusted: Any = None, threshold: int = 1, kind: str = IN_TOTO_PAYLOAD_TYPE) -> str:
    with pytest.raises(EnvelopeError) as caught:
        verify_envelope(
            envelope, payload_type=kind, trusted=trust(ONE, TWO) if trusted is None else trusted, threshold=threshold
        )
    return caught.value.code


def edited(envelope: bytes, **changes: Any) -> bytes:
    return json.dumps({**json.loads(envelope), **changes}).encode()


def test_the_payload_comes_back_as_signed() -> None:
    envelope = sign_envelope(IN_TOTO_PAYLOAD_TYPE, PAYLOAD, ONE)
    assert verify_envelope(envelope, payload_type=IN_TOTO_PAYLOAD_TYPE, trusted=trust(ONE)) == PAYLOAD
    assert signed_by(envelope) == (ONE.key_id,)


def test_a_threshold_counts_distinct_keys() -> None:
    both = sign_envelope(IN_TOTO_PAYLOAD_TYPE, PAYLOAD, [ONE, TWO])
    assert verify_envelope(both, payload_type=IN_TOTO_PAYLOAD_TYPE, trusted=trust(ONE, TWO), threshold=2) == PAYLOAD
    assert refusal(both, threshold=3) == "UNTRUSTED"
    twice = sign_envelope(IN_TOTO_PAYLOAD_TYPE, PAYLOAD, [ONE, ONE])
    assert refusal(twice, threshold=2) == "UNTRUSTED"


def test_one_key_under_two_ids_is_refused() -> None:
    """The library alone would count this as two signers."""
    envelope = json.loads(sign_envelope(IN_TOTO_PAYLOAD_TYPE, PAYLOAD, ONE))
    alias = "0" * 64
    envelope["signatures"].append({**envelope["signatures"][0], "keyid": alias})
    trusted = {**trust(ONE), alias: ONE.public_pem}
    assert refusal(json.dumps(envelope).encode(), trusted=trusted, threshold=2) == "BAD_KEY"


def test_one_bad_signature_does_not_spoil_enough_good_ones() -> None:
    envelope = json.loads(sign_envelope(IN_TOTO_PAYLOAD_TYPE, PAYLOAD, [ONE, TWO]))
    envelope["signatures"][0]["sig"] = base64.b64encode(bytes(64)).decode()
    data = json.dumps(envelope).encode()
    assert verify_envelope(data, payload_type=IN_TOTO_PAYLOAD_TYPE, trusted=trust(ONE, TWO)) == PAYLOAD
    assert refusal(data, threshold=2) == "UNTRUSTED"
    envelope["signatures"][0]["sig"] = "AAAA"
    data = json.dumps(envelope).encode()
    assert verify_envelope(data, payload_type=IN_TOTO_PAYLOAD_TYPE, trusted=trust(ONE, TWO)) == PAYLOAD


def test_both_base64_alphabets_are_read() -> None:
    envelope = json.loads(sign_envelope(IN_TOTO_PAYLOAD_TYPE, b"\xff\xfe\xfd\xfb\xff", ONE))
    envelope["payload"] = envelope["payload"].replace("+", "-").replace("/", "_")
    data = json.dumps(envelope).encode()
    assert verify_envelope(data, payload_type=IN_TOTO_PAYLOAD_TYPE, trusted=trust(ONE)) == b"\xff\xfe\xfd\xfb\xff"


def test_refusals_have_codes() -> None:
    good = sign_envelope(IN_TOTO_PAYLOAD_TYPE, PAYLOAD, ONE)
    signature = json.loads(good)["signatures"][0]
    other = base64.b64encode(b'{"a":2}').decode()
    assert refusal(good, trusted={}) == "UNTRUSTED"
    assert refusal(good, trusted=trust(TWO)) == "UNTRUSTED"
    assert refusal(good, trusted={ONE.key_id: TWO.public_pem}) == "BAD_KEY"
    assert refusal(good, trusted={ONE.key_id: b"no key"}) == "BAD_KEY"
    assert refusal(good, kind="text/plain") == "PAYLOAD_TYPE"
    assert refusal(edited(good, payloadType="text/plain"), kind="text/plain") == "UNTRUSTED"
    assert refusal(edited(good, payload=other)) == "UNTRUSTED"
    assert refusal(edited(good, signatures=[signature, signature])) == "DUPLICATE_SIGNATURE"
    assert refusal(b" " * 300_000) == "TOO_LARGE"
    malformed = [
        b"", b"[]", b"{}", good[:-1], b"\xff", edited(good, more=1), edited(good, payload=1),
        edited(good, payload="a b"), edited(good, payload="é"), edited(good, payloadType=None),
        edited(good, signatures=[]), edited(good, signatures={}), edited(good, signatures=[signature] * 17),
        edited(good, signatures=[1]), edited(good, signatures=[{**signature, "cert": ""}]),
        edited(good, signatures=[{**signature, "keyid": "short"}]), edited(good, signatures=[{**signature, "sig": None}]),
    ]  # fmt: skip
    for envelope in malformed:
        assert refusal(envelope) == "MALFORMED", envelope[:200]


def test_a_claimed_payload_is_of_the_type_asked_for() -> None:
    envelope = sign_envelope(IN_TOTO_PAYLOAD_TYPE, PAYLOAD, ONE)
    assert claimed_payload(envelope, payload_type=IN_TOTO_PAYLOAD_TYPE) == PAYLOAD
    with pytest.raises(EnvelopeError, match="PAYLOAD_TYPE"):
        claimed_payload(envelope, payload_type="text/plain")


def test_only_ed25519_is_trusted() -> None:
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(EnvelopeError, match="BAD_KEY"):
        key_id(pem)


def test_a_threshold_below_one_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="threshold"):
        verify_envelope(b"", payload_type="x", trusted={}, threshold=0)


def test_an_envelope_has_one_to_sixteen_keys_and_a_bounded_payload() -> None:
    with pytest.raises(EnvelopeError, match="MALFORMED"):
        sign_envelope("x", b"", [])
    with pytest.raises(EnvelopeError, match="TOO_LARGE"):
        sign_envelope("x", bytes(200_000), ONE)


def test_keys_are_saved_for_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "signer.key"
    old = os.umask(0)
    try:
        ONE.save(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SigningKey.load(path).key_id == ONE.key_id == key_id(ONE.public_pem)
    with pytest.raises(FileExistsError):
        TWO.save(path)
    assert "PRIVATE" not in repr(ONE)


def test_only_an_ed25519_key_loads(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"nonsense")
    with pytest.raises(EnvelopeError, match="BAD_KEY"):
        SigningKey.load(path)
    path.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    with pytest.raises(EnvelopeError, match="BAD_KEY"):
        SigningKey.load(path)
