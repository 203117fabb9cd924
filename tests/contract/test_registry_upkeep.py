"""A registry's backup, its restoration on either database, and migrations forward and back."""

import asyncio
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import insert, select, text

from services.registry.store import log
from services.registry.store.database import Database
from services.registry.store.dump import DumpError, backup, restore
from services.registry.store.migrate import downgrade, head, upgrade
from services.registry.store.tables import METADATA, audit_events, log_leaves, tenants
from tests.contract.registry_rig import serving, write_config

VERSIONS = Path(__file__).resolve().parents[2] / "services/registry/migrations/versions"


def everything(database: Database) -> dict[str, list[tuple[object, ...]]]:
    """Returns all rows of all tables."""
    with database.read() as connection:
        return {
            table.name: [
                tuple(bytes(v) if isinstance(v, memoryview) else v for v in row)
                for row in connection.execute(select(table).order_by(*table.primary_key.columns))
            ]
            for table in METADATA.sorted_tables
        }


async def filled(url: str, folder: Path) -> Database:
    """Returns a database with a history: tenants, a base, a signed revision, audit events, a log."""
    async with serving(write_config(folder, database_url=url)) as rig:
        await rig.base()
        await rig.tenant("acme")
        one = await rig.active("acme", "helper", 1, "one")
        await rig.alias("tenants/acme/adapters/helper/aliases/live", one.revision_id)
    return Database(url)


async def test_what_is_restored_is_what_was_and_a_registry_goes_on_with_it(
    url: str, tmp_path: Path, empty: Callable[[], str]
) -> None:
    database = await filled(url, tmp_path)
    before = everything(database)
    header = backup(database, tmp_path / "registry.backup", now_us=1)
    database.close()
    assert header["rows"]["revisions"] == 1
    assert header["tree_size"] > 3

    target = empty()
    restored = Database(target)
    assert restore(restored, tmp_path / "registry.backup") == header
    assert everything(restored) == before
    restored.close()

    # It is not only the same rows: the next change gets the next numbers, and the log grows from where it was.
    async with serving(write_config(tmp_path, database_url=target)) as rig:
        await rig.tenant("later")
    grown = Database(target)
    with grown.read() as connection:
        assert log.state(connection).tree_size > header["tree_size"]
        assert connection.execute(select(tenants.c.tenant).order_by(tenants.c.tenant)).scalars().all() == [
            "acme",
            "later",
        ]
        numbers = connection.execute(select(audit_events.c.sequence).order_by(audit_events.c.sequence)).scalars().all()
    assert list(numbers) == list(range(1, len(numbers) + 1))
    grown.close()


@pytest.fixture
def empty(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], str]:
    """Gives an empty database of the other kind, where there is one: a backup moves from one to the other."""

    def make() -> str:
        if url.startswith("postgresql"):
            return f"sqlite:///{tmp_path}/restored.db"
        from tests.contract import postgres

        if postgres.find_binary("initdb") is None:
            return f"sqlite:///{tmp_path}/restored.db"
        import psycopg

        socket = request.getfixturevalue("postgres_socket")
        with psycopg.connect(f"host={socket} user=loraport dbname=postgres", autocommit=True) as connection:
            connection.execute("DROP DATABASE IF EXISTS restored")
            connection.execute("CREATE DATABASE restored")
        return f"postgresql+psycopg://loraport@/restored?host={socket}"

    return make


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup to be damaged, beside the database that it is of."""
    folder = tmp_path_factory.mktemp("kept")
    database = asyncio.run(filled(f"sqlite:///{folder}/registry.db", folder))
    backup(database, folder / "registry.backup", now_us=1)
    database.close()
    return folder / "registry.backup"


def rewritten(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> Path:
    """Returns a copy of a backup with other lines, and the sum of those."""
    import hashlib

    lines = change(gzip.decompress(path.read_bytes()).splitlines(keepends=True)[:-1])
    last = json.dumps({"sha256": hashlib.sha256(b"".join(lines)).hexdigest()}).encode() + b"\n"
    target = path.with_name("changed.backup")
    target.write_bytes(gzip.compress(b"".join([*lines, last])))
    return target


def without_a_leaf(lines: list[bytes]) -> list[bytes]:
    leaves = [line for line in lines if line.startswith(b'["log_leaves"')]
    header = json.loads(lines[0])
    header["rows"]["log_leaves"] -= 1
    return [json.dumps(header).encode() + b"\n", *(line for line in lines[1:] if line != leaves[-1])]


def with_another_leaf(lines: list[bytes]) -> list[bytes]:
    """Changes a leaf's body and nothing else: the stored hashes still say what they said."""
    leaves = [line for line in lines if line.startswith(b'["log_leaves"')]
    row = json.loads(leaves[0])
    row[1][-1] = json.loads(leaves[1])[1][-1]
    return [json.dumps(row).encode() + b"\n" if line == leaves[0] else line for line in lines]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: _cut(path), "not whole"),
        (lambda path: _flipped(path), "not whole"),
        (lambda path: rewritten(path, lambda lines: lines[:-1]), "rows that it names"),
        (lambda path: rewritten(path, without_a_leaf), "root that it names"),
        (lambda path: rewritten(path, with_another_leaf), "log is damaged: .* hashes"),
        (lambda path: rewritten(path, lambda lines: [lines[0].replace(b"loraport", b"other"), *lines[1:]]), "not a"),
        (lambda path: rewritten(path, lambda lines: [_of_migration(lines[0], "9999"), *lines[1:]]), "migration 9999"),
    ],
)
def test_a_damaged_backup_is_refused_and_leaves_the_database_empty(
    kept: Path, tmp_path: Path, damage: Callable[[Path], Path], says: str
) -> None:
    database = Database(f"sqlite:///{tmp_path}/restored.db")
    with pytest.raises(DumpError, match=says):
        restore(database, damage(kept))
    with database.read() as connection:
        assert not connection.execute(select(log_leaves)).all()
    restore(database, kept)
    database.close()


def _cut(path: Path) -> Path:
    target = path.with_name("cut.backup")
    target.write_bytes(path.read_bytes()[:-200])
    return target


def _flipped(path: Path) -> Path:
    data = gzip.decompress(path.read_bytes()).replace(b"acme", b"evil", 1)
    target = path.with_name("flipped.backup")
    target.write_bytes(gzip.compress(data))
    return target


def _of_migration(line: bytes, number: str) -> bytes:
    return json.dumps({**json.loads(line), "migration": number}).encode() + b"\n"


def test_nothing_is_overwritten(kept: Path) -> None:
    database = Database(f"sqlite:///{kept.parent}/registry.db")
    with pytest.raises(DumpError, match="there already"):
        backup(database, kept, now_us=1)
    with pytest.raises(DumpError, match="not empty"):
        restore(database, kept)
    database.close()
    assert kept.stat().st_mode & 0o077 == 0


async def test_migrations_go_forward_and_back(url: str, tmp_path: Path) -> None:
    database = await filled(url, tmp_path)
    before = everything(database)
    downgrade(database, to="0005")
    with database.read() as connection:
        names = connection.execute(text("SELECT tenant FROM tenants")).scalars().all()
        assert MigrationContext.configure(connection).get_current_revision() == "0005"
    assert names == ["acme"]
    upgrade(database)
    # A list that is made anew is as old as the catalog.
    before["log_restrictions"] = [(*row[:-1], 0) for row in before["log_restrictions"]]
    assert everything(database) == before
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    with pytest.raises(NotImplementedError, match="0005 has no way back"):
        downgrade(database, to="0004")
    with pytest.raises(CommandError):
        downgrade(database, to="0000")
    # What could not be done is not half done.
    with database.read() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == head()
    assert everything(database) == before
    with database.write() as transaction:
        transaction.connection.execute(insert(tenants), [_tenant("still-here")])
    database.close()


def _tenant(name: str) -> dict[str, object]:
    return {
        "tenant": name,
        "display_name": "",
        "weight": 1.0,
        "base_allowed": True,
        "quota": {},
        "create_us": 1,
        "epoch": 1,
    }


def test_every_migration_says_whether_there_is_a_way_back() -> None:
    for path in sorted(VERSIONS.glob("0*.py")):
        assert re.search(r"^def downgrade\(\) -> None:", path.read_text(), re.M), path.name
