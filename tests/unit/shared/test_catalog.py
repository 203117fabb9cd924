import dataclasses

import pytest

from loraport.bundle.envelope import SigningKey
from services.shared.catalog import AliasItem, CatalogView, RevisionItem, RolloutItem, TenantItem, verified_record
from services.shared.residency import Notice, Resident, decode, encode
from services.shared.statements import Record, StatementError, seal

KEY = SigningKey.generate()
TRUSTED = {KEY.key_id: KEY.public_pem}
ID, WEIGHTS = "sha256:" + "1" * 64, "sha256:" + "2" * 64
RECORD = Record(ID, "acme", "bot", 3, "sha256:" + "3" * 64, WEIGHTS, 10, "ACTIVE", 1, 0)
ITEM = RevisionItem(ID, "acme", "bot", 3, "ACTIVE", "tiny", WEIGHTS, 10, 8, seal(RECORD, KEY), frozenset())


def revised(**changes: object) -> RevisionItem:
    return dataclasses.replace(ITEM, **changes)


def test_items_replace_their_kind_and_key() -> None:
    view = CatalogView()
    view.apply([TenantItem("acme", 1, True), ITEM, AliasItem("acme", "bot", "prod", ID)], epoch=5, synced=True)
    view.apply([TenantItem("acme", 2, True), AliasItem("acme", "bot", "prod", "")], epoch=4, synced=False)
    assert view.tenants["acme"].weight == 2
    assert view.aliases == {}
    assert view.epoch == 5, "an epoch never goes back"
    assert view.synced


def test_the_end_of_an_earlier_rollout_leaves_the_running_one() -> None:
    first = RolloutItem(
        name="tenants/acme/adapters/bot/rollouts/r1", tenant="acme", adapter="bot", alias="prod", salt=b"s" * 16,
        from_revision_id="old", to_revision_id="new", base_model="tiny", state="SPLITTING", share_basis_points=100,
        step_index=0, shadow_basis_points=0, generation=4, ended=False,
    )  # fmt: skip
    ended = dataclasses.replace(first, state="ROLLED_BACK", ended=True)
    second = dataclasses.replace(first, name="tenants/acme/adapters/bot/rollouts/r2", from_revision_id="older")
    view = CatalogView()
    view.apply([first], epoch=1, synced=True)
    assert view.rollouts["acme", "bot", "prod"] == first
    view.apply([second, ended], epoch=2, synced=True)
    assert view.rollouts["acme", "bot", "prod"] == second
    view.apply([dataclasses.replace(second, ended=True)], epoch=3, synced=True)
    assert view.rollouts == {}


def test_a_revocation_is_reported_once() -> None:
    view = CatalogView()
    view.apply([ITEM], epoch=1, synced=True)
    gone = revised(state="REVOKED")
    assert view.apply([gone], epoch=2, synced=True) == [gone]
    assert view.apply([gone], epoch=3, synced=True) == []


def test_a_full_state_that_lacks_a_revision_takes_it_out_of_service() -> None:
    view = CatalogView()
    view.apply([ITEM], epoch=1, synced=True)
    assert view.replace(CatalogView(epoch=2, synced=True)) == [ITEM]
    with pytest.raises(ValueError, match="went back"):
        view.replace(CatalogView(epoch=1, synced=True))


def test_a_record_must_be_signed_and_speak_of_the_item() -> None:
    assert verified_record(ITEM, TRUSTED) == RECORD
    stranger = SigningKey.generate()
    for bad in (
        revised(tenant="globex"),
        revised(version=4),
        revised(weights_digest=ID),
        revised(state="REVOKED"),
        revised(record_envelope=b""),
        revised(record_envelope=seal(RECORD, stranger)),
        revised(record_envelope=seal(dataclasses.replace(RECORD, state="REVOKED"), KEY)),
    ):
        with pytest.raises(StatementError):
            verified_record(bad, TRUSTED)


def test_notices_travel_and_garbage_is_no_notice() -> None:
    notice = Notice("e0", ID, 2, 7, 1_000, 0, 1, 5, 10, (Resident(ID, "READY", 5, 1),))
    assert decode(encode(notice)) == notice
    for garbage in (
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"executor": 1}',
        *(
            encode(notice).replace(was, other)
            for was, other in (
                (b'"epoch":2', b'"epoch":"2"'),
                (b'"queued_count":0', b'"queued_count":[]'),
                (b'"running_count":1', b'"running_count":null'),
                (b'"size_bytes":5', b'"size_bytes":"1"'),
                (b'"lease_count":1', b'"lease_count":true'),
                (f'"revision_id":"{ID}"'.encode(), b'"revision_id":["a"]'),
                (b'"state":"READY"', b'"state":7'),
                (f'"base_id":"{ID}"'.encode(), b'"base_id":{}'),
            )
        ),
    ):
        assert garbage != encode(notice)
        assert decode(garbage) is None
