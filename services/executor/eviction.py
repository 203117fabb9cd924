"""Which unleased revision leaves the device when room is needed: whose, then which.

`Shares` says whose may go: while tenants are few, each active one keeps its last used revision, and whoever holds far
more than its part gives way first. Of what may go, a policy takes its victim.

Policies are told of accesses and asked for a victim among candidates; they know no pages, leases or device. GDSF-D (the
default) is GreedyDual-Size-Frequency with a decayed count that survives eviction:
    f <- f * 2**(-dn / half_life) + 1        at each access, dn accesses of any revision after the one before
    H <- L + f * cost_ms / size_bytes        at each access
    victim = argmin H;  L <- H(victim)
The cost is the measured load. Key/value blocks that a revision made outlive its pages, so evicting it loses none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol


class EvictionPolicy(Protocol):
    """The port. Times are seconds on the engine's clock."""

    def accessed(self, key: str, *, now: float, size_bytes: int, cost_ms: float) -> None:
        """Note one use of a resident revision (its load counts as one)."""

    def victim(self, candidates: Collection[str]) -> str:
        """Return the candidate to evict. `candidates` is not empty. Does not remove it."""

    def evicted(self, key: str) -> None:
        """Note that `key` left the device as the chosen victim."""

    def removed(self, key: str) -> None:
        """Note that `key` left the device for another reason (revoked, evicted by hand)."""


class Lru:
    """Least recently used: the baseline."""

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def accessed(self, key: str, *, now: float, size_bytes: int, cost_ms: float) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def victim(self, candidates: Collection[str]) -> str:
        allowed = set(candidates)
        return next((key for key in self._order if key in allowed), min(allowed))

    def evicted(self, key: str) -> None:
        self._order.pop(key, None)

    def removed(self, key: str) -> None:
        self._order.pop(key, None)


@dataclass(slots=True)
class _Worth:
    frequency: float
    at: int
    value: float


class GdsfD:
    """GreedyDual-frequency with decay. `half_life` is the number of accesses, of any revision, in which an old access
    loses half its weight; counted in accesses it fits a busy pool and an idle one."""

    def __init__(self, *, half_life: float = 2000.0, remembered: int = 8192) -> None:
        if half_life <= 0 or remembered < 1:
            raise ValueError("half_life and remembered are positive")
        self._half_life = half_life
        self._remembered = remembered
        self._accesses = 0
        self._floor = 0.0
        self._worth: OrderedDict[str, _Worth] = OrderedDict()

    def accessed(self, key: str, *, now: float, size_bytes: int, cost_ms: float) -> None:
        self._accesses += 1
        worth = self._worth.pop(key, None) or _Worth(0.0, self._accesses, 0.0)
        worth.frequency = worth.frequency * 2.0 ** ((worth.at - self._accesses) / self._half_life) + 1.0
        worth.at = self._accesses
        # Per MiB: keeps values near 1, where floats are finest.
        worth.value = self._floor + worth.frequency * cost_ms / max(size_bytes / 2**20, 1e-6)
        self._worth[key] = worth
        while len(self._worth) > self._remembered:
            self._worth.popitem(last=False)

    def victim(self, candidates: Collection[str]) -> str:
        return min(candidates, key=lambda key: (self._value(key), key))

    def evicted(self, key: str) -> None:
        self._floor = max(self._floor, self._value(key))

    def removed(self, key: str) -> None:
        self._worth.pop(key, None)

    def _value(self, key: str) -> float:
        worth = self._worth.get(key)
        return worth.value if worth else self._floor


def make_policy(name: str, *, half_life: float = 2000.0) -> EvictionPolicy:
    """Return the policy called `name`: "gdsf-d" or "lru". Raises ValueError for any other."""
    if name == "lru":
        return Lru()
    if name == "gdsf-d":
        return GdsfD(half_life=half_life)
    raise ValueError(f"unknown eviction policy {name!r}; known: gdsf-d, lru")


# What a tenant may hold beyond its part before it gives way first: one in so many of all pages. Without it, tenants
# whose revisions are popular lose them to those whose are not: up to 3.4 times the load cost.
SPARE = 4


@dataclass(frozen=True, slots=True)
class Holding:
    """A revision on the device as `Shares` sees it: whose it is, its pages, when it was used last."""

    tenant: str
    pages: int
    used_at: float


class Shares:
    """Whose revisions may go. A tenant is active while it used the device within `active_s` seconds.

    The floor: each active tenant keeps its last used revision, as long as those together take no more than half of the
    pool and leave room for the newcomer; with more tenants than that, nobody has a floor. The cap: when room is needed,
    a tenant that holds more than its part and a quarter of the pool gives way first. Who needs the room counts as
    holding it, so a tenant that churns through many revisions evicts its own.
    """

    def __init__(self, *, active_s: float = 60.0) -> None:
        self._active_s = active_s
        self._seen: OrderedDict[str, float] = OrderedDict()

    def used(self, tenant: str, now: float) -> None:
        """Note that a tenant used the device."""
        self._seen[tenant] = now
        self._seen.move_to_end(tenant)
        # A tenant that is not active any more is as one that never was.
        while next(iter(self._seen.values())) < now - self._active_s:
            self._seen.popitem(last=False)

    def may_go(
        self, idle: Collection[str], held: Mapping[str, Holding], *, newcomer: str, need: int, page_count: int
    ) -> tuple[list[str], ...]:
        """Return the idle revisions that may go for `need` pages of `newcomer`, in groups: an earlier group goes first.
        What no group has is protected."""
        active = {*self._seen, newcomer}
        kept = self._floors(held, active, newcomer=newcomer)
        if sum(held[key].pages for key in kept) > min(page_count // 2, page_count - need):
            kept = set()
        most = page_count / len(active) + page_count // SPARE
        pages: dict[str, int] = {newcomer: need}
        for holding in held.values():
            pages[holding.tenant] = pages.get(holding.tenant, 0) + holding.pages
        over = {tenant for tenant, count in pages.items() if count > most}
        may_go = [key for key in idle if key not in kept]
        if newcomer in over and pages[newcomer] > need:
            first = [key for key in may_go if held[key].tenant == newcomer]
        else:
            first = [key for key in may_go if held[key].tenant in over]
        return first, [key for key in may_go if key not in first]

    @staticmethod
    def _floors(held: Mapping[str, Holding], tenants: Collection[str], *, newcomer: str) -> set[str]:
        last: dict[str, str] = {}
        for key, holding in held.items():
            best = last.get(holding.tenant)
            if (
                holding.tenant in tenants
                and holding.tenant != newcomer
                and (best is None or held[best].used_at < holding.used_at)
            ):
                last[holding.tenant] = key
        return set(last.values())
