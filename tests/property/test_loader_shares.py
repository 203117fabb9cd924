"""Who makes room for whom: a tenant keeps its part, can always use it, and pays for itself first."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from services.loader.disk_tier import DiskTier
from services.loader.host_tier import HostTier, TierFull
from services.loader.shares import PUSHED_PART, Held, charges, victims

TENANTS = "abcd"
NAMES = st.sampled_from(TENANTS)
SOME = st.frozensets(NAMES, min_size=1)
ONE = NAMES.map(lambda name: frozenset({name}))
NEAR = 1e-6  # charges of what several use are fractions


def tiers(tenants: st.SearchStrategy[frozenset[str]], free: st.SearchStrategy[bool]) -> st.SearchStrategy[list[Held]]:
    """What may lie in a tier, the least recently used first."""
    entry = st.builds(Held, st.just(""), st.integers(1, 40), tenants, free, st.booleans())
    return st.lists(entry, max_size=12).map(
        lambda held: [replace(entry, digest=f"d{number}") for number, entry in enumerate(held)]
    )


def used(held: Sequence[Held]) -> int:
    return sum(entry.size_bytes for entry in held)


def share_out(held: Sequence[Held], size: int, askers: frozenset[str]) -> dict[str, float]:
    """What each tenant has, with the newcomer."""
    return charges([*((entry.size_bytes, entry.tenants) for entry in held), (size, askers)])


@given(tiers(SOME | st.just(frozenset()), st.booleans()), SOME, st.integers(1, 120), st.integers(0, 60), st.data())
def test_what_leaves_is_free_needed_and_leaves_by_the_rules(
    held: list[Held], askers: frozenset[str], size: int, slack: int, data: st.DataObject
) -> None:
    budget, under_way = used(held) + slack, data.draw(st.integers(0, 60))
    pushes = not under_way or (under_way + size) * PUSHED_PART <= budget
    leaving = victims(held, size, askers=askers, budget_bytes=budget, under_way=under_way)
    free = [entry for entry in held if entry.free]
    if leaving is None:
        assert not pushes or used(free) + slack < size
        return
    assert len(set(leaving)) == len(leaving)
    assert set(leaving) <= {entry.digest for entry in free}
    by_digest = {entry.digest: entry for entry in held}
    gone = [by_digest[digest] for digest in leaving]
    assert used(gone) + slack >= size
    assert not gone or used(gone[:-1]) + slack < size

    part = budget / len(share_out(held, size, askers))
    left = list(held)
    for victim in gone:
        charge = share_out(left, size, askers)

        def by_rule(entry: Held, charge: dict[str, float] = charge) -> bool:
            return entry.tenants <= askers or min(charge[tenant] for tenant in entry.tenants) > part + NEAR

        if victim.tenants and not victim.tenants <= askers and min(charge[t] for t in victim.tenants) < part - NEAR:
            assert pushes
            assert not [entry for entry in left if entry.free and by_rule(entry)]
        # Of what the same tenants use, what rollouts need leaves last, and the least recently used first.
        alike = [entry for entry in left if entry.free and entry.tenants == victim.tenants]
        assert victim == min(alike, key=lambda entry: entry.last)
        left.remove(victim)


@given(tiers(ONE, st.just(True)), NAMES, st.integers(1, 60), st.integers(0, 60))
def test_whoever_stays_within_its_part_finds_room_and_takes_no_part_of_anybody(
    held: list[Held], asker: str, size: int, slack: int
) -> None:
    budget = used(held) + slack
    charge = share_out(held, size, frozenset({asker}))
    part = budget / len(charge)
    assume(charge[asker] <= part)
    leaving = victims(held, size, askers=frozenset({asker}), budget_bytes=budget, under_way=budget)
    assert leaving is not None, "rule 2 is enough, whatever else is under way"
    left = list(held)
    for digest in leaving:
        victim = next(entry for entry in left if entry.digest == digest)
        # Its own may leave before what a rollout of somebody else's needs.
        assert charge[min(victim.tenants)] > part - NEAR or victim.tenants == {asker}
        left.remove(victim)
        charge = share_out(left, size, frozenset({asker}))


@given(st.lists(st.integers(1, 33), min_size=1, max_size=30))
def test_a_tenant_that_goes_round_within_its_part_pushes_out_nobody(sizes: list[int]) -> None:
    tier, disk = HostTier(100), DiskTier(100)
    for tenant in "bc":
        for number in range(3):
            tier.reserve("load", 11, tenants=(tenant,))
            tier.commit("load", f"{tenant}{number}", now=0.0)
            tier.release("load")
            assert disk.admit(f"{tenant}{number}", 11, tenants=(tenant,)) == []
    for number, size in enumerate(sizes):
        tier.reserve("load", size, tenants="a")
        tier.commit("load", f"a{number}", now=0.0)
        tier.release("load")
        tier.check()
        assert disk.admit(f"a{number}", size, tenants="a") is not None
        disk.check()
    kept = {f"{tenant}{number}" for tenant in "bc" for number in range(3)}
    assert kept <= {entry.digest for entry in tier.entries()}
    assert kept <= set(disk.digests())


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=30))
def test_a_tenant_that_holds_what_it_can_leaves_room_for_another(loads: list[tuple[int, bool]]) -> None:
    """The other has something there, so a quarter of the budget, or all but one load, is not the first one's to hold."""
    tier = HostTier(100)
    tier.reserve("other", 1, tenants="b")
    tier.commit("other", "b", now=0.0)
    tier.release("other")
    held = 0
    for number, (size, commits) in enumerate(loads):
        try:
            tier.reserve(f"load{number}", size, tenants="a")
        except TierFull:
            continue
        assert held == 0 or held + size <= 75
        held += size
        if commits:  # and an executor keeps its lease
            tier.commit(f"load{number}", f"a{number}", now=0.0)
    tier.check()
    if held < 100:
        tier.reserve("other", 100 - held, tenants="b")
