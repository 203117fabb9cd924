"""The list of what the log takes back: it has one hash, it only grows, and it takes nothing that is not to be there."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraport.log.leaf import FIRST, Kind, Leaf
from loraport.log.restrictions import FIRST_HEAD, KINDS, Listed, RestrictionError, Restrictions, next_head

DIGEST = "sha256:" + "1" * 64


def leaf(index: int, kind: str = Kind.REVOKED, resource: str = "tenants/acme/adapters/bot/revisions/v1") -> bytes:
    return Leaf(index=index, time=1, kind=kind, resource=resource, digest=DIGEST, previous=FIRST).body()


def listed(bodies: list[bytes]) -> Restrictions:
    made = Restrictions()
    for position, body in enumerate(bodies):
        made.take(position, body)
    return made


@given(st.lists(st.sampled_from(list(Kind)), max_size=12))
def test_a_list_has_the_hash_of_the_log_that_it_is_of(kinds: list[Kind]) -> None:
    log = [leaf(index, kind) for index, kind in enumerate(kinds)]
    made = listed([body for body, kind in zip(log, kinds, strict=True) if kind in KINDS])
    found = Listed()
    for body in log:
        assert made.begins_with(found.count, found.head.hex())
        found = found.grown(body)
    assert made.count == found.count
    assert made.begins_with(found.count, found.head.hex())


@given(st.integers(0, 4), st.integers(0, 10_000))
def test_another_leaf_anywhere_is_another_hash(place: int, time: int) -> None:
    bodies = [leaf(index) for index in range(5)]
    good = listed(bodies)
    bodies[place] = Leaf(
        index=place, time=time + 2, kind=Kind.REVOKED, resource="tenants/acme/adapters/bot/revisions/v1",
        digest=DIGEST, previous=FIRST,
    ).body()  # fmt: skip
    other = listed(bodies)
    assert not other.begins_with(5, good.heads[5].hex())
    assert other.begins_with(place, good.heads[place].hex())
    dropped = listed(bodies[:place] + bodies[place + 1 :])
    assert not dropped.begins_with(5, good.heads[5].hex())


def test_what_came_before_may_come_again_and_nothing_else_may() -> None:
    first, second = leaf(3), leaf(7)
    made = listed([first, second])
    assert made.take(0, first) is None
    before = replace(made, heads=list(made.heads))
    for position, body in (
        (0, second),
        (3, leaf(9)),
        (-1, first),
        (2, leaf(7)),
        (2, leaf(9, Kind.RECORD)),
        (2, leaf(9, "LATER")),
        (2, b"{}"),
        (2, b"\xff" * 5000),
    ):
        with pytest.raises(RestrictionError):
            made.take(position, body)
    assert made == before
    assert not made.begins_with(3, next_head(made.heads[2], leaf(9)).hex()), "it has not come"


def test_it_knows_the_newest_root_that_is_named() -> None:
    made = listed([leaf(0, Kind.TRUST_ROOT, "trustRoots/1"), leaf(4, Kind.TRUST_ROOT, "trustRoots/3")])
    assert made.root_version == 3
    assert listed([leaf(0, Kind.TRUST_ROOT, "trustRoots/x")]).root_version == 0
    assert Restrictions().begins_with(0, FIRST_HEAD.hex())
