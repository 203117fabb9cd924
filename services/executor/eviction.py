"""Which unleased revision leaves the device when room is needed.

A policy says what it is worth to keep a revision; the least goes. `Shares` says whose are worth less than that, or must
not go at all. Policies are told of uses and know no pages, leases or device. GDSF-D (the default) weighs a decayed
count of uses, which survives eviction, by what a load costs and by the room it takes:
    f <- f * 2**(-dn / half_life) + 1        at each use, dn uses of any revision after the one before
    worth = f, decayed until now, * cost_ms / size_bytes
GreedyDual's rising floor is left out: decay does its work already. The cost is the measured load. Key/value blocks that
a revision made outlive its pages, so evicting it loses none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from services.shared.residency import SPARE


class EvictionPolicy(Protocol):
    """The port."""

    def used(self, key: str, *, size_bytes: int, cost_ms: float) -> None:
        """Note one use of a resident revision."""

    def worth(self, key: str) -> float:
        """Return what keeping it is worth, 0 for one that was never used. Compares only within one policy."""

    def forget(self, key: str) -> None:
        """Note that `key` will not come back (revoked, evicted by hand)."""


class Lru:
    """Least recently used: the baseline."""

    def __init__(self, *, remembered: int = 8192) -> None:
        self._remembered = remembered
        self._uses = 0
        self._last: OrderedDict[str, int] = OrderedDict()

    def used(self, key: str, *, size_bytes: int, cost_ms: float) -> None:
        self._uses += 1
        self._last[key] = self._uses
        self._last.move_to_end(key)
        while len(self._last) > self._remembered:
            self._last.popitem(last=False)

    def worth(self, key: str) -> float:
        return self._last.get(key, 0)

    def forget(self, key: str) -> None:
        self._last.pop(key, None)


class GdsfD:
    """See the module's text. `half_life` is the number of uses, of any revision, in which an old one loses half its
    weight; counted in uses it fits a busy pool and an idle one."""

    def __init__(self, *, half_life: float = 700.0, remembered: int = 8192) -> None:
        if half_life <= 0 or remembered < 1:
            raise ValueError("half_life and remembered are positive")
        self._half_life = half_life
        self._remembered = remembered
        self._uses = 0
        # Key -> (frequency, use at which that was, cost per MiB: keeps numbers near 1), least recently used first.
        self._known: OrderedDict[str, tuple[float, int, float]] = OrderedDict()

    def used(self, key: str, *, size_bytes: int, cost_ms: float) -> None:
        self._uses += 1
        frequency = self._frequency(key) + 1.0
        self._known[key] = (frequency, self._uses, cost_ms / max(size_bytes / 2**20, 1e-6))
        self._known.move_to_end(key)
        while len(self._known) > self._remembered:
            self._known.popitem(last=False)

    def worth(self, key: str) -> float:
        return self._frequency(key) * self._known.get(key, (0.0, 0, 0.0))[2]

    def forget(self, key: str) -> None:
        self._known.pop(key, None)

    def _frequency(self, key: str) -> float:
        frequency, at, _ = self._known.get(key, (0.0, self._uses, 0.0))
        return float(frequency * 2.0 ** ((at - self._uses) / self._half_life))


def make_policy(name: str) -> EvictionPolicy:
    """Return the policy called `name`: "gdsf-d" or "lru". Raises ValueError for any other."""
    if name == "lru":
        return Lru()
    if name == "gdsf-d":
        return GdsfD()
    raise ValueError(f"unknown eviction policy {name!r}; known: gdsf-d, lru")


# By how much the revisions of a tenant are worth less that holds more than its part and what is spare. Without that,
# tenants whose revisions are popular lose them to those whose are not.
DISCOUNT = 4.0


@dataclass(frozen=True, slots=True)
class Holding:
    """A revision on the device as `Shares` sees it: whose it is, its pages, when it was used last."""

    tenant: str
    pages: int
    used_at: float


class Offer:
    """What may go for a newcomer, and by what to multiply the worth of each, as others go before it."""

    def __init__(
        self, may_go: Collection[str], held: Mapping[str, Holding], *, pages: dict[str, int], most: float, less: float
    ) -> None:
        self.may_go = may_go
        self._held = held
        self._pages = pages
        self._most = most
        self._less = less

    def factor(self, key: str) -> float:
        return self._less if self._pages[self._held[key].tenant] > self._most else 1.0

    def gone(self, key: str) -> None:
        self._pages[self._held[key].tenant] -= self._held[key].pages


class Shares:
    """Whose revisions may go, and what those are worth.

    A tenant is active while it used the device within `active_s` seconds.

    The floor: each active tenant keeps its last used revision, as long as those together take no more than half of the
    pool; with more tenants than that, nobody has a floor. Where the newcomer would not fit beside them and what cannot
    go at all (leased, loading, kept by rollouts), floors give way, the longest unused first, until it does; a tenant
    that would hold more than its part and a quarter of the pool waits for what is leased or loading instead. The cap:
    what a tenant holds is worth less while that is more than this, and goes first when the newcomer was evicted a
    moment ago. Who needs the room counts as holding it.
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

    def offer(
        self, idle: Collection[str], held: Mapping[str, Holding], *, newcomer: str, need: int, page_count: int,
        returns: bool, kept: Collection[str] = (),
    ) -> Offer:  # fmt: skip
        """Return which of the idle revisions may go for `need` pages of `newcomer`: enough, if all are and it is within
        its part. `returns` says that the newcomer's revision was evicted a moment ago; rollouts keep `kept`."""
        active = {*self._seen, newcomer}
        floors = self._floors(held, active, newcomer=newcomer)
        if sum(held[key].pages for key in floors) > page_count // 2:
            floors = set()
        most = page_count / len(active) + page_count // SPARE
        pages: dict[str, int] = {newcomer: need}
        for holding in held.values():
            pages[holding.tenant] = pages.get(holding.tenant, 0) + holding.pages
        may_go = frozenset(idle)
        stays = held.keys() - may_go if pages[newcomer] <= most else kept
        room = page_count - need - sum(held[key].pages for key in stays)
        safe = _newest(floors & may_go, held, room=room)
        less = 0.0 if returns and pages[newcomer] <= most else 1.0 / DISCOUNT
        return Offer([key for key in idle if key not in safe], held, pages=pages, most=most, less=less)

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


def _newest(floors: Collection[str], held: Mapping[str, Holding], *, room: int) -> set[str]:
    """Return the last used of these that together fit `room`."""
    kept = set()
    for key in sorted(floors, key=lambda key: (-held[key].used_at, key)):
        room -= held[key].pages
        if room < 0:
            break
        kept.add(key)
    return kept
