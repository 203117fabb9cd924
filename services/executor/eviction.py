"""Which unleased revision leaves the device when room is needed.

One small port, two policies. Both are told of accesses and asked for a victim among candidates that the pool
says may go; neither knows pages, leases or the device.

GDSF-D (the default) is GreedyDual-Size-Frequency with a decayed count that survives eviction:
    f <- f * 2**(-dt / half_life) + 1        at each access
    H <- L + f * cost_ms / size_bytes        at each access
    victim = argmin H;  L <- H(victim)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
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
    at: float
    value: float


class GdsfD:
    """GreedyDual-frequency with decay. `half_life_s` is the time in which an old access loses half its weight."""

    def __init__(self, *, half_life_s: float = 600.0, remembered: int = 8192) -> None:
        if half_life_s <= 0 or remembered < 1:
            raise ValueError("half_life_s and remembered are positive")
        self._half_life_s = half_life_s
        self._remembered = remembered
        self._floor = 0.0
        self._worth: OrderedDict[str, _Worth] = OrderedDict()

    def accessed(self, key: str, *, now: float, size_bytes: int, cost_ms: float) -> None:
        worth = self._worth.pop(key, None) or _Worth(0.0, now, 0.0)
        age = max(0.0, now - worth.at)
        worth.frequency = worth.frequency * 2.0 ** (-age / self._half_life_s) + 1.0
        worth.at = now
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


def make_policy(name: str, *, half_life_s: float = 600.0) -> EvictionPolicy:
    """Return the policy called `name`: "gdsf-d" or "lru". Raises ValueError for any other."""
    if name == "lru":
        return Lru()
    if name == "gdsf-d":
        return GdsfD(half_life_s=half_life_s)
    raise ValueError(f"unknown eviction policy {name!r}; known: gdsf-d, lru")
