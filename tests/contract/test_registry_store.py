"""The registry on SQLite and on a real PostgreSQL: migrations, publishing, paging, concurrent writers, the feed."""

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, event, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from loraport.bundle.digest import sha256_digest
from loraport.log import merkle
from loraport.log.leaf import FIRST, Leaf, parse_leaf
from loraport.log.restrictions import KINDS
from loraport.registry.v1 import adapter_service_pb2 as pb
from loraport.registry.v1 import tenant_service_pb2 as tenant_pb
from services.registry.store import accounts, feed, log
from services.registry.store.database import Database
from services.registry.store.migrate import downgrade, upgrade
from services.registry.store.revisions import find_current
from services.registry.store.tables import METADATA, catalog_state, log_restrictions, revisions, tenants
from services.shared.catalog import TenantItem
from services.shared.catalog_client import CatalogClient
from services.shared.config import ConfigError
from services.shared.errors import LoraportError
from tests.contract.registry_rig import TIMEOUT, Rig, manifest, reason_of, serving, write_config


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = Database(url)
    upgrade(database)
    yield database
    database.close()


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url)) as rig:
        await rig.base()
        await rig.tenant("acme")
        yield rig


def add_tenant(database: Database, tenant: str) -> int:
    with database.write() as transaction:
        row = accounts.add_tenant(transaction, tenant, display_name="", weight=1.0, base_allowed=True, now_us=1)
    return row.epoch


def test_migrations_make_exactly_the_tables(database: Database) -> None:
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
        indexes = {index["name"]: index for index in inspect(connection).get_indexes("revisions")}
    assert indexes["uq_revisions_current"]["unique"]


def test_the_log_grows_and_proves_itself_and_nothing_else_is_let_happen_to_it(database: Database) -> None:
    digest = "sha256:" + "1" * 64
    with database.write() as transaction:
        for index in range(70):
            kind = log.Kind.REVOKED if index == 41 else log.Kind.RECORD
            assert log.append(transaction, kind, resource="r", digest=digest, now_us=index) == index
    with database.read() as connection:
        bodies = [body for _, body in log.list_leaves(connection, start=0, limit=500)]
        state = log.state(connection)
        root = merkle.root(map(merkle.leaf_hash, bodies))
        assert (state.tree_size, state.root_hash, state.revocation_epoch) == (70, root, 42)
        for index in range(70):
            leaf, proof = log.inclusion_proof(connection, index, 70)
            assert merkle.verify_inclusion(leaf, index, 70, proof, root)
            proof = log.consistency_proof(connection, index + 1, 70)
            assert merkle.verify_consistency(index + 1, 70, proof, log.root(connection, index + 1), root)
    for table, column in (("log_leaves", "body"), ("log_nodes", "hash")):
        changes = [f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}"]
        if database.engine.dialect.name == "postgresql":
            changes.append(f"TRUNCATE {table}")
        for change in changes:
            with pytest.raises(DBAPIError, match="append-only"), database.exclusive() as connection:
                connection.execute(text(change))


def test_the_log_is_read_by_its_indexes(database: Database) -> None:
    if database.engine.dialect.name != "sqlite":
        pytest.skip("one planner is enough")
    with database.read() as connection:
        for statement in (log._nodes(3), log._NEWEST, log._NEWEST_REVOCATION):
            values = dict.fromkeys(statement.compile(database.engine).params, 1)
            sql = str(statement.compile(database.engine))
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", tuple(values.values())).all()
            assert not any("SCAN" in row[3] for row in plan), plan
        assert "ix_log_leaves_revocation" in plan[0][3]


async def test_a_revision_knows_the_leaf_of_its_record_also_from_before_it_did(rig: Rig, url: str) -> None:
    for version in (1, 2):
        await rig.active("acme", "pirate", version, f"c{version}")
    await rig.register("acme", manifest("acme", "pirate", 3))
    database = Database(url)
    told = select(revisions.c.version, revisions.c.record_leaf, revisions.c.record_envelope)

    def check() -> None:
        with database.read() as connection:
            rows = connection.execute(told.order_by(revisions.c.version)).all()
            for _, leaf, record in rows[:2]:
                said = parse_leaf(log.leaf_body(connection, leaf))
                assert (said.kind, said.digest) == (log.Kind.RECORD, sha256_digest(record))
            assert (rows[0][1] < rows[1][1], rows[2][1]) == (True, 0)

    check()
    with database.exclusive() as connection:
        connection.execute(text("ALTER TABLE revisions DROP COLUMN record_leaf"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0003'"))
    upgrade(database, to="0004")
    check()
    database.close()


async def test_what_was_taken_back_is_found_also_where_it_was_before_there_was_a_list(rig: Rig, url: str) -> None:
    one, two = [await rig.active("acme", "pirate", version, f"c{version}") for version in (1, 2)]
    await rig.revoke(one.name)
    share = pb.ShareAdapterRequest(name="tenants/acme/adapters/pirate", shared_tenants=["tenants/globex"])
    await rig.tenant("globex")
    await rig.adapters().ShareAdapter(share, timeout=TIMEOUT)
    refused = manifest("acme", "pirate", 3, content="c3")
    await rig.register("acme", refused)
    await rig.admit(refused, admitted=False)
    database = Database(url)
    told = select(log_restrictions.c.position, log_restrictions.c.leaf_index, log_restrictions.c.head)
    records = select(revisions.c.version).where(revisions.c.record_leaf > 0).order_by(revisions.c.version)

    def listed() -> tuple[list[object], list[object]]:
        with database.read() as connection:
            rows = [tuple(row) for row in connection.execute(told.order_by(log_restrictions.c.position))]
            kinds = [parse_leaf(log.leaf_body(connection, index)).kind for _, index, _ in rows]
            log.require_computed(log.compute(connection), log.state(connection))
            assert kinds == ["TRUST_ROOT", "REVOKED", "SHARED", "QUARANTINED"]
            return [(place, index, bytes(head)) for place, index, head in rows], connection.execute(
                records
            ).scalars().all()

    before = listed()
    assert before[1] == [two.version]
    downgrade(database, to="0008")
    with database.exclusive() as connection:
        connection.execute(text("UPDATE revisions SET record_leaf = 3 WHERE version = 1"))
    upgrade(database)
    assert listed() == before
    with pytest.raises(DBAPIError, match="append-only"), database.exclusive() as connection:
        connection.execute(text("DELETE FROM log_restrictions"))
    database.close()


def older_append(connection: Connection, index: int, kind: str) -> None:
    """Appends a leaf as a release without the list does."""
    leaf = Leaf(index=index, time=1, kind=kind, resource="", digest="sha256:" + "0" * 64, previous=FIRST).body()
    values = {"index": index, "body": leaf}
    connection.execute(
        text("INSERT INTO log_leaves (leaf_index, revocation, body) VALUES (:index, FALSE, :body)"), values
    )
    made = merkle.new_nodes(index, merkle.leaf_hash(leaf), [])
    connection.execute(
        text("INSERT INTO log_nodes (level, node_index, hash) VALUES (:level, :index, :hash)"),
        [{"level": level, "index": place, "hash": value} for (level, place), value in made],
    )


def test_an_older_release_that_still_writes_leaves_no_gap_in_what_was_taken_back(url: str) -> None:
    database = Database(url)
    upgrade(database)
    for kind in KINDS:
        with pytest.raises(DBAPIError, match="not in log_restrictions"), database.write() as transaction:
            older_append(transaction.connection, 0, kind)
    with database.write() as transaction:
        older_append(transaction.connection, 0, "RECORD")
    with database.read() as connection:
        log.require_computed(log.compute(connection), log.state(connection))
    database.close()


def test_what_an_older_release_writes_while_the_list_is_made_is_in_it(url: str) -> None:
    database = Database(url)
    if database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has one writer at a time")
    upgrade(database, to="0008")
    thread = threading.Thread(target=upgrade, args=(database,))
    with database.write() as transaction:
        older_append(transaction.connection, 0, "REVOKED")
        thread.start()
        waiting = text("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
        found = None
        while thread.is_alive() and found is None:
            time.sleep(0.01)
            with database.read() as connection:
                found = connection.execute(waiting).first()
    thread.join()
    with database.read() as connection:
        assert log.restrictions(connection).count == 1
        log.require_computed(log.compute(connection), log.state(connection))
    database.close()


def test_migrations_run_once_whoever_comes_first(url: str) -> None:
    databases = [Database(url) for _ in range(4)]
    faults: list[BaseException] = []

    def run(database: Database) -> None:
        try:
            upgrade(database)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert faults == []
    assert {database.epoch() for database in databases} == {0}
    for database in databases:
        database.close()


def test_writers_of_two_registries_take_turns(url: str, database: Database) -> None:
    other = Database(url)
    epochs: list[int] = []

    def run(which: Database, prefix: str) -> None:
        for number in range(15):
            epochs.append(add_tenant(which, f"{prefix}{number}"))

    threads = [threading.Thread(target=run, args=(which, prefix)) for which, prefix in ((database, "a"), (other, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(epochs) == list(range(1, 31))
    assert database.epoch() == 30
    other.close()


def test_a_refused_write_leaves_nothing(database: Database) -> None:
    add_tenant(database, "acme")
    with pytest.raises(LoraportError, match="TENANT_EXISTS"):
        add_tenant(database, "acme")
    with pytest.raises(ZeroDivisionError), database.write() as transaction:
        accounts.add_tenant(transaction, "globex", display_name="", weight=1.0, base_allowed=True, now_us=1)
        raise ZeroDivisionError
    assert database.epoch() == 1
    with database.read() as connection:
        assert accounts.find_tenant(connection, "globex") is None


def test_a_view_is_of_one_moment(database: Database) -> None:
    with database.read() as connection:
        assert connection.execute(select(catalog_state.c.epoch)).scalar_one() == 0
        add_tenant(database, "acme")
        assert connection.execute(select(catalog_state.c.epoch)).scalar_one() == 0
        assert accounts.find_tenant(connection, "acme") is None
    assert database.epoch() == 1


def test_a_view_cannot_write_on_postgresql(database: Database) -> None:
    if database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has no read-only transactions")
    with pytest.raises(Exception, match="read-only"), database.read() as connection:
        connection.execute(text("DELETE FROM tenants"))


def test_the_feed_pages_and_tells_changes(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "CHUNK", 2)
    names = ["a", "a-1", "a1", "b", "z"]
    for name in reversed(names):
        add_tenant(database, name)
    kind = next(kind for kind in feed.kinds(artefacts_only=False) if kind[0] is tenants)
    chunks = list(feed.scan(database, kind))
    assert [len(chunk) for chunk in chunks] == [2, 2, 1]
    assert [item.tenant for chunk in chunks for item in chunk] == names
    epoch, items = feed.changes(database, 3, artefacts_only=False)
    assert (epoch, items) == (5, [TenantItem("a-1", 1.0, True), TenantItem("a", 1.0, True)])
    assert feed.changes(database, 0, artefacts_only=True) == (5, [])
    assert feed.changes(database, 5, artefacts_only=False) == (5, [])


def test_the_feed_is_read_by_index(database: Database) -> None:
    if database.engine.dialect.name != "sqlite":
        pytest.skip("one planner is enough")
    with database.read() as connection:
        for table, statement, key, _ in feed.kinds(artefacts_only=False):
            query = statement.where(table.c.epoch > 5).order_by(table.c.epoch, *key)
            compiled = query.compile(connection, compile_kwargs={"literal_binds": True})
            plan = " ".join(str(row) for row in connection.execute(text(f"EXPLAIN QUERY PLAN {compiled}")))
            assert f"ix_{table.name}_epoch" in plan, plan


async def test_publishing_works_on_every_database(rig: Rig) -> None:
    one = await rig.active("acme", "pirate", 1, "one")
    await rig.alias("tenants/acme/adapters/pirate/aliases/live", one.revision_id)
    bad = manifest("acme", "pirate", 2, content="two")
    await rig.register("acme", bad)
    quarantined = await rig.admit(bad, admitted=False)
    two = await rig.active("acme", "pirate", 3, "two")
    assert two.revision_id == quarantined.revision_id
    await rig.revoke(one.name)
    client = CatalogClient(rig.channel("loader"), artefacts_only=True)
    client.start()
    assert await client.wait_synced(TIMEOUT)
    assert {item.version: item.state for item in client.view.revisions.values()} == {1: "REVOKED", 3: "ACTIVE"}
    await client.stop()
    listed = await rig.adapters().ListRevisions(
        pb.ListRevisionsRequest(parent="tenants/acme/adapters/pirate"), timeout=TIMEOUT
    )
    assert [revision.version for revision in listed.revisions] == [3, 2, 1]


async def test_content_has_one_current_row(rig: Rig) -> None:
    one = await rig.active("acme", "pirate", 1, "one")
    database = rig.service._database
    with database.read() as connection:
        row = connection.execute(select(revisions).where(revisions.c.revision_id == one.revision_id)).one()
    with pytest.raises(IntegrityError), database.write() as transaction:
        transaction.connection.execute(insert(revisions).values(dict(row._mapping) | {"version": 2}))


async def test_many_callers_at_once_get_one_winner_each(rig: Rig) -> None:
    async def create(tenant: str, request_id: str) -> str:
        request = tenant_pb.CreateTenantRequest(tenant_id=tenant, request_id=request_id)
        return (await rig.tenants().CreateTenant(request, timeout=TIMEOUT)).name

    async def attempt(tenant: str) -> str:
        try:
            return await create(tenant, "")
        except Exception:
            return await reason_of(create(tenant, ""))

    results = await asyncio.gather(*(attempt("rival") for _ in range(12)))
    assert sorted(results) == ["TENANT_EXISTS"] * 11 + ["tenants/rival"]
    request_id = str(uuid.uuid4())
    assert set(await asyncio.gather(*(create("same", request_id) for _ in range(12)))) == {"tenants/same"}


def test_a_database_of_a_newer_release_is_refused(url: str, tmp_path: Path) -> None:
    database = Database(url)
    upgrade(database)
    with database.exclusive() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'ffff'"))
    database.close()

    async def start() -> None:
        async with serving(write_config(tmp_path, database_url=url)):
            pass

    with pytest.raises(ConfigError, match="database_url"):
        asyncio.run(start())


async def test_a_busy_database_is_a_typed_error_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.registry.store.database.BUSY_TIMEOUT_S", 0)
    async with serving(write_config(tmp_path)) as rig:
        await rig.tenant("acme")
        other = Database(f"sqlite:///{tmp_path}/registry.db")
        with other.write():
            assert await reason_of(rig.tenant("globex")) == "REGISTRY_UNAVAILABLE"
            get = tenant_pb.GetTenantRequest(name="tenants/acme")
            assert (await rig.tenants().GetTenant(get, timeout=TIMEOUT)).name == "tenants/acme"
        other.close()
        assert (await rig.tenant("globex")).name == "tenants/globex"


async def test_lost_connections_are_replaced(rig: Rig) -> None:
    if rig.service._database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has no connections to lose")
    with rig.service._database.exclusive() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        )
    assert (await rig.tenant("globex")).name == "tenants/globex"


async def test_a_revision_is_found_by_index(rig: Rig) -> None:
    """Whatever the planner knows of the partial index: by its id, a revision is one search and never a scan."""
    await rig.active("acme", "pirate", 1, "one")
    database = rig.service._database
    if database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL scans a table of one row")
    asked: list[str] = []
    with database.read() as connection:
        event.listen(connection, "before_cursor_execute", lambda _c, _cursor, statement, *_: asked.append(statement))
        find_current(connection, "sha256:" + "0" * 64)
        plan = " ".join(str(row) for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {asked[-1]}", ("x",)))
    assert "USING INDEX uq_revisions_current" in plan, plan
