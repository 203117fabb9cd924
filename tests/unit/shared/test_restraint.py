"""A catalog shows nothing that its own list of restrictions rules out, in whatever order it is told."""

import itertools
from dataclasses import replace

import pytest

from loraport.log.leaf import Kind
from loraport.log.replay import shared_digest
from loraport.log.restrictions import RestrictionError
from services.shared.catalog import CatalogView, RestrictionItem, RevisionItem
from services.shared.restraint import Restraint, _digest
from tests.support.translog import FakeLog
from tests.unit.shared.test_catalog import ITEM
from tests.unit.shared.test_catalog import KEY as SIGNER

NAME = "tenants/acme/adapters/bot"


def restriction(kind: Kind, *, version: int = 3, shared: tuple[str, ...] = (), position: int = 0) -> RestrictionItem:
    log = FakeLog(SIGNER, size=position)
    name = NAME if kind is Kind.SHARED else f"{NAME}/revisions/v{version}"
    return RestrictionItem(position, log.restrict(kind, name, shared_digest(shared)))


def shown(view: CatalogView) -> RevisionItem:
    return view.revisions[ITEM.revision_id]


@pytest.mark.parametrize("kind", [Kind.REVOKED, Kind.QUARANTINED])
def test_a_revision_that_ended_is_not_shown_active_whatever_is_told(kind: Kind) -> None:
    for record_leaf in (0, 10**6):
        told = [restriction(kind), replace(ITEM, record_leaf=record_leaf)]
        for order in itertools.permutations(told):
            view = CatalogView()
            view.apply(order, epoch=1, synced=True)
            assert shown(view).state == kind
            assert len(view.contradictions) == 1


def test_what_ends_is_gone_at_once_and_once_and_is_no_contradiction() -> None:
    view = CatalogView()
    view.apply([ITEM], epoch=1, synced=True)
    [gone] = view.apply([restriction(Kind.REVOKED), replace(ITEM, state="REVOKED")], epoch=2, synced=True)
    assert (gone.revision_id, gone.state, view.contradictions) == (ITEM.revision_id, "REVOKED", [])
    assert view.apply([ITEM], epoch=3, synced=True) == []
    assert (shown(view).state, len(view.contradictions)) == ("REVOKED", 1)


def test_other_versions_and_adapters_go_on() -> None:
    view = CatalogView()
    other = replace(ITEM, revision_id="sha256:" + "9" * 64, adapter="other")
    view.apply([ITEM, other], epoch=1, synced=True)
    assert view.apply([restriction(Kind.REVOKED, version=4)], epoch=2, synced=True) == []
    assert view.apply([restriction(Kind.QUARANTINED, position=1)], epoch=3, synced=True) == [
        replace(ITEM, state="QUARANTINED")
    ]
    assert view.revisions[other.revision_id] == other


def test_an_adapter_is_shared_with_those_that_the_log_names_and_nobody_else() -> None:
    view = CatalogView()
    theirs = replace(ITEM, shared_tenants=frozenset({"globex"}))
    view.apply([theirs], epoch=1, synced=True)
    assert (shown(view), len(view.contradictions)) == (ITEM, 1), "the owner goes on"
    view.contradictions.clear()
    view.apply([restriction(Kind.SHARED, shared=("globex",)), theirs], epoch=2, synced=True)
    assert (shown(view), view.contradictions) == (theirs, [])
    view.apply([replace(ITEM, shared_tenants=frozenset({"globex", "mallory"}))], epoch=3, synced=True)
    assert (shown(view), len(view.contradictions)) == (ITEM, 1)
    view.apply([theirs], epoch=4, synced=True)
    view.contradictions.clear()
    view.apply([restriction(Kind.SHARED, position=1), ITEM], epoch=5, synced=True)
    view.apply([theirs], epoch=6, synced=True)
    assert (shown(view), len(view.contradictions)) == (ITEM, 1), "what was taken back does not come back"


def test_parts_of_a_state_that_is_not_complete_are_of_different_moments() -> None:
    view, theirs = CatalogView(), replace(ITEM, shared_tenants=frozenset({"globex"}))
    view.apply([theirs], epoch=1, synced=False)
    view.apply([restriction(Kind.SHARED, shared=("globex",))], epoch=2, synced=True)
    assert (shown(view), view.contradictions) == (theirs, [])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Kind.REVOKED, NAME),
        (Kind.SHARED, f"{NAME}/revisions/v1"),
        (Kind.QUARANTINED, f"{NAME}/revisions/vx"),
        (Kind.REVOKED, f"{NAME}/revisions/v{'9' * 17}"),
        (Kind.REVOKED, f"{NAME}/revisions/v0"),
        (Kind.REVOKED, ""),
    ],
)
def test_a_restriction_of_nothing_is_none(kind: Kind, name: str) -> None:
    with pytest.raises(RestrictionError):
        Restraint().take(0, FakeLog(SIGNER).restrict(kind, name))


def test_a_part_with_a_restriction_that_does_not_follow_takes_nothing_out_unheard() -> None:
    view = CatalogView()
    view.apply([ITEM], epoch=1, synced=True)
    gap = replace(restriction(Kind.REVOKED), position=5)
    with pytest.raises(RestrictionError):
        view.apply([restriction(Kind.REVOKED), gap, replace(ITEM, state="REVOKED")], epoch=2, synced=True)
    other = CatalogView()
    other.apply([restriction(Kind.REVOKED), replace(ITEM, state="REVOKED")], epoch=2, synced=True)
    assert view.replace(other) == [ITEM], "whoever holds it is told to let it go"


class Counted(dict[str, RevisionItem]):
    """Counts how often a revision is looked up."""

    looked = 0

    def __getitem__(self, key: str) -> RevisionItem:
        self.looked += 1
        return super().__getitem__(key)


def test_what_a_restriction_costs_goes_by_the_adapter_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[object] = []
    _digest.cache_clear()
    monkeypatch.setattr("services.shared.restraint.shared_digest", lambda who: hashed.append(who) or shared_digest(who))
    view, log, who = CatalogView(), FakeLog(SIGNER), frozenset({"globex", "initech"})
    items = [
        replace(
            ITEM, revision_id=f"sha256:{n:064x}", adapter="bot" if n <= 50 else f"a{n}", version=n, shared_tenants=who
        )
        for n in range(1, 201)
    ]
    shares = [
        log.restrict(Kind.SHARED, f"tenants/acme/adapters/{name}", shared_digest(who))
        for name in {i.adapter for i in items}
    ]
    told = [RestrictionItem(place, body) for place, body in enumerate(shares)]
    view.apply([*told, *items], epoch=1, synced=True)
    assert (view.contradictions, len(hashed)) == ([], 1), "one digest for all that are shared with the same tenants"
    view.revisions = counted = Counted(view.revisions)
    ends = [log.restrict(Kind.REVOKED, f"{NAME}/revisions/v{n}") for n in range(1, 51)]
    gone = view.apply([RestrictionItem(len(told) + n, body) for n, body in enumerate(ends)], epoch=2, synced=True)
    assert ({item.version for item in gone}, counted.looked) == (set(range(1, 51)), 50)


def test_a_revision_that_is_named_otherwise_is_found_where_it_is_then() -> None:
    view = CatalogView()
    view.apply([ITEM], epoch=1, synced=True)
    view.apply([replace(ITEM, adapter="other")], epoch=2, synced=True)
    assert view.apply([restriction(Kind.REVOKED)], epoch=3, synced=True) == []
    assert [item.adapter for item in view.revisions_of("acme")] == ["other"]
    assert shown(view).state == "ACTIVE"


def test_of_many_contradictions_the_first_are_told_and_the_rest_counted() -> None:
    view, log = CatalogView(), FakeLog(SIGNER)
    ends = [RestrictionItem(n - 1, log.restrict(Kind.REVOKED, f"{NAME}/revisions/v{n}")) for n in range(1, 31)]
    items = [replace(ITEM, revision_id=f"sha256:{n:064x}", version=n) for n in range(1, 31)]
    view.apply([*ends, *items], epoch=1, synced=True)
    assert (view.contradicted, len(view.contradictions)) == (30, 10)
    assert {item.state for item in view.revisions.values()} == {"REVOKED"}
