"""Which verified weights may stay on the node's disk: a byte budget and the least recently used.

Pure accounting over digests; files are the shell's (`disk_cache`). Sizes in bytes. Nothing here is a promise about the
disk: files may vanish or spoil at any moment, and then the books are corrected.

Invariants (`check`): the sum of the entries' sizes is within the budget, and every size is at least 1.
"""

from collections import OrderedDict
from collections.abc import Iterable


class DiskTier:
    """The books. Methods that give entries up return their digests, for the shell to delete."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._entries: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries, those being written included."""
        return self._used

    def digests(self) -> tuple[str, ...]:
        """Returns what is held, least recently used first."""
        return tuple(self._entries)

    def use(self, digest: str) -> bool:
        """Notes a use; returns whether the digest is held."""
        if digest not in self._entries:
            return False
        self._entries.move_to_end(digest)
        return True

    def admit(self, digest: str, size_bytes: int) -> list[str] | None:
        """Makes room and enters the digest; returns what must leave, None when it is held or can never fit.

        Raises:
            ValueError: the size is below 1.
        """
        if size_bytes < 1:
            raise ValueError("an entry has at least 1 byte")
        if digest in self._entries or size_bytes > self.budget_bytes:
            return None
        leaving = []
        while self._used + size_bytes > self.budget_bytes:
            oldest, freed = self._entries.popitem(last=False)
            self._used -= freed
            leaving.append(oldest)
        self._entries[digest] = size_bytes
        self._used += size_bytes
        return leaving

    def adopt(self, found: Iterable[tuple[str, int]]) -> list[str]:
        """Enters what lies there, (digest, size) from least to most recently used; returns what must leave."""
        leaving = []
        for digest, size_bytes in found:
            left = self.admit(digest, size_bytes) if size_bytes >= 1 else None
            leaving.extend([digest] if left is None else left)
        return leaving

    def forget(self, digest: str) -> None:
        """Takes a digest out; one that is not held is out already."""
        self._used -= self._entries.pop(digest, 0)

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert self._used == sum(self._entries.values()) <= self.budget_bytes, "over budget"
        assert all(size >= 1 for size in self._entries.values()), "an empty entry"
