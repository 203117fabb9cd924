"""The rules of checkpoints: what is opened, what is fresh, what is an attack."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from loraport.bundle.canonical import canonical
from loraport.bundle.envelope import SigningKey, sign_envelope
from loraport.log.checkpoint import (
    NO_RESTRICTIONS,
    Checkpoint,
    CheckpointError,
    Floor,
    Freshness,
    Judgement,
    freshness,
    judge,
    open_checkpoint,
    seal_checkpoint,
)
from loraport.log.merkle import EMPTY_ROOT

KEY = SigningKey.generate()
TRUSTED = {KEY.key_id: KEY.public_pem}
NOW = 1_800_000_000
ROOT = "ab" * 32
HEAD = "cd" * 32
GOOD = Checkpoint(
    tree_size=7, root_hash=ROOT, catalog_epoch=9, revocation_epoch=3, restriction_count=2, restriction_head=HEAD,
    issued=NOW - 10, expires=NOW + 590,
)  # fmt: skip
NONE = {"restriction_count": 0, "restriction_head": NO_RESTRICTIONS}


def opened(**changes: Any) -> Checkpoint:
    return open_checkpoint(seal_checkpoint(replace(GOOD, **changes), KEY), TRUSTED, now=NOW)


def test_a_good_one_is_opened_also_when_it_has_expired() -> None:
    assert opened() == GOOD
    assert opened(issued=NOW - 9_000, expires=NOW - 8_400).expires == NOW - 8_400
    assert opened(tree_size=0, root_hash=EMPTY_ROOT.hex(), revocation_epoch=0, **NONE).tree_size == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"expires": NOW + 591}, "too long"),
        ({"expires": NOW - 10}, "too long"),
        ({"issued": NOW + 61, "expires": NOW + 100}, "future"),
        ({"root_hash": "AB" * 32}, "form"),
        ({"root_hash": "ab"}, "form"),
        ({"root_hash": EMPTY_ROOT.hex()}, "size"),
        ({"tree_size": 0, "revocation_epoch": 0, **NONE}, "size"),
        ({"revocation_epoch": 8}, "beyond"),
        ({"restriction_count": 8}, "beyond"),
        ({"restriction_count": 0}, "length"),
        ({"restriction_head": NO_RESTRICTIONS}, "length"),
        ({"restriction_head": "zz" * 32}, "form"),
        ({"catalog_epoch": -1}, "form"),
        ({"tree_size": True}, "form"),
    ],
)
def test_what_a_registry_would_never_say_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        opened(**changes)


def test_other_keys_types_and_forms_are_refused() -> None:
    value = asdict(GOOD)
    older = {name: item for name, item in value.items() if not name.startswith("restriction")}
    for envelope, why in (
        (seal_checkpoint(GOOD, SigningKey.generate()), "UNTRUSTED"),
        (sign_envelope("application/vnd.loraport.record+json", canonical(value), KEY), "PAYLOAD_TYPE"),
        (sign_envelope(Checkpoint.TYPE, canonical(value) + b" ", KEY), "canonical"),
        (sign_envelope(Checkpoint.TYPE, canonical({**value, "more": 1}), KEY), "fields"),
        (sign_envelope(Checkpoint.TYPE, canonical([]), KEY), "fields"),
        (sign_envelope(Checkpoint.TYPE, canonical(older), KEY), "older release"),
        (b"{}", "MALFORMED"),
    ):
        with pytest.raises(CheckpointError, match=why):
            open_checkpoint(envelope, TRUSTED, now=NOW)


def test_one_of_an_earlier_release_is_opened_by_whoever_asks_for_it_alone() -> None:
    value = {name: item for name, item in asdict(GOOD).items() if not name.startswith("restriction")}
    envelope = sign_envelope(Checkpoint.TYPE, canonical(value), KEY)
    found = open_checkpoint(envelope, TRUSTED, now=NOW, older=True)
    assert (found.older, found.tree_size, found.restriction_count) == (True, 7, 0)
    assert not open_checkpoint(seal_checkpoint(GOOD, KEY), TRUSTED, now=NOW, older=True).older
    for changes in ({"tree_size": 2}, {"root_hash": "zz"}, {"more": 1}, {"restriction_head": ""}, {"issued": NOW + 70}):
        envelope = sign_envelope(Checkpoint.TYPE, canonical(value | changes), KEY)
        with pytest.raises(CheckpointError):
            open_checkpoint(envelope, TRUSTED, now=NOW, older=True)


def test_no_byte_of_an_envelope_may_change() -> None:
    envelope = seal_checkpoint(GOOD, KEY)
    for place in range(len(envelope)):
        changed = envelope[:place] + bytes([envelope[place] ^ 1]) + envelope[place + 1 :]
        try:
            assert open_checkpoint(changed, TRUSTED, now=NOW) == GOOD
        except CheckpointError:
            continue
        # Base64 has spare bits and the envelope's whitespace says nothing: whatever is accepted says the same.


@pytest.mark.parametrize(
    ("late", "grace", "expected"),
    [
        (-600, 900, Freshness.FRESH),
        (0, 900, Freshness.FRESH),
        (0.001, 900, Freshness.STALE),
        (900, 900, Freshness.STALE),
        (900.001, 900, Freshness.DEAD),
        (0, 0, Freshness.FRESH),
        (0.001, 0, Freshness.DEAD),
    ],
)
def test_freshness(late: float, grace: float, expected: Freshness) -> None:
    assert freshness(now=NOW + late, expires=NOW, grace_s=grace) is expected


FLOOR = Floor(
    tree_size=7, root_hash=ROOT, catalog_epoch=9, revocation_epoch=3, restriction_count=2, restriction_head=HEAD
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Judgement.SAME),
        ({"catalog_epoch": 10}, Judgement.SAME),
        ({"tree_size": 8, "root_hash": "cd" * 32}, Judgement.GROWN),
        ({"tree_size": 6}, Judgement.ROLLBACK),
        ({"catalog_epoch": 8}, Judgement.ROLLBACK),
        ({"revocation_epoch": 2}, Judgement.ROLLBACK),
        ({"restriction_count": 1}, Judgement.ROLLBACK),
        ({"restriction_head": "ef" * 32}, Judgement.SPLIT_VIEW),
        ({"tree_size": 8, "root_hash": "cd" * 32, "restriction_head": "ef" * 32}, Judgement.SPLIT_VIEW),
        ({"tree_size": 8, "root_hash": "cd" * 32, "restriction_count": 3}, Judgement.GROWN),
        ({"tree_size": 8, "root_hash": "cd" * 32, "catalog_epoch": 8}, Judgement.ROLLBACK),
        ({"tree_size": 8, "root_hash": "cd" * 32, "revocation_epoch": 2}, Judgement.ROLLBACK),
        ({"root_hash": "cd" * 32}, Judgement.SPLIT_VIEW),
        ({"root_hash": "cd" * 32, "catalog_epoch": 11}, Judgement.SPLIT_VIEW),
    ],
)
def test_judgement(changes: dict[str, Any], expected: Judgement) -> None:
    assert judge(replace(GOOD, **changes), FLOOR) is expected


def test_a_floor_only_rises() -> None:
    assert judge(GOOD, Floor()) is Judgement.GROWN
    assert Floor().raised(GOOD) == FLOOR
    empty = replace(GOOD, tree_size=0, root_hash=EMPTY_ROOT.hex(), revocation_epoch=0, **NONE)
    assert judge(empty, Floor()) is Judgement.SAME
    assert judge(empty, FLOOR) is Judgement.ROLLBACK
