"""Which verified weights may stay on the node's disk: a byte budget, and for room what `shares` says.

Pure accounting over digests; files are the shell's (`disk_cache`). Sizes in bytes. Nothing here is a promise about the
disk: files may vanish or spoil at any moment, and then the books are corrected. A file is the tenants' that it was
written or read for; what is found at a start is nobody's until it is read.

Invariants (`check`): the sum of the entries' sizes is within the budget, and every size is at least 1.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import replace

from services.loader.shares import Held, victims


class DiskTier:
    """The books. Methods that give entries up return their digests, for the shell to delete."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._entries: OrderedDict[str, Held] = OrderedDict()  # least recently used first
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries, those being written included."""
        return self._used

    def digests(self) -> tuple[str, ...]:
        """Returns what is held, least recently used first."""
        return tuple(self._entries)

    def use(self, digest: str, *, tenants: Collection[str]) -> bool:
        """Notes a use by tenants; returns whether the digest is held."""
        held = self._entries.get(digest)
        if held is None:
            return False
        self._entries[digest] = replace(held, tenants=held.tenants.union(tenants))
        self._entries.move_to_end(digest)
        return True

    def admit(self, digest: str, size_bytes: int, *, tenants: Collection[str]) -> list[str] | None:
        """Makes room and enters the digest; returns what must leave, None when it is held or can never fit.

        Raises:
            ValueError: the size is below 1.
        """
        if size_bytes < 1:
            raise ValueError("an entry has at least 1 byte")
        if digest in self._entries:
            return None
        held, askers = list(self._entries.values()), frozenset(tenants)
        leaving = victims(held, size_bytes, askers=askers, budget_bytes=self.budget_bytes)
        if leaving is None:
            return None
        for old in leaving:
            self.forget(old)
        self._entries[digest] = Held(digest, size_bytes, askers)
        self._used += size_bytes
        return leaving

    def adopt(self, found: Iterable[tuple[str, int]]) -> list[str]:
        """Enters what lies there, (digest, size) from least to most recently used; returns what must leave."""
        leaving = []
        for digest, size_bytes in found:
            left = self.admit(digest, size_bytes, tenants=()) if size_bytes >= 1 else None
            leaving.extend([digest] if left is None else left)
        return leaving

    def forget(self, digest: str) -> None:
        """Takes a digest out; one that is not held is out already."""
        held = self._entries.pop(digest, None)
        self._used -= 0 if held is None else held.size_bytes

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert self._used == sum(held.size_bytes for held in self._entries.values()) <= self.budget_bytes, "over budget"
        assert all(held.size_bytes >= 1 for held in self._entries.values()), "an empty entry"
