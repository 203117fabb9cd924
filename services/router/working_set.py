"""What was asked for of late: the distinct revisions of a window, whose they are, and their sizes together. Pure.

Sizes are in whatever unit the caller counts: bytes of the catalog, pages of an executor's pool.
"""

from collections import Counter, OrderedDict

WINDOW_S = 300.0
MAX_REVISIONS = 65_536


class WorkingSet:
    """The revisions of the last `window_s` seconds, at most MAX_REVISIONS of them."""

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        # Revision → (when it was asked for last, its size, for whom), longest ago first.
        self._used: OrderedDict[str, tuple[float, int, str]] = OrderedDict()
        self._sizes: Counter[str] = Counter()
        self._total = 0

    def asked(self, revision_id: str, size: int, now: float, *, tenant: str = "") -> None:
        """Notes a request for a revision."""
        self._drop(revision_id)
        self._used[revision_id] = (now, size, tenant)
        self._sizes[tenant] += size
        self._total += size
        self._forget(now)

    def size(self, now: float) -> tuple[int, int]:
        """Returns how many revisions are in use, and their size."""
        self._forget(now)
        return len(self._used), self._total

    def others(self, tenant: str, revision_id: str, now: float) -> tuple[int, int]:
        """Returns the size of what else a tenant uses beside a revision, and of what all others use."""
        self._forget(now)
        _, size, whose = self._used.get(revision_id, (0.0, 0, ""))
        own = self._sizes[tenant]
        return own - (size if whose == tenant else 0), self._total - own

    def _forget(self, now: float) -> None:
        while self._used and (
            len(self._used) > MAX_REVISIONS or next(iter(self._used.values()))[0] < now - self._window_s
        ):
            self._drop(next(iter(self._used)))

    def _drop(self, revision_id: str) -> None:
        if revision_id in self._used:
            _, size, tenant = self._used.pop(revision_id)
            self._total -= size
            self._sizes[tenant] -= size
            if not self._sizes[tenant]:
                del self._sizes[tenant]
