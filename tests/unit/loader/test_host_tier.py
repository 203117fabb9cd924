"""The host tier's books, case by case; tests/property/test_loader_tier.py does the rest."""

import pytest

from services.loader.bad_digests import MAX_REMEMBERED, BadDigests
from services.loader.disk_tier import DiskTier
from services.loader.host_tier import HostTier, TierFull

ACME = ("acme",)


def filled(*sizes: int, budget: int = 100, tenants: tuple[str, ...] = ()) -> HostTier:
    """A tier with entries d0, d1, … that nobody holds, of one tenant each."""
    tier = HostTier(budget)
    for number, size in enumerate(sizes):
        tier.reserve(f"t{number}", size, tenants=(tenants or ACME * len(sizes))[number : number + 1])
        tier.commit(f"t{number}", f"d{number}", now=float(number))
        tier.release(f"t{number}")
    tier.check()
    return tier


def test_the_least_recently_used_leaves_first() -> None:
    tier = filled(40, 40)
    tier.lease("d0", "x", holder="a", tenant="acme", now=5.0)
    tier.release("x")
    assert tier.reserve("new", 50, tenants=ACME) == ["d1"]
    assert [entry.digest for entry in tier.entries()] == ["d0"]


def test_no_more_leaves_than_is_needed() -> None:
    assert filled(30, 30, 30).reserve("new", 40, tenants=ACME) == ["d0"]
    assert filled(30, 30).reserve("new", 40, tenants=ACME) == []


def test_what_rollouts_need_leaves_last_but_leaves() -> None:
    assert filled(40, 40).reserve("new", 50, tenants=ACME, last={"d0"}) == ["d1"]
    assert filled(40, 40).reserve("new", 90, tenants=ACME, last={"d0"}) == ["d1", "d0"]


def test_what_rollouts_need_leaves_last_only_as_far_as_it_takes_half() -> None:
    # d1 was used after d0 and fills their half; d0 is as good as anybody else's, and was used before d2.
    assert filled(30, 30, 30).reserve("new", 40, tenants=ACME, last={"d0", "d1"}) == ["d0"]
    assert filled(20, 20, 40).reserve("new", 40, tenants=ACME, last={"d0", "d1"}) == ["d2"]


def test_whoever_has_most_makes_room_the_one_that_asks_included() -> None:
    tenants = ("globex", "acme", "acme")
    assert filled(30, 30, 30, tenants=tenants).reserve("new", 30, tenants=ACME) == ["d1"]
    assert filled(30, 30, 30, tenants=tenants).reserve("new", 30, tenants=("initech",)) == ["d1"]


def test_what_two_use_is_kept_for_the_one_that_has_least() -> None:
    tier = filled(20, 60, tenants=("acme", "acme"))
    tier.lease("d0", "x", holder="a", tenant="globex", now=5.0)
    tier.release("x")
    assert tier.reserve("new", 30, tenants=ACME) == ["d1"]
    tier.cancel("new")
    assert tier.reserve("one", 30, tenants=ACME) == []
    with pytest.raises(TierFull):
        tier.reserve("two", 60, tenants=ACME)
    # Nothing else is under way: one newcomer, whatever its size, gets in.
    tier.cancel("one")
    assert tier.reserve("two", 90, tenants=ACME) == ["d0"]


def test_what_nobody_knows_the_tenants_of_leaves_first() -> None:
    disk = DiskTier(100)
    assert disk.adopt([("old", 40), ("older", 40)]) == []
    assert disk.use("old", tenants=ACME)
    assert disk.admit("new", 30, tenants=("globex",)) == ["older"]


def test_one_tenant_has_all_under_way_only_while_there_is_no_other() -> None:
    tier = HostTier(100)
    tier.reserve("t0", 60, tenants=ACME)
    tier.reserve("t1", 40, tenants=ACME)
    with pytest.raises(TierFull):
        tier.reserve("other", 30, tenants=("globex",))
    tier.cancel("t1")
    with pytest.raises(TierFull):
        tier.reserve("t2", 11, tenants=ACME)
    assert tier.reserve("t3", 10, tenants=ACME) == []
    assert tier.reserve("other", 30, tenants=("globex",)) == []
    tier.cancel("other")
    tier.cancel("t3")
    assert tier.reserve("t2", 40, tenants=ACME) == []
    # Who found no room is forgotten after a while.
    with pytest.raises(TierFull):
        tier.reserve("other", 30, tenants=("globex",))
    tier.cancel("t2")
    tier.expire(now=0.0, idle_s=1.0)
    assert tier.reserve("t2", 40, tenants=ACME) == []


def test_who_is_refused_for_what_it_has_under_way_keeps_no_room_from_others() -> None:
    tier = HostTier(100)
    tier.reserve("t0", 10, tenants=ACME)
    tier.reserve("other", 20, tenants=("globex",))
    with pytest.raises(TierFull):
        tier.reserve("t1", 90, tenants=ACME)
    assert tier.reserve("more", 45, tenants=("globex",)) == []


def test_who_found_no_room_with_nothing_under_way_finds_up_to_half_next_time() -> None:
    tier = HostTier(100)
    tier.reserve("t0", 30, tenants=ACME)
    tier.reserve("t1", 40, tenants=ACME)
    with pytest.raises(TierFull):
        tier.reserve("other", 50, tenants=("globex",))
    tier.cancel("t1")
    with pytest.raises(TierFull):
        tier.reserve("t2", 40, tenants=ACME)  # 70 of 75, but half is wanted
    assert tier.reserve("other", 50, tenants=("globex",)) == []


def test_a_full_tier_gives_nothing_up() -> None:
    tier = filled(40, 40)
    tier.lease("d0", "x", holder="a", tenant="acme", now=5.0)
    with pytest.raises(TierFull):
        tier.reserve("new", 70, tenants=ACME)
    assert [entry.digest for entry in tier.entries()] == ["d0", "d1"]
    tier.check()


def test_a_commit_is_pinned_until_its_token_is_released() -> None:
    tier = HostTier(100)
    tier.reserve("t", 60, tenants=ACME)
    tier.commit("t", "d", now=0.0)
    assert next(tier.entries()).holders == 0
    with pytest.raises(TierFull):
        tier.reserve("other", 60, tenants=ACME)
    tier.lease("d", "x", holder="a", tenant="acme", now=0.0)
    tier.release("t")
    assert next(tier.entries()).holders == 1
    # The pin is nobody's, so it never expires.
    assert tier.expire(now=1e9, idle_s=1.0) == (["x"], [])


def test_pins_are_nobodys_leases() -> None:
    tier = HostTier(100)
    tier.reserve("t", 60, tenants=ACME)
    tier.commit("t", "d", now=0.0)
    tier.lease("d", "disk", holder="", tenant="acme", now=0.0)
    tier.lease("d", "x", holder="a", tenant="acme", now=0.0)
    assert next(tier.entries()).holders == 1
    tier.release("t")
    assert next(tier.entries()).holders == 1
    assert tier.expire(now=1e9, idle_s=1.0) == (["x"], [])
    with pytest.raises(TierFull):
        tier.reserve("other", 60, tenants=ACME)
    tier.release("disk")
    assert next(tier.entries()).holders == 0
    assert tier.reserve("other", 60, tenants=ACME) == ["d"]


def test_doomed_entries_leave_with_their_last_lease_unless_revived() -> None:
    tier = filled(10, 10)
    tier.lease("d0", "x", holder="a", tenant="acme", now=0.0)
    assert tier.doom("d0") == []
    assert tier.find("d0") is None
    with pytest.raises(ValueError, match="lease"):
        tier.lease("d0", "y", holder="a", tenant="acme", now=0.0)
    tier.revive("d0")
    tier.lease("d0", "y", holder="a", tenant="acme", now=0.0)
    tier.doom("d0")
    assert tier.release("x") == []
    assert tier.release("y") == ["d0"]
    assert tier.doom("d1") == ["d1"]
    assert tier.doom("unknown") == []
    tier.check()


def test_leases_expire_when_they_are_not_used() -> None:
    tier = filled(10)
    tier.lease("d0", "x", holder="a", tenant="acme", now=0.0)
    tier.lease("d0", "y", holder="a", tenant="acme", now=0.0)
    assert tier.use("x", holder="a", now=8.0) is not None
    assert tier.use("x", holder="b", now=9.0) is None
    assert tier.expire(now=11.0, idle_s=10.0) == (["y"], [])
    assert tier.release("y") == []


def test_misuse_is_refused() -> None:
    tier = filled(10)
    with pytest.raises(ValueError, match="size"):
        tier.reserve("t", 0, tenants=ACME)
    tier.reserve("t", 5, tenants=ACME)
    with pytest.raises(ValueError, match="token"):
        tier.reserve("t", 5, tenants=ACME)
    with pytest.raises(ValueError, match="committed"):
        tier.commit("t", "d0", now=0.0)
    tier.cancel("t")
    tier.cancel("t")
    assert tier.used_bytes == 10


def test_bad_digests_are_remembered_for_a_while_and_not_without_bound() -> None:
    bad = BadDigests(10.0)
    bad.add("d", "why", now=0.0)
    assert bad.find("d", now=9.9) == "why"
    assert bad.find("d", now=10.0) is None
    for number in range(MAX_REMEMBERED + 1):
        bad.add(f"d{number}", "why", now=0.0)
    assert bad.find("d0", now=1.0) is None
    assert bad.find(f"d{MAX_REMEMBERED}", now=1.0) == "why"
