"""A whole registry as one file, and a database made from one: tables, log and all, on SQLite and PostgreSQL alike.

    line 1      {"schema", "migration", "time_us", "epoch", "tree_size", "root_hash", "rows": {table: count}}
    then        [table, [value, …]] for every row, tables in the order of their references; bytes are {"b": base64}
    last line   {"sha256": of everything before it}

The file is read in one transaction, so it shows one moment of a registry that goes on. What is restored is checked
before it is kept: the counts, the sum, and the log's root, computed anew from its leaves. Private keys are in no
database, so they are in no backup; the pepper is not either.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alembic.migration import MigrationContext
from sqlalchemy import Column, Connection, Integer, LargeBinary, Table, delete, func, insert, select, text

from services.registry.store import log as log_store
from services.registry.store.database import Database
from services.registry.store.migrate import head, upgrade
from services.registry.store.tables import METADATA, catalog_state
from services.shared.errors import LoraportError

SCHEMA = "loraport.registry-backup.v1"
BATCH = 500
# What a line may have: a manifest's envelope is at most 256 KiB, in base64.
MAX_LINE = 4 << 20


class DumpError(ValueError):
    """A backup that cannot be made or used; one line."""


def backup(database: Database, path: Path, *, now_us: int) -> dict[str, Any]:
    """Writes a new file and returns its first line.

    Raises:
        DumpError: the database is of another release, or the file is there already.
        LoraportError: REGISTRY_UNAVAILABLE.
        OSError: the file cannot be written.
    """
    try:
        raw = path.open("xb")
    except FileExistsError:
        raise DumpError(f"{path} is there already") from None
    complete = False
    try:
        path.chmod(0o600)
        with raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file, database.read() as connection:
            header = _header(connection, now_us)
            digest = hashlib.sha256()
            for line in _lines(connection, header):
                digest.update(line)
                file.write(line)
            file.write(_line({"sha256": digest.hexdigest()}))
        complete = True
    finally:
        if not complete:
            path.unlink(missing_ok=True)
    return header


def restore(database: Database, path: Path) -> dict[str, Any]:
    """Fills an empty database from a file and returns the file's first line. All or nothing.

    Raises:
        DumpError: the file is not whole, of another release, or the database is not empty.
        LoraportError: REGISTRY_UNAVAILABLE.
        OSError: the file cannot be read.
    """
    upgrade(database)
    with gzip.open(path, "rb") as file:
        lines = _checked(file)
        header = next(lines)
        if not isinstance(header, dict) or header.get("schema") != SCHEMA:
            raise DumpError(f"{path} is not a registry's backup")
        if header["migration"] != head():
            raise DumpError(
                f"{path} is of migration {header['migration']}, this release's is {head()}: "
                "restore it with the release that made it, then upgrade"
            )
        with database.exclusive() as connection:
            _require_empty(connection)
            connection.execute(delete(catalog_state))
            counts = _fill(connection, lines)
            if counts != header["rows"]:
                raise DumpError(f"{path} does not hold the rows that it names")
            _check_log(connection, header)
            _restart_counters(connection)
    return header


def _header(connection: Connection, now_us: int) -> dict[str, Any]:
    found = MigrationContext.configure(connection).get_current_revision()
    if found != head():
        raise DumpError(f"the database is at migration {found}, this release's is {head()}")
    state = log_store.state(connection)
    rows = {table.name: connection.execute(select(func.count()).select_from(table)).scalar_one() for table in _tables()}
    return {
        "schema": SCHEMA,
        "migration": found,
        "time_us": now_us,
        "epoch": state.catalog_epoch,
        "tree_size": state.tree_size,
        "root_hash": state.root_hash.hex(),
        "rows": rows,
    }


def _tables() -> list[Table]:
    return list(METADATA.sorted_tables)


def _lines(connection: Connection, header: dict[str, Any]) -> Iterator[bytes]:
    yield _line(header)
    for table in _tables():
        found = connection.execution_options(yield_per=BATCH).execute(
            select(table).order_by(*table.primary_key.columns)
        )
        for row in found:
            yield _line([table.name, [_encoded(value) for value in row]])


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode() + b"\n"


def _encoded(value: Any) -> Any:
    return {"b": base64.b64encode(value).decode()} if isinstance(value, bytes | memoryview) else value


def _decoded(column: Column[Any], value: Any) -> Any:
    if isinstance(column.type, LargeBinary) and value is not None:
        return base64.b64decode(value["b"])
    return value


def _checked(file: gzip.GzipFile) -> Iterator[Any]:
    """Yields every line but the last, which must be the sum of them."""
    digest, before = hashlib.sha256(), b""
    try:
        while line := file.readline(MAX_LINE):
            if before:
                digest.update(before)
                yield json.loads(before)
            before = line
        if not before or json.loads(before) != {"sha256": digest.hexdigest()}:
            raise DumpError("the backup is not whole: its sum is not that of its lines")
    except (EOFError, OSError, ValueError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(f"the backup is not whole: {error!s:.100}") from None


def _require_empty(connection: Connection) -> None:
    for table in _tables():
        if table is not catalog_state and connection.execute(select(table).limit(1)).first() is not None:
            raise DumpError(f"the database is not empty: {table.name} has rows; restore into a new one")


def _fill(connection: Connection, lines: Iterator[Any]) -> dict[str, int]:
    tables = {table.name: table for table in _tables()}
    counts = dict.fromkeys(tables, 0)
    rows: list[dict[str, Any]] = []
    current = ""
    for line in lines:
        if not isinstance(line, list) or len(line) != 2 or line[0] not in tables:
            raise DumpError("the backup has a line that is no row")
        name, values = line
        if rows and (name != current or len(rows) >= BATCH):
            connection.execute(insert(tables[current]), rows)
            rows = []
        current = name
        columns = tables[name].columns
        rows.append({c.name: _decoded(c, value) for c, value in zip(columns, values, strict=True)})
        counts[name] += 1
    if rows:
        connection.execute(insert(tables[current]), rows)
    return counts


def _check_log(connection: Connection, header: dict[str, Any]) -> None:
    """Computes the log's root from the leaves alone: stored hashes must not speak for themselves."""
    state = log_store.state(connection)
    try:
        log_store.require_computed(log_store.compute(connection), state)
    except LoraportError as error:
        raise DumpError(f"the backup's log is damaged: {error.message}") from None
    if (header["tree_size"], header["root_hash"]) != (state.tree_size, state.root_hash.hex()):
        raise DumpError("the backup's log does not have the root that it names")


def _restart_counters(connection: Connection) -> None:
    """Rows came with their numbers; PostgreSQL's own counters have to go on after them."""
    if connection.dialect.name != "postgresql":
        return
    for table in _tables():
        for column in table.primary_key.columns:
            if isinstance(column.type, Integer) and column.autoincrement is not False:
                connection.execute(
                    text(
                        f"SELECT setval(s, COALESCE((SELECT MAX({column.name}) FROM {table.name}), 1)) "  # noqa: S608
                        f"FROM pg_get_serial_sequence('{table.name}', '{column.name}') AS s WHERE s IS NOT NULL"
                    )
                )
