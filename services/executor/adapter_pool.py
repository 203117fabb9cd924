"""Accounting of the rank-paged adapter pool: which revision owns which pages, and who may still use them.

A page holds `page_rows` rank rows of every target module of every layer; a revision of rank r owns
ceil(r / page_rows) pages. The device side (engine/device_pool.py) holds the numbers, this file holds the rules.

A revision is LOADING (pages reserved, being written), READY (may be leased) or DRAINING (no new leases; its pages go
when the last lease ends). Pages that lost their owner are *dirty* until the device has scrubbed them. What a revision
has beside its pages (an embedding) has a budget of its own and goes with its first page.

Invariants, kept by `check()`:
 1. Every page is in exactly one of: clean, dirty, owned by one revision.
 2. A page owned by a leased revision never changes owner.
 3. Only READY and DRAINING revisions have leases; a DRAINING one has at least one.
 4. Lease ids are unique, and each is released exactly once.

What rollouts need (`keep`) is never evicted, as far as it fits a part of the pool.

When a newcomer needs room, unleased revisions go in the order that eviction.py says: by worth, which is less for those
of tenants that hold much. One that was loaded and not used yet stays for two loads, if anything else may go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush

from services.executor.eviction import EvictionPolicy, Holding, Offer, Shares
from services.executor.request import RefusalReason, Refused

# Of all pages, one in so many may be kept by rollouts: the rest must do for everybody else.
KEPT_PART = 2


class Berth(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class _Resident:
    pages: tuple[int, ...]
    rank: int
    cost_ms: float
    tenant: str = ""
    beside: int = 0
    state: Berth = Berth.LOADING
    leases: set[int] = field(default_factory=set)
    pinned: bool = False
    loaded_at: float = 0.0
    used_at: float = 0.0
    used: bool = False


def may_keep(residents: Iterable[Residency], revision_id: str, *, pages: int, page_count: int) -> bool:
    """Return whether rollouts may keep a revision of so many pages: it is kept, or will be when it is loaded, or there
    is room in their part."""
    known = {r.revision_id: r for r in residents}
    if revision_id in known:
        return known[revision_id].pinned
    return pages + sum(len(r.pages) for r in known.values() if r.pinned) <= page_count // KEPT_PART


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """One revision on the device, as reported."""

    revision_id: str
    state: Berth
    pages: tuple[int, ...]
    size_bytes: int
    rank: int
    leases: int
    pinned: bool
    load_ms: float


# A revision that is loaded again so soon after it was evicted should have stayed.
THRASH_S = 30.0
MAX_EVICTED = 4096


class AdapterPool:
    """Pages, owners and leases. Not thread-safe: the engine guards it with its lock."""

    def __init__(
        self, page_count: int, *, page_rows: int, page_bytes: int, policy: EvictionPolicy, beside_bytes: int = 0
    ) -> None:
        if page_count < 0 or page_rows < 1 or page_bytes < 1:
            raise ValueError("page_rows and page_bytes are positive, page_count is not negative")
        self.page_count = page_count
        self.page_rows = page_rows
        self.page_bytes = page_bytes
        self.beside_bytes = beside_bytes
        self._beside: dict[int, int] = {}  # bytes beside the pages, by the first page
        self._policy = policy
        self._clean: list[int] = list(range(page_count))
        self._dirty: list[int] = []
        self._residents: dict[str, _Resident] = {}
        self._lease_owner: dict[int, str] = {}
        self._next_lease = 1
        self._refused: set[str] = set()
        self._leaving: set[str] = set()
        self._wanted: frozenset[str] = frozenset()
        self._shares = Shares()
        self._now = 0.0
        self._evicted_at: dict[str, float] = {}
        self.evictions = 0
        self.loads = 0
        self.thrashes = 0
        self.changes = 0

    def pages_for(self, rank: int) -> int:
        """Return how many pages a revision of this rank takes."""
        return -(-rank // self.page_rows)

    def state(self, revision_id: str) -> Berth | None:
        """Return where the revision stands, None when it is not on the device."""
        resident = self._residents.get(revision_id)
        return resident.state if resident else None

    def pages(self, revision_id: str) -> tuple[int, ...]:
        """Return the revision's pages in rank order. Raises KeyError when it is not on the device."""
        return self._residents[revision_id].pages

    def size_bytes(self, revision_id: str) -> int:
        """Return the bytes of a revision's pages, 0 when it is not on the device."""
        resident = self._residents.get(revision_id)
        return len(resident.pages) * self.page_bytes if resident else 0

    def reserve(
        self, revision_id: str, *, rank: int, tenant: str = "", cost_ms: float = 0.0, beside: int = 0
    ) -> tuple[int, ...] | None:
        """Give a new revision of `tenant` its pages, and `beside` bytes, evicting unleased ones by policy when needed.

        Returns None when room must wait: for leases to end, or for evicted pages to be scrubbed
        (`take_dirty`, then try again).

        Raises:
            Refused: ADAPTER_TOO_LARGE (never fits), or REVOKED.
            ValueError: the revision is on the device already.
        """
        if revision_id in self._residents:
            raise ValueError(f"{revision_id} is on the device already")
        if self._refuses(revision_id):
            raise Refused(RefusalReason.REVOKED, f"{revision_id} may not be loaded")
        need = self.pages_for(rank)
        if rank < 1 or need > self.page_count:
            raise Refused(
                RefusalReason.ADAPTER_TOO_LARGE, f"rank {rank} takes {need} pages of the pool's {self.page_count}"
            )
        if beside > self.beside_bytes:
            raise Refused(
                RefusalReason.ADAPTER_TOO_LARGE, f"its embedding takes {beside} B of {self.beside_bytes} for all"
            )
        if len(self._clean) < need or sum(self._beside.values()) + beside > self.beside_bytes:
            self._make_room(revision_id, tenant=tenant, pages=need, beside=beside)
            return None
        self._clean.sort()
        pages = _pick_run(self._clean, need)
        taken = set(pages)
        self._clean = [page for page in self._clean if page not in taken]
        self._residents[revision_id] = _Resident(pages, rank, cost_ms, tenant, beside)
        self._beside |= {pages[0]: beside} if beside else {}
        self.changes += 1
        self.loads += 1
        self.thrashes += self._returns(revision_id)
        self._evicted_at.pop(revision_id, None)
        return pages

    def _make_room(self, revision_id: str, *, tenant: str, pages: int, beside: int) -> None:
        """Evict for what is missing of the `pages` and the bytes `beside` them of a newcomer, the least worth first.

        Looks at every resident once: it is called again and again while a newcomer waits.
        """
        need = pages - len(self._clean) - len(self._dirty)
        over = beside + sum(r.beside for r in self._residents.values()) - self.beside_bytes
        if max(need, over) <= 0:
            return
        stay = self.kept() | {key for key, r in self._residents.items() if r.pinned}
        idle = [
            key for key, r in self._residents.items() if r.state is Berth.READY and not r.leases and key not in stay
        ]
        held = {key: Holding(r.tenant, len(r.pages), r.used_at) for key, r in self._residents.items()}
        offer = self._shares.offer(
            idle, held, newcomer=tenant, need=pages, page_count=self.page_count, returns=self._returns(revision_id),
            kept=stay,
        )  # fmt: skip
        going = [self._residents[key] for key in offer.may_go]
        if sum(len(r.pages) for r in going) < need or sum(r.beside for r in going) < over:
            return  # Evicting would cost residents and still not make room: wait for leases instead.
        heap = [self._standing(key, offer) for key in offer.may_go]
        heapify(heap)
        while need > 0 or over > 0:
            least = heappop(heap)
            key = least[-1]
            now = self._standing(key, offer)
            if now > least:  # Its tenant holds less by now.
                heappush(heap, now)
                continue
            if need <= 0 and not self._residents[key].beside:
                continue  # It would go for nothing.
            offer.gone(key)
            need -= len(self._residents[key].pages)
            over -= self._residents[key].beside
            self._evict(key)

    def _evict(self, key: str) -> None:
        self.evictions += 1
        if len(self._evicted_at) >= MAX_EVICTED:
            self._evicted_at.clear()
        self._evicted_at[key] = self._now
        self._free(key)

    def _standing(self, key: str, offer: Offer) -> tuple[bool, float, float, str]:
        """Return what decides which revision goes, the least first."""
        worth = self._policy.worth(key)
        return self._is_fresh(self._residents[key]), offer.factor(key) * worth, worth, key

    def _returns(self, revision_id: str) -> bool:
        return self._now - self._evicted_at.get(revision_id, self._now - THRASH_S) < THRASH_S

    def _is_fresh(self, resident: _Resident) -> bool:
        return not resident.used and self._now - resident.loaded_at < 2 * resident.cost_ms / 1000

    def _free(self, revision_id: str) -> None:
        self._dirty.extend(self._residents.pop(revision_id).pages)
        self.changes += 1

    def ready(self, revision_id: str, *, now: float, load_ms: float) -> None:
        """Mark a LOADING revision as usable. Raises ValueError in any other state."""
        resident = self._in(revision_id, Berth.LOADING)
        resident.state = Berth.READY
        self.changes += 1
        resident.loaded_at = resident.used_at = now
        resident.cost_ms = load_ms
        self._now = max(self._now, now)

    def abort(self, revision_id: str) -> None:
        """Give up a LOADING revision; its pages become dirty. Raises ValueError in any other state."""
        self._in(revision_id, Berth.LOADING)
        self._free(revision_id)

    def lease(self, revision_id: str, *, now: float, use: bool = True) -> int | None:
        """Take a lease on a READY revision and return its id; None when it is not READY, or refused. Without `use` it
        does not count as one."""
        resident = self._residents.get(revision_id)
        if resident is None or resident.state is not Berth.READY or self._refuses(revision_id):
            return None
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        resident.leases.add(lease)
        self._lease_owner[lease] = revision_id
        self._now = max(self._now, now)
        if use:
            resident.used = True
            resident.used_at = now
            self._shares.used(resident.tenant, self._now)
            size = len(resident.pages) * self.page_bytes
            self._policy.used(revision_id, size_bytes=size, cost_ms=resident.cost_ms)
        return lease

    def release(self, lease: int) -> str | None:
        """End a lease. Returns the revision id when it was the last of a DRAINING one, whose pages are dirty now.

        Raises:
            ValueError: the lease is unknown or was released before.
        """
        revision_id = self._lease_owner.pop(lease, None)
        if revision_id is None:
            raise ValueError(f"lease {lease} is not held")
        resident = self._residents[revision_id]
        resident.leases.remove(lease)
        if resident.state is Berth.DRAINING and not resident.leases:
            self._policy.forget(revision_id)
            self._free(revision_id)
            return revision_id
        return None

    def drain(self, revision_id: str) -> bool:
        """Allow no new leases; free the pages now, or with the last lease.

        Returns whether the revision is off the device already. A LOADING one is aborted.
        """
        self._leaving.discard(revision_id)
        resident = self._residents.get(revision_id)
        if resident is None:
            return True
        if resident.leases:
            resident.state = Berth.DRAINING
            self.changes += 1
            return False
        self._policy.forget(revision_id)
        self._free(revision_id)
        return True

    def refuse(self, revision_id: str, *, final: bool = True) -> None:
        """Give this revision no lease and no pages: never again (it was revoked), or until it has been drained."""
        (self._refused if final else self._leaving).add(revision_id)

    def _refuses(self, revision_id: str) -> bool:
        return revision_id in self._refused or revision_id in self._leaving

    def pin(self, revision_id: str, *, pinned: bool) -> None:
        """Keep a resident revision from eviction, or allow it again. Raises KeyError when it is not on the device."""
        self._residents[revision_id].pinned = pinned

    def keep(self, revisions: Iterable[str]) -> None:
        """Keep these revisions from eviction while they are here, and no others."""
        self._wanted = frozenset(revisions)

    def kept(self) -> frozenset[str]:
        """Return those of them that are here, or on their way, and fit the part of the pool that may be kept so. Who
        got its pages first stays."""
        room, beside, kept = self.page_count // KEPT_PART, self.beside_bytes // KEPT_PART, set()
        for key, resident in self._residents.items():
            if key in self._wanted and len(resident.pages) <= room and resident.beside <= beside:
                room -= len(resident.pages)
                beside -= resident.beside
                kept.add(key)
        return frozenset(kept)

    def take_dirty(self, budget_bytes: int | None = None) -> tuple[int, ...]:
        """Return the pages that the device must scrub now: all, or about `budget_bytes` of them, at least one."""
        if budget_bytes is None:
            return tuple(self._dirty)
        return tuple(self._dirty[: max(1, budget_bytes // self.page_bytes) if budget_bytes > 0 else 0])

    def scrubbed(self, pages: Iterable[int]) -> None:
        """Make dirty pages clean again. Raises ValueError for a page that was not dirty."""
        for page in pages:
            self._dirty.remove(page)
            self._clean.append(page)
            self._beside.pop(page, None)

    def residents(self) -> tuple[Residency, ...]:
        """Return every revision on the device, ordered by id."""
        kept = self.kept()
        return tuple(
            Residency(
                revision_id=key,
                state=r.state,
                pages=r.pages,
                size_bytes=len(r.pages) * self.page_bytes,
                rank=r.rank,
                leases=len(r.leases),
                pinned=r.pinned or key in kept,
                load_ms=r.cost_ms,
            )
            for key, r in sorted(self._residents.items())
        )

    @property
    def free_pages(self) -> int:
        """Pages without an owner, clean or waiting to be scrubbed."""
        return len(self._clean) + len(self._dirty)

    def _in(self, revision_id: str, state: Berth) -> _Resident:
        resident = self._residents.get(revision_id)
        if resident is None or resident.state is not state:
            raise ValueError(f"{revision_id} is {resident.state if resident else 'absent'}, not {state}")
        return resident

    def check(self) -> None:
        """Raises AssertionError when an invariant of this module does not hold."""
        owned = [page for r in self._residents.values() for page in r.pages]
        assert sorted(self._clean + self._dirty + owned) == list(range(self.page_count)), "a page is lost or held twice"
        for key, resident in self._residents.items():
            assert not (resident.state is Berth.LOADING and resident.leases), f"{key} is leased while loading"
            assert resident.state is not Berth.DRAINING or resident.leases, f"{key} drains without leases"
            assert len(resident.pages) == self.pages_for(resident.rank), f"{key} has the wrong number of pages"
            assert all(self._lease_owner.get(lease) == key for lease in resident.leases), f"{key} has a stray lease"
        assert sum(self._beside.values()) <= self.beside_bytes, "more lies beside the pages than may"
        assert all(self._beside.get(r.pages[0], 0) == r.beside for r in self._residents.values()), "bytes are lost"
        assert len(self._lease_owner) == sum(len(r.leases) for r in self._residents.values()), "a lease is lost"


def _pick_run(clean: list[int], need: int) -> tuple[int, ...]:
    """Return `need` of the sorted clean pages, adjacent ones where there is such a run: a view instead of a copy."""
    for start in range(len(clean) - need + 1):
        if clean[start + need - 1] - clean[start] == need - 1:
            return tuple(clean[start : start + need])
    return tuple(clean[:need])
