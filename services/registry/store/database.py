"""Connections and transactions: one way to read, one way to write.

Writers take turns. On SQLite a write begins with BEGIN IMMEDIATE, on PostgreSQL it first locks the row of the catalog
epoch; either way it sees everything that was committed before it, epochs are given out in the order of commits, and a
reader who sees epoch N sees every change up to N. The registry's writes are people publishing, so the turn-taking
costs nothing that anybody would notice.
"""

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Connection, Engine, bindparam, create_engine, event, make_url, select, update
from sqlalchemy.exc import DBAPIError, OperationalError

from services.registry.ports import EpochListener
from services.registry.store.tables import catalog_state
from services.shared.errors import LoraportError

log = structlog.get_logger()

BUSY_TIMEOUT_S = 10
_IMMEDIATE = "loraport_immediate"
# Built once, here and in all of the store: building a statement around its values took longer than running it.
_EPOCH = select(catalog_state.c.epoch)
_TURN = _EPOCH.with_for_update()
_ADVANCE = update(catalog_state).values(epoch=bindparam("newest"))


class Transaction:
    """One write. `epoch()` is the epoch of whatever is changed in it."""

    def __init__(self, connection: Connection, last_epoch: int) -> None:
        self.connection = connection
        self._last_epoch = last_epoch
        self.changed = False
        # Hashes of the log's leaves that it appends, by index.
        self.leaves: dict[int, bytes] = {}

    def epoch(self) -> int:
        """Returns the catalog epoch of this transaction's changes; asking means that there are some."""
        self.changed = True
        return self._last_epoch + 1


class Database:
    """A pool of connections to one database."""

    def __init__(self, url: str, *, listener: EpochListener | None = None) -> None:
        self.engine = _engine(url)
        self._listener = listener
        self._turn = threading.Lock()
        # What was committed through here and nobody has signed yet, by index in the log.
        self._unsigned: dict[int, bytes] = {}

    def listen(self, listener: EpochListener) -> None:
        """Sets who hears of committed changes."""
        self._listener = listener

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Gives a read-only view of one moment.

        Raises:
            LoraportError: REGISTRY_UNAVAILABLE.
        """
        with _translated(), self.engine.connect() as connection:
            if self.engine.dialect.name == "postgresql":
                connection = connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            yield connection

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """Gives a transaction that is committed at the end of the block, or rolled back when it raises.

        Raises:
            LoraportError: REGISTRY_UNAVAILABLE or STORAGE_FULL.
        """
        with self._turn, self.exclusive() as connection:
            last = connection.execute(_TURN).scalar_one()
            transaction = Transaction(connection, last)
            yield transaction
            if transaction.changed:
                connection.execute(_ADVANCE, {"newest": last + 1})
        self._unsigned |= transaction.leaves
        if transaction.changed and self._listener is not None:
            self._listener(last + 1)

    @contextmanager
    def exclusive(self) -> Iterator[Connection]:
        """Gives a transaction that needs no tables yet; on SQLite it is the database's only writer.

        Raises:
            LoraportError: REGISTRY_UNAVAILABLE or STORAGE_FULL.
        """
        options = {_IMMEDIATE: True}
        with _translated(), self.engine.connect() as connection:
            connection.execution_options(**options)
            with connection.begin():
                yield connection

    def unsigned(self) -> dict[int, bytes]:
        """Returns the hashes of leaves that were committed through here and not told to be `signed` yet."""
        return self._unsigned.copy()

    def signed(self, leaves: Iterable[int]) -> None:
        """Takes note that a signed tree has these leaves."""
        for index in leaves:
            self._unsigned.pop(index, None)

    def epoch(self) -> int:
        """Returns the newest committed epoch. Raises LoraportError (REGISTRY_UNAVAILABLE)."""
        with self.read() as connection:
            return int(connection.execute(_EPOCH).scalar_one())

    @property
    def folder(self) -> str | None:
        """The directory of the database's file; None when it is a server's."""
        url = self.engine.url
        return str(Path(url.database).parent) if url.get_backend_name() == "sqlite" and url.database else None

    def close(self) -> None:
        """Closes every connection."""
        self.engine.dispose()


@contextmanager
def _translated() -> Iterator[None]:
    """Turns the database's own failures into ours; anything else passes as the bug that it is."""
    try:
        yield
    except DBAPIError as error:
        if "disk is full" in str(error.orig) or "No space left" in str(error.orig):
            raise LoraportError("STORAGE_FULL") from error
        if isinstance(error, OperationalError) or error.connection_invalidated:
            log.error("database unavailable", why=type(error.orig).__name__)
            raise LoraportError("REGISTRY_UNAVAILABLE", retry_after_s=1.0) from error
        raise


def _engine(url: str) -> Engine:
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ValueError("database_url must name a file: sqlite:////path/registry.db")
        Path(parsed.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        engine = create_engine(parsed, pool_size=8, max_overflow=24, json_deserializer=_read_json)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    if parsed.get_backend_name() == "postgresql":
        return create_engine(parsed, pool_size=8, max_overflow=24, pool_pre_ping=True)
    raise ValueError(f"database_url must be of sqlite or postgresql, not {parsed.get_backend_name()}")


def _read_json(text: str) -> Any:
    """Reads a JSON column. Nearly all of them are empty lists, and a page has hundreds."""
    return [] if text == "[]" else json.loads(text)


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver's own transaction handling begins late and commits before DDL; `_begin_sqlite` begins instead.
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000}")
    connection.execute("PRAGMA journal_mode = WAL")
    # In WAL mode NORMAL may lose the newest commits when the power fails; a revocation must not be lost.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite(connection: Connection) -> None:
    immediate = connection.get_execution_options().get(_IMMEDIATE)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
