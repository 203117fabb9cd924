"""Whose revisions leave the device: floors and caps of tenants."""

from services.executor.adapter_pool import AdapterPool, Berth
from services.executor.eviction import make_policy


def pool(pages: int = 8) -> AdapterPool:
    return AdapterPool(pages, page_rows=8, page_bytes=1, policy=make_policy("gdsf-d"))


def use(pool: AdapterPool, tenant: str, name: str, *, now: float, rank: int = 8) -> bool:
    """Brings a revision and uses it once; False when there is no room."""
    key = f"{tenant}/{name}"
    if pool.state(key) is None:
        if pool.reserve(key, rank=rank, tenant=tenant) is None:
            pool.scrubbed(pool.take_dirty())
            if pool.reserve(key, rank=rank, tenant=tenant) is None:
                return False
        pool.ready(key, now=now, load_ms=10.0)
    pool.release(pool.lease(key, now=now))
    return True


def here(pool: AdapterPool, key: str) -> bool:
    return pool.state(key) is Berth.READY


def test_churn_does_not_take_the_last_revision_of_an_active_tenant() -> None:
    shared = pool()
    for tenant in ("a", "b", "c"):
        use(shared, tenant, "only", now=0.0)
    for number in range(200):
        assert use(shared, "churn", str(number), now=1.0 + number / 100)
    assert all(here(shared, f"{tenant}/only") for tenant in "abc")


def test_a_tenant_that_has_left_keeps_nothing() -> None:
    shared = pool()
    use(shared, "gone", "only", now=0.0)
    for number in range(40):
        use(shared, "busy", str(number), now=100.0 + number)
    assert not here(shared, "gone/only")


def test_who_has_more_than_its_part_gives_way_first_to_what_was_evicted_a_moment_ago() -> None:
    shared = pool()
    for _ in range(50):
        for number in range(7):
            use(shared, "big", str(number), now=0.0)
    use(shared, "small", "0", now=1.0)
    # Each revision of `big` is worth far more, so the first newcomer takes the room of its own tenant's.
    use(shared, "small", "1", now=2.0)
    assert not here(shared, "small/0")
    # It comes back: 7 of 8 pages are more than half and a quarter.
    use(shared, "small", "0", now=3.0)
    assert here(shared, "small/0")
    assert here(shared, "small/1")


def test_what_comes_back_late_is_a_newcomer() -> None:
    shared = pool()
    for number in range(7):
        for _ in range(50):
            use(shared, "big", str(number), now=0.0)
    use(shared, "small", "0", now=1.0)
    use(shared, "small", "1", now=2.0)
    use(shared, "big", "0", now=40.0)
    use(shared, "small", "0", now=40.0)
    assert not here(shared, "small/1")


def test_who_has_more_than_its_part_loses_a_little_more_than_who_has_not() -> None:
    for uses, stays in ((3, False), (5, True)):
        shared = pool(5)
        for number in range(3):
            for _ in range(uses):
                use(shared, "big", str(number), now=0.0)
        use(shared, "small", "0", now=1.0)
        use(shared, "small", "1", now=1.5)
        use(shared, "other", "0", now=2.0)
        assert here(shared, "small/0") is not stays
        assert all(here(shared, f"big/{number}") for number in range(3)) is stays


def test_a_tenant_whose_revisions_are_popular_keeps_them_from_what_passes_once() -> None:
    shared = pool()
    for number in range(60):
        for _ in range(10):
            for hot in range(4):
                use(shared, "popular", str(hot), now=number / 10)
        use(shared, f"t{number % 12}", f"once-{number}", now=number / 10)
    # Four of eight are more than an equal part of thirteen and a quarter, and yet nobody is served better without.
    assert shared.loads == 4 + 60


def test_with_too_many_tenants_worth_alone_decides() -> None:
    shared = pool(4)
    for tenant in ("a", "b", "c"):
        for _ in range(10):
            use(shared, tenant, "only", now=0.0)
    use(shared, "d", "once", now=0.0)
    use(shared, "e", "new", now=1.0)
    assert not here(shared, "d/once")
    assert all(here(shared, f"{tenant}/only") for tenant in "abc")


def test_floors_hold_against_a_tenant_that_has_its_part_in_use() -> None:
    shared = pool(8)
    for number in range(4):
        use(shared, f"t{number}", "only", now=float(number))
    assert shared.reserve("big/0", rank=4 * shared.page_rows, tenant="big") is not None
    shared.ready("big/0", now=5.0, load_ms=5.0)
    lease = shared.lease("big/0", now=5.0)
    # It waits for its own, and everybody else keeps what was used last.
    assert shared.reserve("big/1", rank=4 * shared.page_rows, tenant="big") is None
    assert all(here(shared, f"t{number}/only") for number in range(4))
    # A tenant that has little does not: the longest unused floor gives way.
    assert use(shared, "fifth", "only", now=6.0)
    assert not here(shared, "t0/only")
    shared.release(lease)
    assert shared.reserve("big/1", rank=4 * shared.page_rows, tenant="big") is None
    shared.scrubbed(shared.take_dirty())
    assert shared.reserve("big/1", rank=4 * shared.page_rows, tenant="big") is not None


def test_floors_beside_what_rollouts_keep_leave_room_for_a_newcomer() -> None:
    shared = pool(32)
    shared.keep([f"roll/{number}" for number in range(4)])
    for number in range(4):
        use(shared, "roll", str(number), now=0.0, rank=32)
    for number in range(4):
        use(shared, f"t{number}", "only", now=100.0 + number, rank=32)
    assert use(shared, "fifth", "only", now=105.0, rank=32)
    # The floor that was not used for longest gave way, and no other.
    assert not here(shared, "t0/only")
    assert all(here(shared, f"t{number}/only") for number in range(1, 4))
    assert all(here(shared, f"roll/{number}") for number in range(4))


def test_a_revision_that_needs_most_of_the_pool_is_not_kept_out_by_floors() -> None:
    shared = pool()
    for tenant in ("a", "b"):
        use(shared, tenant, "only", now=0.0)
    assert use(shared, "large", "one", now=1.0, rank=64)


def test_what_was_brought_and_not_used_yet_stays_for_two_loads_time() -> None:
    shared = pool(2)
    use(shared, "t", "old", now=0.0)
    shared.reserve("t/new", rank=8, tenant="t")
    shared.ready("t/new", now=1.0, load_ms=1000.0)
    for _ in range(5):
        use(shared, "t", "old", now=1.0)
    assert use(shared, "t", "other", now=1.5)
    assert here(shared, "t/new")
    assert not here(shared, "t/old")


def test_loads_of_what_was_just_evicted_are_counted() -> None:
    shared = pool(1)
    for now, name in enumerate(("x", "y", "x")):
        use(shared, "t", name, now=float(now))
    assert (shared.loads, shared.thrashes) == (3, 1)
    use(shared, "t", "y", now=60.0)
    use(shared, "t", "x", now=120.0)
    assert shared.thrashes == 2
