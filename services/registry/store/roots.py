"""The chain of trust roots in SQL. Rows are added and never touched again."""

from typing import NamedTuple

from sqlalchemy import Connection, func, insert, select

from loraport.bundle.digest import sha256_digest
from loraport.log.leaf import Kind
from services.registry.store import log
from services.registry.store.database import Transaction
from services.registry.store.rows import build_all, page
from services.registry.store.tables import trust_roots
from services.shared.paging import Key

_NEWEST = select(func.max(trust_roots.c.version))


class RootRow(NamedTuple):
    """A trust root, and where it is in the log."""

    version: int
    envelope: bytes
    log_index: int
    create_us: int
    epoch: int

    @property
    def name(self) -> str:
        return f"trustRoots/{self.version}"


def newest_version(connection: Connection) -> int:
    """Returns the newest version, 0 without one."""
    return int(connection.execute(_NEWEST).scalar() or 0)


def list_roots(connection: Connection, *, after: Key | None = None, limit: int = 1 << 20) -> list[RootRow]:
    """Returns a page of roots, oldest first, and one more."""
    rows = connection.execute(page(select(trust_roots), (trust_roots.c.version,), after=after, limit=limit))
    return build_all(RootRow, rows)


def add_root(transaction: Transaction, version: int, envelope: bytes, *, now_us: int) -> RootRow:
    """Adds a root, which the caller has verified, and its leaf."""
    epoch, name = transaction.epoch(), f"trustRoots/{version}"
    index = log.append(transaction, Kind.TRUST_ROOT, resource=name, digest=sha256_digest(envelope), now_us=now_us)
    row = RootRow(version=version, envelope=envelope, log_index=index, create_us=now_us, epoch=epoch)
    values = {column.name: getattr(row, column.name) for column in trust_roots.columns}
    transaction.connection.execute(insert(trust_roots).values(values))
    return row
