"""Accounting of the paged key/value cache: who holds which block, and which full blocks may be shared.

Invariants, kept by `check()`:
 1. Block 0 is the null block: always zero on the device, never handed out. Attention pads block tables with it.
 2. Every other block is in exactly one of: free, cached (named, no references), held (references > 0).
 3. free + cached + held == blocks - 1.
 4. A name belongs to one block and a named block to one name.
 5. A block with references never becomes free or another's.

Names come from `services.shared.prefix_hash`; because a chain starts from base, revision and tenant salt, a hit
across revisions or tenants cannot happen.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class BlockCounts:
    free: int
    cached: int
    held: int


class BlockPool:
    """Reference-counted blocks with a least-recently-used cache of named full blocks."""

    def __init__(self, block_count: int, *, block_size: int) -> None:
        if block_count < 2 or block_size < 1:
            raise ValueError("a pool has a null block, at least one more, and blocks of at least one token")
        self.block_count = block_count
        self.block_size = block_size
        self._free: deque[int] = deque(range(1, block_count))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * block_count
        self._name: list[bytes | None] = [None] * block_count
        self._owner: list[str | None] = [None] * block_count
        self._by_name: dict[bytes, int] = {}
        self._named: dict[str | None, set[int]] = {}
        self._freed: list[int] = []

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free, cached, self.block_count - 1 - free - cached)

    def named(self) -> dict[str, int]:
        """Return how many blocks are named for each revision, held or cached; the base's are not counted."""
        return {owner: len(blocks) for owner, blocks in self._named.items() if owner is not None}

    def references(self) -> tuple[int, ...]:
        """Return the reference count of every block, by block number."""
        return tuple(self._refs)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` unshared blocks with one reference each, or None (and change nothing)."""
        if count > self.available:
            return None
        taken: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                self._unname(block)
                self._freed.append(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def match(self, names: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of `names`, without taking references."""
        found: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, blocks: Sequence[int]) -> None:
        """Take one more reference on each named block."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each block. Named blocks stay cached; the tail of a chain is forgotten first."""
        for block in reversed(blocks):
            if self._refs[block] < 1:
                raise ValueError(f"block {block} released more often than taken")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._name[block] is not None:
                    self._cached[block] = None
                else:
                    self._to_free(block)

    def publish(self, block: int, name: bytes, *, owner: str | None) -> None:
        """Name a held, full block so that others may share it. A name already taken leaves the block private."""
        if self._refs[block] < 1:
            raise ValueError(f"block {block} is not held")
        if name in self._by_name or self._name[block] is not None:
            return
        self._by_name[name] = block
        self._name[block] = name
        self._owner[block] = owner
        self._named.setdefault(owner, set()).add(block)

    def forget(self, owner: str | None) -> int:
        """Drop every name of `owner` (a revision id, None for the base). Held blocks go on, but unshared.

        Returns how many names were dropped.
        """
        mine = sorted(self._named.get(owner, ()))
        for block in mine:
            self._unname(block)
            if self._refs[block] == 0:
                del self._cached[block]
                self._to_free(block)
        return len(mine)

    def discard(self, blocks: Sequence[int]) -> None:
        """Drop the names of held blocks whose contents cannot be trusted."""
        for block in blocks:
            if self._refs[block] < 1:
                raise ValueError(f"block {block} is not held")
            self._unname(block)

    def take_freed(self) -> list[int]:
        """Return the blocks whose contents died since the last call; the device may scrub or poison them."""
        freed, self._freed = self._freed, []
        return freed

    def _to_free(self, block: int) -> None:
        self._free.append(block)
        self._freed.append(block)

    def _unname(self, block: int) -> None:
        name = self._name[block]
        if name is not None:
            del self._by_name[name]
            owner = self._owner[block]
            self._named[owner].discard(block)
            if not self._named[owner]:
                del self._named[owner]
        self._name[block] = None
        self._owner[block] = None

    def check(self) -> None:
        """Raises AssertionError when an invariant of this module does not hold."""
        free, cached = set(self._free), set(self._cached)
        held = {b for b in range(1, self.block_count) if self._refs[b] > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + len(held) == len(free | cached | held), "a block is in two sets"
        assert free | cached | held == set(range(1, self.block_count)), "a block is lost"
        assert self._refs[NULL_BLOCK] == 0, "the null block is held"
        assert min(self._refs) >= 0, "a negative reference count"
        named = {b for b in range(self.block_count) if self._name[b] is not None}
        assert cached <= named, "a cached block has no name"
        assert not named & free, "a free block has a name"
        assert self._by_name == {self._name[b]: b for b in named}, "names and blocks disagree"
        assert all(self._named.values()), "an owner without blocks is kept"
        by_owner = {(self._owner[b], b) for b in named}
        assert by_owner == {(o, b) for o, blocks in self._named.items() for b in blocks}, "an owner has others' blocks"
