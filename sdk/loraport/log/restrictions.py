"""The log within the log: the leaves by which what earlier ones allowed holds no longer, or for others. Pure.

A record proves that a revision was approved. That it was not taken back since cannot be proven by any leaf, only by
having all those that take back. These are few, so every peer has them all, in the order of the log, as a list whose
hash is signed with every checkpoint:

    head(0) = 32 zero bytes        head(n) = SHA-256(0x02 || head(n - 1) || RFC 6962 hash of the list's leaf n)

Which leaves are in it is decided by their kind alone, so whoever has the log can tell whether the list is whole.
"""

import hashlib
import re
from dataclasses import dataclass, field

from loraport.log.leaf import Kind, Leaf, LeafError, parse_leaf
from loraport.log.merkle import leaf_hash

KINDS = frozenset({Kind.REVOKED, Kind.QUARANTINED, Kind.SHARED, Kind.TRUST_ROOT})
FIRST_HEAD = bytes(32)
_PREFIX = b"\x02"
_LISTED = re.compile(rb'"kind":"(?:%b)"' % b"|".join(sorted(kind.encode() for kind in KINDS)))


class RestrictionError(ValueError):
    """A leaf that is not what the list has, or may have, in its place; the message says why."""


def next_head(head: bytes, body: bytes) -> bytes:
    """Returns the hash of a list that has grown by the leaf `body`; `head` is that of the list before."""
    return hashlib.sha256(_PREFIX + head + leaf_hash(body)).digest()


def restricts(body: bytes) -> bool:
    """Says whether a leaf, known to be one, is in the list. Within a text of a leaf the quotes would be escaped."""
    return _LISTED.search(body) is not None


@dataclass(frozen=True, slots=True)
class Listed:
    """Length and hash of the list of a log; of an empty one to begin with."""

    count: int = 0
    head: bytes = FIRST_HEAD

    def grown(self, body: bytes) -> "Listed":
        """Returns those of the log that has the leaf `body` as well: others only if that takes something back."""
        return Listed(self.count + 1, next_head(self.head, body)) if restricts(body) else self


@dataclass(slots=True)
class Restrictions:
    """The list as far as it has come. It only grows."""

    # The hash after each leaf, that of the empty list first.
    heads: list[bytes] = field(default_factory=lambda: [FIRST_HEAD])
    last_index: int = -1
    # The newest version of the trust root that a leaf names.
    root_version: int = 0

    @property
    def count(self) -> int:
        """How many leaves have come."""
        return len(self.heads) - 1

    def take(self, position: int, body: bytes) -> Leaf | None:
        """Takes the leaf at a place of the list (0 is the first); returns it, None when it had come before.

        Raises:
            RestrictionError: it is another one than had come, leaves a gap, or is none that may be there.
        """
        if not 0 <= position <= self.count:
            raise RestrictionError(f"restriction {position} follows {self.count}")
        head = next_head(self.heads[position], body)
        if position < self.count:
            if head != self.heads[position + 1]:
                raise RestrictionError(f"restriction {position} is another one than before")
            return None
        try:
            leaf = parse_leaf(body)
        except LeafError as error:
            raise RestrictionError(f"restriction {position} is no leaf: {error}") from None
        if leaf.kind not in KINDS or leaf.index <= self.last_index:
            raise RestrictionError(f"leaf {leaf.index}, a {leaf.kind:.20}, is not to be restriction {position}")
        if leaf.kind == Kind.TRUST_ROOT:
            self.root_version = max(self.root_version, _version(leaf.resource))
        self.heads.append(head)
        self.last_index = leaf.index
        return leaf

    def begins_with(self, count: int, head: str) -> bool:
        """Says whether the first `count` leaves have the hash `head` (64 hex digits)."""
        return count <= self.count and self.heads[count].hex() == head


def _version(resource: str) -> int:
    number = resource.removeprefix("trustRoots/")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 16 else 0
