"""The Merkle tree of RFC 6962 (RFC 9162 §2): hashes, roots, inclusion and consistency proofs. Pure.

A tree of n leaves is covered by complete subtrees. A subtree is named (level, index): it has 2^level leaves and begins
at leaf index · 2^level. Its hash never changes once its last leaf is there, so a log keeps these hashes for ever, and
every root and proof is made from O(log n) of them:

    new_nodes    what appending a leaf adds (amortized two hashes)
    cover        which complete subtrees make up the leaves [start, end)
    fold         their hash, taken together
    …_ranges     the ranges of leaves whose hashes are a proof, in the proof's order

Verification (`verify_inclusion`, `verify_consistency`) knows nothing of how a proof was made.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()

Node = tuple[int, int]
Range = tuple[int, int]


def leaf_hash(body: bytes) -> bytes:
    """Returns the hash of a leaf."""
    return hashlib.sha256(b"\x00" + body).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Returns the hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def cover(start: int, end: int) -> list[Node]:
    """Returns the complete subtrees that make up the leaves [start, end), left to right.

    `start` is 0 or a multiple of a power of two that is at least end - start, as for every subtree of a Merkle tree.

    Raises:
        ValueError: `start` is neither.
    """
    nodes = []
    while start < end:
        level = (end - start).bit_length() - 1
        if start % (1 << level):
            raise ValueError(f"[{start}, {end}) is not a subtree")
        nodes.append((level, start >> level))
        start += 1 << level
    return nodes


def fold(hashes: Sequence[bytes]) -> bytes:
    """Returns the hash of a range from the hashes of its `cover`."""
    if not hashes:
        return EMPTY_ROOT
    result = hashes[-1]
    for left in reversed(hashes[:-1]):
        result = node_hash(left, result)
    return result


def merged(size: int) -> list[Node]:
    """Returns the subtrees that the leaf appended to a tree of `size` leaves completes another one with, lowest first.

    Together with that leaf they are all that appending needs; there are as many as `size` ends in binary ones.
    """
    nodes, level = [], 0
    while size >> level & 1:
        nodes.append((level, (size >> level) - 1))
        level += 1
    return nodes


def new_nodes(size: int, leaf: bytes, left: Sequence[bytes]) -> list[tuple[Node, bytes]]:
    """Returns the subtrees, and their hashes, that become complete when a leaf of hash `leaf` is appended.

    `size` is the number of leaves before, `left` the hashes of `merged(size)`.
    """
    nodes = [((0, size), leaf)]
    for level, sibling in enumerate(left, start=1):
        nodes.append(((level, size >> level), node_hash(sibling, nodes[-1][1])))
    return nodes


class Frontier:
    """The root of a growing tree in O(log n) memory: for whoever sees every leaf once."""

    def __init__(self) -> None:
        self.size = 0
        self._hashes: list[bytes] = []

    def copy(self) -> "Frontier":
        """Returns an equal one that grows by itself."""
        other = Frontier()
        other.size, other._hashes = self.size, self._hashes.copy()
        return other

    def append(self, leaf: bytes) -> None:
        """Adds a leaf by its hash."""
        self._hashes.append(leaf)
        size = self.size
        while size & 1:
            right = self._hashes.pop()
            self._hashes[-1] = node_hash(self._hashes[-1], right)
            size >>= 1
        self.size += 1

    def root(self) -> bytes:
        """Returns the root of the leaves so far."""
        return fold(self._hashes)


def root(leaves: Iterable[bytes]) -> bytes:
    """Returns the root of a tree, given the hashes of its leaves."""
    frontier = Frontier()
    for leaf in leaves:
        frontier.append(leaf)
    return frontier.root()


def inclusion_ranges(index: int, size: int) -> list[Range]:
    """Returns the ranges whose hashes prove that leaf `index` is in a tree of `size` leaves, from the leaf up.

    Raises:
        ValueError: unless 0 <= index < size.
    """
    if not 0 <= index < size:
        raise ValueError("index must be in [0, size)")
    ranges, start, end = [], 0, size
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((start, middle))
            start = middle
    return ranges[::-1]


def consistency_ranges(old: int, new: int) -> list[Range]:
    """Returns the ranges whose hashes prove that a tree of `old` leaves is a prefix of one of `new`.

    Raises:
        ValueError: unless 1 <= old <= new.
    """
    if not 1 <= old <= new:
        raise ValueError("the sizes must be 1 <= old <= new")
    if old == new:
        return []
    ranges, start, end, whole = [], 0, new, True
    while old - start < end - start:
        middle = start + _split(end - start)
        if old <= middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((start, middle))
            start, whole = middle, False
    # The old tree itself is known to who asks, when it is a subtree of the new one.
    return ([] if whole else [(start, end)]) + ranges[::-1]


def prove(ranges: Iterable[Range], read: Callable[[Node], bytes]) -> list[bytes]:
    """Returns the hashes of ranges; `read` returns the hash of a complete subtree."""
    return [fold([read(node) for node in cover(start, end)]) for start, end in ranges]


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root_hash: bytes) -> bool:
    """Says whether the leaf of hash `leaf` is at `index` in the tree of `size` leaves with this root.

    The algorithm of RFC 9162 §2.1.3.2.
    """
    if not 0 <= index < size or any(len(item) != HASH_BYTES for item in (leaf, root_hash, *proof)):
        return False
    position, last, result = index, size - 1, leaf
    for item in proof:
        if last == 0:
            return False
        if position & 1 or position == last:
            result = node_hash(item, result)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            result = node_hash(result, item)
        position, last = position >> 1, last >> 1
    return last == 0 and result == root_hash


def verify_consistency(old: int, new: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes) -> bool:
    """Says whether the tree of `old` leaves is a prefix of the tree of `new`. Every tree extends the empty one.

    The algorithm of RFC 9162 §2.1.4.2.
    """
    if any(len(item) != HASH_BYTES for item in (old_root, new_root, *proof)) or not 0 <= old <= new:
        return False
    if old == 0:
        return not proof and old_root == EMPTY_ROOT and (new > 0 or new_root == EMPTY_ROOT)
    if old == new:
        return not proof and old_root == new_root
    hashes = list(proof)
    if old & (old - 1) == 0:
        hashes.insert(0, old_root)
    if not hashes:
        return False
    position, last = old - 1, new - 1
    while position & 1:
        position, last = position >> 1, last >> 1
    old_result = new_result = hashes[0]
    for item in hashes[1:]:
        if last == 0:
            return False
        if position & 1 or position == last:
            old_result, new_result = node_hash(item, old_result), node_hash(item, new_result)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            new_result = node_hash(new_result, item)
        position, last = position >> 1, last >> 1
    return last == 0 and old_result == old_root and new_result == new_root


def _split(count: int) -> int:
    """Returns the largest power of two below `count` (> 1)."""
    return 1 << ((count - 1).bit_length() - 1)
