import pytest

from services.executor.adapter_pool import AdapterPool, Berth, may_keep
from services.executor.eviction import EvictionPolicy, GdsfD, Lru, make_policy
from services.executor.request import RefusalReason, Refused


def make(pages: int = 4, policy: object = None) -> AdapterPool:
    return AdapterPool(pages, page_rows=8, page_bytes=100, policy=policy or Lru())


def load(pool: AdapterPool, key: str, rank: int = 8, now: float = 0.0) -> tuple[int, ...]:
    pages = pool.reserve(key, rank=rank)
    while pages is None:
        dirty = pool.take_dirty()
        assert dirty, "nothing to wait for"
        pool.scrubbed(dirty)
        pages = pool.reserve(key, rank=rank)
    pool.ready(key, now=now, load_ms=1.0)
    pool.check()
    return pages


def test_rank_decides_pages() -> None:
    pool = make()
    assert [pool.pages_for(r) for r in (1, 8, 9, 17)] == [1, 1, 2, 3]
    assert load(pool, "a", rank=17) == (0, 1, 2)
    assert pool.residents()[0].size_bytes == 300


def test_leased_revisions_are_never_evicted() -> None:
    pool = make(2)
    load(pool, "a")
    load(pool, "b")
    held = pool.lease("a", now=1.0)
    load(pool, "c", now=2.0)
    assert pool.state("b") is None
    pool.lease("c", now=3.0)
    assert pool.reserve("d", rank=8) is None
    assert pool.take_dirty() == ()
    pool.release(held)
    assert load(pool, "d") == (0,)
    assert pool.evictions == 2


def test_nobody_is_evicted_in_vain() -> None:
    pool = make(3)
    load(pool, "a", rank=16)
    load(pool, "b")
    pool.lease("a", now=0.0)
    assert pool.reserve("big", rank=24) is None
    assert pool.state("b") is Berth.READY


class Watched(Lru):
    """Counts how often it is asked what a revision is worth."""

    asked = 0

    def worth(self, key: str) -> float:
        self.asked += 1
        return super().worth(key)


def test_making_room_looks_at_each_resident_once_however_many_go_and_not_at_all_while_it_is_in_vain() -> None:
    policy = Watched()
    pool = make(100, policy)
    held = []
    for number in range(100):
        load(pool, f"r{number:02}", now=float(number))
        held.append(pool.lease(f"r{number:02}", now=float(number)))
    for _ in range(50):
        assert pool.reserve("large", rank=8 * 60) is None
    assert policy.asked == 0
    for lease in held:
        pool.release(lease)
    pool.reserve("large", rank=8 * 60)
    assert pool.evictions == 60
    assert {r.revision_id for r in pool.residents()} == {f"r{number}" for number in range(60, 100)}
    assert policy.asked <= 300
    pool.check()


def test_who_holds_less_by_now_loses_no_more_than_others() -> None:
    """Of a tenant that holds too much so many go as are too many; then worth alone decides again."""
    pool = make(12, GdsfD())
    for number in range(10):
        pool.reserve(f"big{number}", rank=8, tenant="big")
        pool.ready(f"big{number}", now=0.0, load_ms=2.0)
        pool.release(pool.lease(f"big{number}", now=100.0 + number))
    for number in range(2):
        pool.reserve(f"other{number}", rank=8, tenant="other")
        pool.ready(f"other{number}", now=0.0, load_ms=1.0)
        pool.release(pool.lease(f"other{number}", now=110.0 + number))
    # Most of 12 pages for one of three: 4 and a quarter of the pool, 7. Big's are worth two, a quarter of that above 7.
    pool.reserve("new", rank=8 * 4, tenant="new")
    gone = {f"big{n}" for n in range(10)} | {"other0", "other1"}
    gone -= {r.revision_id for r in pool.residents()}
    assert gone == {"big0", "big1", "big2", "other0"}


def test_what_lies_beside_the_pages_has_a_budget_of_its_own() -> None:
    pool = AdapterPool(8, page_rows=8, page_bytes=100, policy=Lru(), beside_bytes=1000)

    def bring(key: str, beside: int, rank: int = 8) -> bool:
        for _ in range(2):
            if pool.reserve(key, rank=rank, beside=beside) is not None:
                pool.ready(key, now=0.0, load_ms=1.0)
                pool.check()
                return True
            pool.scrubbed(pool.take_dirty())
        return False

    with pytest.raises(Refused) as large:
        pool.reserve("large", rank=8, beside=1001)
    assert large.value.reason is RefusalReason.ADAPTER_TOO_LARGE
    assert all([bring("plain", 0), bring("a", 600), bring("b", 400)])
    held = pool.lease("a", now=1.0)
    pool.lease("plain", now=0.0)
    assert not bring("waits", 500)
    assert pool.state("b") is Berth.READY, "nobody goes in vain"
    assert bring("c", 300)
    assert pool.state("b") is None, "what has nothing there does not go for it"
    assert pool.state("plain") is Berth.READY
    pool.release(held)
    pool.drain("a")
    assert pool.reserve("d", rank=8, beside=600) is None, "it is there until it is erased"
    pool.scrubbed(pool.take_dirty())
    assert bring("d", 600)
    pool.keep(["c", "d"])
    assert pool.kept() == {"c"}, "half of the budget may be kept"


def test_drain_waits_for_leases_and_frees_with_the_last() -> None:
    pool = make()
    load(pool, "a")
    one, two = pool.lease("a", now=0.0), pool.lease("a", now=0.0)
    assert not pool.drain("a")
    assert pool.lease("a", now=0.0) is None
    assert pool.release(one) is None
    assert pool.release(two) == "a"
    assert pool.take_dirty() == (0,)
    assert pool.drain("a")
    pool.check()


def test_a_lease_is_released_once() -> None:
    pool = make()
    load(pool, "a")
    lease = pool.lease("a", now=0.0)
    pool.release(lease)
    with pytest.raises(ValueError, match="not held"):
        pool.release(lease)


def test_pins_keep_a_revision() -> None:
    pool = make(1)
    load(pool, "a")
    pool.pin("a", pinned=True)
    assert pool.reserve("b", rank=1) is None
    pool.pin("a", pinned=False)
    load(pool, "b")


def test_what_rollouts_need_is_not_evicted_as_far_as_it_fits_half_of_the_pool() -> None:
    pool = make(4)
    for name in "abcd":
        load(pool, name)
    pool.keep(["a", "not here", "b", "c"])
    assert pool.kept() == {"a", "b"}
    assert [r.revision_id for r in pool.residents() if r.pinned] == ["a", "b"]
    load(pool, "e")
    load(pool, "f")
    assert {r.revision_id for r in pool.residents()} == {"a", "b", "e", "f"}
    # Three pages: only two may go, so the newcomer waits and nobody went for nothing.
    before = pool.evictions
    assert pool.reserve("large", rank=3 * pool.page_rows) is None
    assert pool.evictions == before
    pool.keep([])
    assert pool.kept() == frozenset()
    pool.reserve("large", rank=3 * pool.page_rows)
    assert pool.evictions > before


def test_what_rollouts_need_counts_once_while_it_is_loaded_as_afterwards() -> None:
    pool = make(8)
    pool.keep(["a", "b"])
    pool.reserve("a", rank=3 * pool.page_rows)

    def may(key: str, pages: int) -> bool:
        return may_keep(pool.residents(), key, pages=pages, page_count=pool.page_count)

    for _ in range(2):
        assert may("a", 3)
        assert may("b", 1)
        assert not may("b", 2)
        if pool.state("a") is Berth.LOADING:
            pool.ready("a", now=0.0, load_ms=1.0)


def test_what_rollouts_need_and_cannot_be_kept_is_refused_while_it_is_loaded() -> None:
    pool = make(8)
    pool.keep(["b", "a"])
    for key in "ab":
        pool.reserve(key, rank=3 * pool.page_rows)
    pool.ready("b", now=0.0, load_ms=1.0)
    # Who got its pages first stays, whichever is loaded first.
    assert pool.kept() == {"a"}
    assert not may_keep(pool.residents(), "b", pages=3, page_count=8)


def test_what_never_fits_and_what_was_revoked_is_refused() -> None:
    pool = make()
    with pytest.raises(Refused) as big:
        pool.reserve("a", rank=33)
    assert big.value.reason is RefusalReason.ADAPTER_TOO_LARGE
    pool.refuse("bad")
    with pytest.raises(Refused) as bad:
        pool.reserve("bad", rank=1)
    assert bad.value.reason is RefusalReason.REVOKED


def test_abort_and_misuse() -> None:
    pool = make()
    pool.reserve("a", rank=8)
    with pytest.raises(ValueError, match="on the device already"):
        pool.reserve("a", rank=8)
    assert pool.lease("a", now=0.0) is None
    pool.abort("a")
    with pytest.raises(ValueError, match="absent"):
        pool.ready("a", now=0.0, load_ms=0.0)
    pool.scrubbed(pool.take_dirty())
    assert pool.free_pages == 4
    pool.check()


def least(policy: EvictionPolicy, keys: str | set[str]) -> str:
    return min(keys, key=policy.worth)


def test_lru_evicts_the_least_recently_used() -> None:
    policy = Lru()
    for key in "abca":
        policy.used(key, size_bytes=1, cost_ms=1.0)
    assert least(policy, "acb") == "b"
    assert least(policy, "ac") == "c"


@pytest.mark.parametrize("policy", [Lru(remembered=10), GdsfD(remembered=10)])
def test_policies_remember_so_many_the_last_used_of_all(policy: EvictionPolicy) -> None:
    for number in range(100):
        policy.used(str(number), size_bytes=2**20, cost_ms=1.0)
        policy.used("0", size_bytes=2**20, cost_ms=1.0)
    assert [key for key in range(100) if policy.worth(str(key))] == [0, *range(91, 100)]


def test_gdsf_d_weighs_frequency_cost_and_size() -> None:
    policy = GdsfD(half_life=100.0)
    for _ in range(3):
        policy.used("hot", size_bytes=2**20, cost_ms=10.0)
    policy.used("cold", size_bytes=2**20, cost_ms=10.0)
    policy.used("huge", size_bytes=2**23, cost_ms=10.0)
    policy.used("dear", size_bytes=2**20, cost_ms=100.0)
    assert sorted(("hot", "cold", "huge", "dear"), key=policy.worth) == ["huge", "cold", "hot", "dear"]
    policy.forget("dear")
    assert policy.worth("dear") == 0.0


def test_uses_survive_eviction() -> None:
    policy = GdsfD()
    shared = make(1, policy)
    for key in ("often", "often", "often", "once", "often"):
        if shared.state(key) is None:
            load(shared, key)
        shared.release(shared.lease(key, now=0.0))
    assert policy.worth("often") > 3 * policy.worth("once")


def test_old_frequency_fades() -> None:
    policy = GdsfD(half_life=10.0)
    for _ in range(50):
        policy.used("past", size_bytes=2**20, cost_ms=1.0)
    for _ in range(100):
        policy.used("now", size_bytes=2**20, cost_ms=1.0)
    policy.used("past", size_bytes=2**20, cost_ms=1.0)
    assert least(policy, {"past", "now"}) == "past"


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="gdsf-d, lru"):
        make_policy("random")
