"""The registry's word about a tenant's publishers: signed, canonical, exact."""

import json
from dataclasses import replace

import pytest

from loraport.bundle.canonical import canonical
from loraport.bundle.envelope import SigningKey, claimed_payload, sign_envelope
from loraport.trust.delegation import (
    PAYLOAD_TYPE,
    Delegation,
    DelegationError,
    Publisher,
    open_delegation,
    seal_delegation,
)

KEY = SigningKey.generate()
TRUSTED = {KEY.key_id: KEY.public_pem}
GOOD = Delegation(
    tenant="acme",
    version=3,
    threshold=2,
    publishers=(
        Publisher(signer="ci", key_id="1" * 64, valid=True, since=None),
        Publisher(signer="old", key_id="2" * 64, valid=False, since=17),
    ),
    issued=1_800_000_000,
)


def test_it_says_the_same_after_a_journey() -> None:
    assert open_delegation(seal_delegation(GOOD, KEY), TRUSTED) == GOOD


@pytest.mark.parametrize(
    "change", [{"threshold": 0}, {"threshold": 17}, {"version": -1}, {"schema": "x"}, {"publishers": 7}, {"issued": "now"}]
)  # fmt: skip
def test_another_form_proves_nothing(change: dict) -> None:
    payload = claimed_payload(seal_delegation(GOOD, KEY), payload_type=PAYLOAD_TYPE)
    envelope = sign_envelope(PAYLOAD_TYPE, canonical(json.loads(payload) | change), KEY)
    with pytest.raises(DelegationError):
        open_delegation(envelope, TRUSTED)


def test_another_signer_proves_nothing() -> None:
    with pytest.raises(DelegationError, match="UNTRUSTED"):
        open_delegation(seal_delegation(replace(GOOD, threshold=1), SigningKey.generate()), TRUSTED)
