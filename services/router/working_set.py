"""How much of the catalog is in use: the distinct revisions that were asked for of late, and their bytes. Pure."""

from collections import OrderedDict

WINDOW_S = 300.0
MAX_REVISIONS = 65_536


class WorkingSet:
    """The revisions of the last WINDOW_S seconds, at most MAX_REVISIONS of them."""

    def __init__(self) -> None:
        # Revision → (when it was asked for last, its bytes), longest ago first.
        self._used: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._bytes = 0

    def asked(self, revision_id: str, size_bytes: int, now: float) -> None:
        """Notes a request for a revision."""
        before = self._used.pop(revision_id, None)
        self._used[revision_id] = (now, size_bytes)
        self._bytes += size_bytes - (before[1] if before is not None else 0)
        while len(self._used) > MAX_REVISIONS:
            self._drop()

    def size(self, now: float) -> tuple[int, int]:
        """Returns how many revisions are in use, and their bytes."""
        while self._used and next(iter(self._used.values()))[0] < now - WINDOW_S:
            self._drop()
        return len(self._used), self._bytes

    def _drop(self) -> None:
        _, (_, size_bytes) = self._used.popitem(last=False)
        self._bytes -= size_bytes
