"""Digests whose stored bytes were wrong: for a while nobody has to read them again to learn it."""

from collections import OrderedDict

MAX_REMEMBERED = 1024


class BadDigests:
    """A bounded memory. Times in seconds on the caller's monotonic clock."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._until: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def add(self, digest: str, why: str, *, now: float) -> None:
        """Remembers that a digest was bad at `now`; the oldest is forgotten when there are too many."""
        self._until.pop(digest, None)
        self._until[digest] = (now + self._ttl_s, why)
        if len(self._until) > MAX_REMEMBERED:
            self._until.popitem(last=False)

    def find(self, digest: str, *, now: float) -> str | None:
        """Returns why a digest is bad, None when nothing is remembered."""
        until, why = self._until.get(digest, (0.0, ""))
        if now < until:
            return why
        self._until.pop(digest, None)
        return None
