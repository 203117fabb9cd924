"""The transparency log in SQL: leaves in order, and the hash of every complete subtree.

A leaf is appended in the transaction of the change that it tells of, so there is never one without the other; writers
take turns, so the indexes have no gap. Appending reads and writes O(log n) rows (two on average), a proof reads
O(log n). No row is ever changed: the database refuses it (migration 0002).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Connection, Select, and_, bindparam, func, insert, or_, select, text

from loraport.log import merkle
from loraport.log.leaf import FIRST, REVOCATIONS, Kind, Leaf
from services.registry.store.database import Transaction
from services.registry.store.tables import catalog_state, log_leaves, log_nodes
from services.shared.errors import LoraportError

# Built once: appending is on the way of every write.
_NEWEST = select(func.max(log_leaves.c.leaf_index))
# The bare column, as the partial index has it; SQLite does not see that "= 1" means the same.
_NEWEST_REVOCATION = _NEWEST.where(text("revocation"))
_ADD_LEAF, _ADD_NODES = insert(log_leaves), insert(log_nodes)
_BODY = select(log_leaves.c.body).where(log_leaves.c.leaf_index == bindparam("index"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """The log at one moment, with the catalog epoch of that moment. `revocation_epoch` is as in a checkpoint."""

    tree_size: int
    root_hash: bytes
    catalog_epoch: int
    revocation_epoch: int


def append(transaction: Transaction, kind: Kind, *, resource: str, digest: str, now_us: int) -> int:
    """Appends a leaf and returns its index; `digest` is what `Kind` says of it."""
    connection = transaction.connection
    # Also what no watcher is told of, such as a signer, is a change: a checkpoint of it has an epoch of its own.
    transaction.epoch()
    size = _size(connection)
    needed = merkle.merged(size)
    # The leaf before is one of the subtrees to merge with, or else has to be read beside them.
    before = [(0, size - 1)] if size else []
    hashes = _read(connection, {*needed, *before})
    previous = hashes[before[0]].hex() if size else FIRST
    leaf = Leaf(
        index=size, time=now_us // 1_000_000, kind=kind, resource=resource, digest=digest, previous=previous
    ).body()
    connection.execute(_ADD_LEAF, {"leaf_index": size, "revocation": kind in REVOCATIONS, "body": leaf})
    made = merkle.new_nodes(size, merkle.leaf_hash(leaf), [hashes[node] for node in needed])
    rows = [{"level": level, "node_index": index, "hash": value} for (level, index), value in made]
    connection.execute(_ADD_NODES, rows)
    return size


def state(connection: Connection) -> LogState:
    """Returns the log as this connection sees it."""
    size = _size(connection)
    return LogState(
        tree_size=size,
        root_hash=root(connection, size),
        catalog_epoch=int(connection.execute(select(catalog_state.c.epoch)).scalar_one()),
        revocation_epoch=revocation_epoch(connection),
    )


def revocation_epoch(connection: Connection) -> int:
    """Returns the size of the log when its newest revocation was in it; 0 without one."""
    newest = connection.execute(_NEWEST_REVOCATION).scalar()
    return 0 if newest is None else int(newest) + 1


def root(connection: Connection, size: int) -> bytes:
    """Returns the root of the first `size` leaves, which must be there."""
    return _hashes(connection, [(0, size)])[0]


def inclusion_proof(connection: Connection, index: int, size: int) -> tuple[bytes, list[bytes]]:
    """Returns (hash of the leaf, proof) for a tree of `size` leaves.

    Raises:
        LoraportError: INVALID_REQUEST.
    """
    _require_size(connection, size, "tree_size")
    if not 0 <= index < size:
        raise LoraportError("INVALID_REQUEST", f"leaf_index must be in [0, {size})", subject="leaf_index")
    leaf, *proof = _hashes(connection, [(index, index + 1), *merkle.inclusion_ranges(index, size)])
    return leaf, proof


def leaf_body(connection: Connection, index: int) -> bytes:
    """Returns the canonical JSON of a leaf, which must be there."""
    return bytes(connection.execute(_BODY, {"index": index}).scalar_one())


def consistency_proof(connection: Connection, old: int, new: int) -> list[bytes]:
    """Returns the proof that a tree of `old` leaves is a prefix of one of `new`.

    Raises:
        LoraportError: INVALID_REQUEST.
    """
    _require_size(connection, new, "new_tree_size")
    if not 1 <= old <= new:
        raise LoraportError("INVALID_REQUEST", f"old_tree_size must be in [1, {new}]", subject="old_tree_size")
    return _hashes(connection, merkle.consistency_ranges(old, new))


def list_leaves(connection: Connection, *, start: int, limit: int) -> list[tuple[int, bytes]]:
    """Returns (index, body) of leaves in order from `start`, and one more than `limit`."""
    statement = select(log_leaves.c.leaf_index, log_leaves.c.body).where(log_leaves.c.leaf_index >= start)
    rows = connection.execute(statement.order_by(log_leaves.c.leaf_index).limit(limit + 1))
    return [(int(index), bytes(body)) for index, body in rows]


def _size(connection: Connection) -> int:
    newest = connection.execute(_NEWEST).scalar()
    return 0 if newest is None else int(newest) + 1


def _require_size(connection: Connection, size: int, field: str) -> None:
    newest = _size(connection)
    if not 0 <= size <= newest:
        raise LoraportError("INVALID_REQUEST", f"{field} must be in [0, {newest}]", subject=field)


def _hashes(connection: Connection, ranges: list[merkle.Range]) -> list[bytes]:
    """Returns the hashes of ranges of leaves, by one query."""
    known = _read(connection, {node for start, end in ranges for node in merkle.cover(start, end)})
    return merkle.prove(ranges, known.__getitem__)


def _read(connection: Connection, nodes: Iterable[merkle.Node]) -> dict[merkle.Node, bytes]:
    wanted = sorted(nodes)
    if not wanted:
        return {}
    named = {f"{part}{i}": value for i, node in enumerate(wanted) for part, value in zip("li", node, strict=True)}
    found = connection.execute(_nodes(len(wanted)), named)
    hashes = {(level, int(index)): bytes(value) for level, index, value in found}
    if len(hashes) < len(wanted):
        # Somebody has taken rows away beside the registry: nothing may be built on what is left.
        raise LoraportError("LOG_DAMAGED", f"the log lacks {len(wanted) - len(hashes)} of its hashes")
    return hashes


@cache
def _nodes(count: int) -> Select[Any]:
    """Returns the query of so many nodes. Pairs in one list would be a scan of the whole table in SQLite."""
    level, index = log_nodes.c.level, log_nodes.c.node_index
    either = [and_(level == bindparam(f"l{i}"), index == bindparam(f"i{i}")) for i in range(count)]
    return select(level, index, log_nodes.c.hash).where(or_(*either))
