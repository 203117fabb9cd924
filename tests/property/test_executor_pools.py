"""Random lives of revisions in the adapter pool."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.adapter_pool import AdapterPool, Berth
from services.executor.eviction import make_policy
from services.executor.request import Refused
from services.shared.residency import SPARE

KEYS = [f"sha256:{i}" for i in range(6)]
actions = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.sampled_from(KEYS), st.integers(1, 40)),
        st.tuples(st.just("settle"), st.sampled_from(KEYS), st.integers(0, 3)),
        st.tuples(st.just("lease"), st.sampled_from(KEYS), st.just(0)),
        st.tuples(st.just("release"), st.just(""), st.integers(0, 50)),
        st.tuples(st.just("drain"), st.sampled_from(KEYS), st.just(0)),
        st.tuples(st.just("pin"), st.sampled_from(KEYS), st.integers(0, 1)),
        st.tuples(st.just("keep"), st.sampled_from(KEYS), st.integers(0, 5)),
        st.tuples(st.just("scrub"), st.just(""), st.just(0)),
        st.tuples(st.just("refuse"), st.sampled_from(KEYS[:1]), st.just(0)),
    ),
    max_size=80,
)


class Story:
    """One pool, and who was promised which pages."""

    def __init__(self, policy: str) -> None:
        self.pool = AdapterPool(6, page_rows=8, page_bytes=10, policy=make_policy(policy))
        self.leases: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.now = 0.0

    def load(self, key: str, rank: int) -> None:
        if self.pool.state(key) is not None:
            return
        kept = self.pool.kept()
        try:
            pages = self.pool.reserve(key, rank=rank)
        except Refused:
            return
        assert pages is None or len(pages) == self.pool.pages_for(rank)
        # What rollouts keep makes room for nobody, and takes no more than half of the pool.
        assert kept <= {r.revision_id for r in self.pool.residents()}
        assert sum(len(self.pool.pages(name)) for name in kept) <= 3

    def settle(self, key: str, good: int) -> None:
        if self.pool.state(key) is Berth.LOADING:
            if good:
                self.pool.ready(key, now=self.now, load_ms=5.0)
            else:
                self.pool.abort(key)

    def lease(self, key: str, _: int) -> None:
        lease = self.pool.lease(key, now=self.now)
        assert (lease is not None) == (self.pool.state(key) is Berth.READY)
        if lease is not None:
            self.leases[lease] = (key, self.pool.pages(key))

    def release(self, _: str, number: int) -> None:
        if self.leases:
            lease = sorted(self.leases)[number % len(self.leases)]
            del self.leases[lease]
            self.pool.release(lease)

    def drain(self, key: str, _: int) -> None:
        assert self.pool.drain(key) == (self.pool.state(key) is None)

    def pin(self, key: str, pinned: int) -> None:
        if self.pool.state(key) is not None:
            self.pool.pin(key, pinned=bool(pinned))

    def keep(self, key: str, more: int) -> None:
        first = KEYS.index(key)
        self.pool.keep(KEYS[first : first + more])

    def scrub(self, _: str, __: int) -> None:
        self.pool.scrubbed(self.pool.take_dirty())

    def refuse(self, key: str, _: int) -> None:
        self.pool.refuse(key)


@settings(max_examples=200)
@given(actions, st.sampled_from(["lru", "gdsf-d"]))
def test_leased_pages_never_change_owner_and_no_page_is_lost(steps, policy) -> None:
    story = Story(policy)
    for name, key, number in steps:
        story.now += 1
        getattr(story, name)(key, number)
        story.pool.check()
        for held, pages in story.leases.values():
            assert story.pool.pages(held) == pages
    for lease in story.leases:
        story.pool.release(lease)
    for key in KEYS:
        assert story.pool.drain(key)
    story.scrub("", 0)
    story.pool.check()
    assert story.pool.free_pages == 6
    assert story.pool.residents() == ()


residents = st.lists(
    # Tenant, rank, and whether it is leased, kept by a rollout, loading still.
    st.tuples(st.integers(0, 5), st.integers(1, 64), st.sampled_from(["idle", "idle", "leased", "kept", "loading"])),
    max_size=12,
)


@settings(max_examples=300)
@given(residents, st.integers(1, 256), st.integers(0, 6), st.sampled_from(["lru", "gdsf-d"]), st.booleans())
def test_a_newcomer_that_fits_beside_what_cannot_go_gets_room(held, rank, tenant, policy, returns) -> None:
    pool = AdapterPool(32, page_rows=8, page_bytes=10, policy=make_policy(policy))
    newcomer = "new"
    if returns:
        # It was here, and left for something else a moment ago.
        for key in (newcomer, "whole"):
            while pool.reserve(key, rank=rank if key == newcomer else 256, tenant="other") is None:
                pool.scrubbed(pool.take_dirty())
            pool.ready(key, now=0.0, load_ms=5.0)
        pool.drain("whole")
        pool.scrubbed(pool.take_dirty())
    kept, before, active = [], [], set()
    for number, (owner, wide, fate) in enumerate(held):
        key = f"r{number}"
        if pool.free_pages < pool.pages_for(wide):
            continue
        pool.reserve(key, rank=wide, tenant=f"t{owner}")
        before.append((owner, pool.pages_for(wide)))
        if fate == "loading":
            continue
        active.add(owner)
        pool.ready(key, now=float(number), load_ms=5.0)
        lease = pool.lease(key, now=float(number))
        if fate != "leased":
            pool.release(lease)
        kept += [key] if fate == "kept" else []
    pool.keep(kept)
    stuck = {r.revision_id for r in pool.residents() if r.leases or r.pinned or r.state is Berth.LOADING}
    fits = pool.pages_for(rank) + sum(len(pool.pages(key)) for key in stuck) <= pool.page_count
    pages = pool.reserve(newcomer, rank=rank, tenant=f"t{tenant}")
    if pages is None:
        pool.scrubbed(pool.take_dirty())
        pages = pool.reserve(newcomer, rank=rank, tenant=f"t{tenant}")
    assert fits or pages is None
    # A tenant that would have more than its part may have to wait: where others have floors.
    own = pool.pages_for(rank) + sum(count for owner, count in before if owner == tenant)
    part = pool.page_count / len({tenant, *active}) + pool.page_count // SPARE
    if own <= part or all(owner == tenant for owner, _ in before):
        assert (pages is not None) == fits
    assert stuck <= {r.revision_id for r in pool.residents()}
    pool.check()
