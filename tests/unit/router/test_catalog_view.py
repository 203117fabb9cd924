import dataclasses

import pytest

from loraport.bundle.digest import sha256_digest
from loraport.bundle.envelope import SigningKey
from loraport.log.leaf import Kind
from loraport.log.replay import shared_digest
from services.router.catalog_view import (
    RecordChecker,
    Target,
    check_target,
    inactive,
    list_adapters,
    resolve,
    resolve_base,
)
from services.shared.catalog import AliasItem, BaseItem, CatalogView, RestrictionItem, RevisionItem, TenantItem
from services.shared.errors import FaultList, LoraportError
from services.shared.statements import Record, seal
from tests.support.translog import FakeLog

KEY = SigningKey.generate()
BASE = sha256_digest(b"base")


def revision(
    tenant: str,
    adapter: str,
    *,
    version: int = 1,
    state: str = "ACTIVE",
    shared: tuple[str, ...] = (),
    base: str = BASE,
    key: SigningKey = KEY,
) -> RevisionItem:
    revision_id = sha256_digest(f"{tenant}/{adapter}/{version}".encode())
    record = Record(
        revision_id=revision_id, tenant=tenant, adapter=adapter, version=version, base_id=base,
        weights_digest=sha256_digest(b"w"), weights_size=1, state="ACTIVE", sequence=1, issued_time=1,
    )  # fmt: skip
    return RevisionItem(
        revision_id=revision_id, tenant=tenant, adapter=adapter, version=version, state=state, base_model="tiny",
        weights_digest=sha256_digest(b"w"), size_bytes=1, max_rank=4, record_envelope=seal(record, key),
        shared_tenants=frozenset(shared),
    )  # fmt: skip


ACTIVE = revision("acme", "bot")
WAITING = revision("acme", "draft", state="VERIFIED", shared=("globex",))
REVOKED = revision("acme", "old", state="REVOKED", shared=("globex",))
SHARED = revision("acme", "common", shared=("globex",))


@pytest.fixture
def view() -> CatalogView:
    view = CatalogView()
    aliases = [AliasItem("acme", item.adapter, "prod", item.revision_id) for item in (ACTIVE, WAITING)]
    aliases.append(AliasItem("acme", "bot", "beta", ACTIVE.revision_id))
    aliases.extend(AliasItem("acme", item.adapter, "shown", item.revision_id) for item in (SHARED, WAITING, REVOKED))
    shares = RestrictionItem(
        0, FakeLog(KEY).restrict(Kind.SHARED, "tenants/acme/adapters/common", shared_digest(["globex"]))
    )
    items = [BaseItem("tiny", BASE), shares, ACTIVE, WAITING, REVOKED, SHARED, *aliases]
    view.apply(items, epoch=1, synced=True)
    return view


@pytest.mark.parametrize(
    ("tenant", "target", "found"),
    [
        ("acme", Target(adapter="bot"), ACTIVE),
        ("acme", Target(adapter="bot", alias="beta"), ACTIVE),
        ("acme", Target(revision_id=ACTIVE.revision_id), ACTIVE),
        ("acme", Target(adapter="draft"), WAITING),
        ("acme", Target(revision_id=REVOKED.revision_id), REVOKED),
        ("globex", Target(revision_id=SHARED.revision_id), SHARED),
        ("acme", Target(adapter="tenants/acme/adapters/bot"), ACTIVE),
        ("acme", Target(adapter="tenants/acme/adapters/draft", alias="shown"), WAITING),
        ("globex", Target(adapter="tenants/acme/adapters/common", alias="shown"), SHARED),
        ("globex", Target(adapter="tenants/acme/adapters/common"), None),
        ("globex", Target(adapter="common", alias="shown"), None),
        ("globex", Target(adapter="tenants/acme/adapters/bot"), None),
        ("globex", Target(adapter="tenants/acme/adapters/draft", alias="shown"), None),
        ("globex", Target(adapter="tenants/acme/adapters/old", alias="shown"), None),
        ("other", Target(adapter="tenants/acme/adapters/common", alias="shown"), None),
        ("globex", Target(adapter="tenants/acme/adapters/common/", alias="shown"), None),
        ("globex", Target(adapter="acme/common", alias="shown"), None),
        ("acme", Target(adapter="bot", alias="gamma"), None),
        ("acme", Target(adapter="common"), None),
        ("acme", Target(adapter=""), None),
        ("acme", Target(adapter="bot "), None),
        ("acme", Target(revision_id=""), None),
        ("globex", Target(adapter="bot"), None),
        ("globex", Target(revision_id=ACTIVE.revision_id), None),
        ("globex", Target(revision_id=WAITING.revision_id), None),
        ("globex", Target(revision_id=REVOKED.revision_id), None),
    ],
)
def test_resolve(view: CatalogView, tenant: str, target: Target, found: RevisionItem | None) -> None:
    assert resolve(view, tenant, target) == found


def test_the_owner_learns_why_others_learn_nothing() -> None:
    assert inactive(REVOKED, "acme").reason == "REVISION_NOT_ACTIVE"
    assert inactive(REVOKED, "globex").reason == "ADAPTER_NOT_FOUND"


def test_contradictions_are_faults() -> None:
    for target in (Target(revision_id="x", alias="prod"), Target(alias="prod"), Target(adapter="x", base_model="tiny")):
        faults = FaultList()
        check_target(target, faults)
        with pytest.raises(LoraportError, match="INVALID_REQUEST"):
            faults.raise_if_any()


def test_a_record_is_checked_once_and_again_when_the_item_changes(view: CatalogView) -> None:
    refused: list[str] = []
    checker = RecordChecker({KEY.key_id: KEY.public_pem}, on_refused=lambda item, why: refused.append(why))
    assert checker.is_active(view, ACTIVE)
    assert not checker.is_active(view, WAITING)
    assert not refused
    forged = revision("acme", "bot", key=SigningKey.generate())
    for _ in range(3):
        assert not checker.is_active(view, forged)
    assert refused == ["UNTRUSTED"]
    assert checker.is_active(view, ACTIVE)
    assert not checker.is_active(view, dataclasses.replace(ACTIVE, state="REVOKED"))
    assert not checker.is_active(view, revision("acme", "bot", base=sha256_digest(b"other")))
    assert refused[-1] == "the record names another base model"
    assert not checker.is_active(view, dataclasses.replace(ACTIVE, version=2))


def test_the_base_is_only_for_those_who_may_use_it() -> None:
    allowed, denied = TenantItem("acme", 1.0, True), TenantItem("globex", 1.0, False)
    assert resolve_base(allowed, "", ("tiny",)) == "tiny"
    assert resolve_base(allowed, "tiny", ("large", "tiny")) == "tiny"
    for tenant, wanted, served in (
        (denied, "", ("tiny",)),
        (denied, "tiny", ("tiny",)),
        (None, "", ("tiny",)),
        (allowed, "x", ("tiny",)),
        (allowed, "", ()),
    ):
        with pytest.raises(LoraportError, match="ADAPTER_NOT_FOUND"):
            resolve_base(tenant, wanted, served)
    with pytest.raises(LoraportError, match="INVALID_REQUEST"):
        resolve_base(allowed, "", ("large", "tiny"))


def test_list_shows_own_adapters_that_can_be_asked_for(view: CatalogView) -> None:
    listed = list_adapters(view, "acme")
    assert [(adapter.adapter, [alias[0] for alias in adapter.aliases]) for adapter in listed] == [
        ("bot", ["beta", "prod"]),
        ("common", ["shown"]),
        ("draft", ["prod", "shown"]),
        ("old", ["shown"]),
    ]
    assert list_adapters(view, "globex") == []


class Unlisted(dict):
    """A dictionary that nobody walks through."""

    def __iter__(self) -> None:
        raise AssertionError("all of it was looked at")

    values = items = keys = __iter__


def test_a_list_costs_what_its_tenant_has(view: CatalogView) -> None:
    view.apply([revision("globex", f"a{number}") for number in range(3)], epoch=2, synced=True)
    wanted = list_adapters(view, "acme")
    view.revisions, view.aliases = Unlisted(view.revisions), Unlisted(view.aliases)
    assert list_adapters(view, "acme") == wanted
    assert [adapter.adapter for adapter in list_adapters(view, "globex")] == ["a0", "a1", "a2"]
    assert [adapter.adapter for adapter in list_adapters(view, "globex", only="a1")] == ["a1"]
    assert view.active_weights(ACTIVE.weights_digest)
    assert not view.active_weights(sha256_digest(b"unknown"))
    view.apply(
        [AliasItem("acme", "draft", "prod", ""), dataclasses.replace(WAITING, state="REVOKED")], epoch=3, synced=True
    )
    view.apply([AliasItem("acme", "draft", "shown", "")], epoch=4, synced=True)
    assert [a for a in list_adapters(view, "acme") if a.adapter != "draft"] == list_adapters(view, "acme")


def test_weights_are_active_while_one_revision_of_them_is(view: CatalogView) -> None:
    for item in (ACTIVE, SHARED):
        assert view.active_weights(item.weights_digest)
        view.apply([dataclasses.replace(item, state="REVOKED")], epoch=2, synced=True)
    assert not view.active_weights(ACTIVE.weights_digest)
    other = CatalogView()
    other.apply([ACTIVE], epoch=3, synced=True)
    view.replace(other)
    assert view.active_weights(ACTIVE.weights_digest)
    assert [adapter.adapter for adapter in list_adapters(view, "acme")] == ["bot"]
