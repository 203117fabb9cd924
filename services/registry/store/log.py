"""The transparency log in SQL: leaves in order, and the hash of every complete subtree.

A leaf is appended in the transaction of the change that it tells of, so there is never one without the other; writers
take turns, so the indexes have no gap. Appending reads and writes O(log n) rows (two on average), a proof reads
O(log n). No row is ever changed: the database refuses it (migration 0002).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sqlalchemy import Connection, Select, and_, bindparam, func, insert, or_, select, text

from loraport.log import merkle
from loraport.log.checkpoint import Floor
from loraport.log.leaf import FIRST, REVOCATIONS, Kind, Leaf
from loraport.log.restrictions import FIRST_HEAD, KINDS, Listed, next_head
from services.registry.store.database import Transaction
from services.registry.store.tables import catalog_state, log_leaves, log_nodes, log_restrictions
from services.shared.errors import LoraportError

# Built once: appending is on the way of every write.
_NEWEST = select(func.max(log_leaves.c.leaf_index))
# The bare column, as the partial index has it; SQLite does not see that "= 1" means the same.
_NEWEST_REVOCATION = _NEWEST.where(text("revocation"))
_ADD_LEAF, _ADD_NODES, _ADD_RESTRICTION = insert(log_leaves), insert(log_nodes), insert(log_restrictions)
_LAST_RESTRICTION = (
    select(log_restrictions.c.position, log_restrictions.c.head).order_by(log_restrictions.c.position.desc()).limit(1)
)
_HEAD = select(log_restrictions.c.head).where(log_restrictions.c.position == bindparam("position"))
# Rows that are read at a time where all are.
_READ = 1000
_BODIES = (
    select(log_leaves.c.body)
    .where(log_leaves.c.leaf_index >= bindparam("start"))
    .order_by(log_leaves.c.leaf_index)
    .execution_options(yield_per=_READ)
)
_BODY = select(log_leaves.c.body).where(log_leaves.c.leaf_index == bindparam("index"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """The log at one moment, with the catalog epoch of that moment. `listed` is the list of restrictions that is
    stored beside it; what else there is is as in a checkpoint."""

    tree_size: int
    root_hash: bytes
    catalog_epoch: int
    revocation_epoch: int
    listed: Listed


def append(transaction: Transaction, kind: Kind, *, resource: str, digest: str, now_us: int) -> int:
    """Appends a leaf and returns its index; `digest` is what `Kind` says of it."""
    connection = transaction.connection
    # Also what no watcher is told of, such as a signer, is a change: a checkpoint of it has an epoch of its own.
    epoch = transaction.epoch()
    size = _size(connection)
    needed = merkle.merged(size)
    # The leaf before is one of the subtrees to merge with, or else has to be read beside them.
    before = [(0, size - 1)] if size else []
    hashes = _read(connection, {*needed, *before})
    previous = hashes[before[0]].hex() if size else FIRST
    leaf = Leaf(
        index=size, time=now_us // 1_000_000, kind=kind, resource=resource, digest=digest, previous=previous
    ).body()
    if kind in KINDS:
        # Before the leaf: the database refuses one that is to be in the list and is not.
        listed = restrictions(connection)
        row = {"position": listed.count, "leaf_index": size, "head": next_head(listed.head, leaf), "epoch": epoch}
        connection.execute(_ADD_RESTRICTION, row)
    connection.execute(_ADD_LEAF, {"leaf_index": size, "revocation": kind in REVOCATIONS, "body": leaf})
    hashed = transaction.leaves[size] = merkle.leaf_hash(leaf)
    made = merkle.new_nodes(size, hashed, [hashes[node] for node in needed])
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
        listed=restrictions(connection),
    )


@dataclass(frozen=True, slots=True)
class Computed:
    """What the bodies of the leaves give, whatever is stored beside them. The frontier is not to be changed."""

    frontier: merkle.Frontier = field(default_factory=merkle.Frontier)
    listed: Listed = field(default_factory=Listed)


def compute(connection: Connection, since: Computed | None = None) -> Computed:
    """Reads the leaves behind `since`, the whole log without it: 0.35 s for 100,000."""
    since = since or Computed()
    frontier, listed = since.frontier.copy(), since.listed
    for (body,) in connection.execute(_BODIES, {"start": frontier.size}):
        body = bytes(body)
        frontier.append(merkle.leaf_hash(body))
        listed = listed.grown(body)
    return Computed(frontier, listed)


def require_computed(found: Computed, state: LogState) -> None:
    """Raises LoraportError (LOG_DAMAGED) unless the leaves give what is stored beside them, as `state` has it."""
    size = found.frontier.size
    if (size, found.frontier.root()) != (state.tree_size, state.root_hash):
        raise LoraportError("LOG_DAMAGED", f"the log's {size} leaves are not those that its hashes are of")
    if found.listed != state.listed:
        why = f"the log takes back {found.listed.count} times, the list beside it says otherwise"
        raise LoraportError("LOG_DAMAGED", why)


def require_extension(connection: Connection, state: LogState, last: Floor) -> None:
    """Raises LoraportError (LOG_DAMAGED) unless the log, as `state` has it, begins with the one of which `last` was
    signed."""
    if state.tree_size < last.tree_size:
        raise LoraportError("LOG_DAMAGED", f"the log had {last.tree_size} leaves and has {state.tree_size}")
    if root(connection, last.tree_size).hex() != last.root_hash:
        raise LoraportError("LOG_DAMAGED", f"the first {last.tree_size} leaves are not those that were signed")
    head = restriction_head(connection, last.restriction_count)
    if head is None or head.hex() != last.restriction_head:
        raise LoraportError("LOG_DAMAGED", f"the first {last.restriction_count} restrictions are not those signed")


def require_appended(connection: Connection, appended: Mapping[int, bytes]) -> None:
    """Raises LoraportError (LOG_DAMAGED) unless the leaves of these indexes have these hashes."""
    if not appended:
        return
    bodies = connection.execute(_BODIES, {"start": min(appended)})
    found = {index: merkle.leaf_hash(bytes(body)) for index, (body,) in enumerate(bodies, min(appended))}
    for index, value in appended.items():
        if found.get(index) != value:
            raise LoraportError("LOG_DAMAGED", f"leaf {index} was committed and is gone, or another one")


def restriction_head(connection: Connection, count: int) -> bytes | None:
    """Returns the hash of the list of the first `count` restrictions, None when there are fewer."""
    if count == 0:
        return FIRST_HEAD
    head = connection.execute(_HEAD, {"position": count - 1}).scalar()
    return None if head is None else bytes(head)


def restrictions(connection: Connection) -> Listed:
    """Returns length and hash of the list of restrictions, as the database has it."""
    last = connection.execute(_LAST_RESTRICTION).first()
    return Listed() if last is None else Listed(int(last.position) + 1, bytes(last.head))


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
