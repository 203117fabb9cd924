"""Somebody with a hand on the registry's database takes back what was committed, before it was signed or after."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import Connection, create_engine

from loraport.bundle.envelope import SigningKey
from loraport.log.leaf import Kind
from services.registry.checkpoints import Checkpoints
from services.registry.hub import EpochHub
from services.registry.store import log
from services.registry.store.database import Database
from services.registry.store.migrate import upgrade
from services.shared.clock import SystemClock
from services.shared.errors import LoraportError

NAME = "tenants/acme/adapters/bot/revisions/v"
DIGEST = "sha256:" + "1" * 64


class World:
    """A registry's checkpoints without its server: nothing is signed but when a test asks."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.database = Database(url)
        upgrade(self.database)
        self._hub = EpochHub()
        self.start()

    def start(self) -> None:
        """Begins as a process does that has signed nothing."""
        key = SigningKey.generate()
        self.checkpoints = Checkpoints(self.database, key, self._hub, SystemClock(), life_s=600, interval_s=120)

    def append(self, kind: Kind, version: int, *, by: Database | None = None) -> None:
        with (by or self.database).write() as transaction:
            log.append(transaction, kind, resource=f"{NAME}{version}", digest=DIGEST, now_us=1)

    async def sign(self) -> tuple[int, int]:
        """Returns (leaves, restrictions) of what is signed now."""
        self._hub.advance(self.database.epoch())
        signed = (await self.checkpoints.newest()).checkpoint
        return signed.tree_size, signed.restriction_count

    async def refusal(self) -> str:
        with pytest.raises(LoraportError) as caught:
            await self.sign()
        return caught.value.reason

    def hand(self, *statements: str) -> None:
        engine = create_engine(self.url)
        with engine.begin() as database:
            if engine.name == "postgresql":
                database.exec_driver_sql("SET LOCAL session_replication_role = replica")
            for statement in statements:
                database.exec_driver_sql(statement)
        engine.dispose()

    def drop_rows_of_the_list(self) -> None:
        """Has the database leave out of the list whatever is put into it from now on."""
        if self.database.engine.dialect.name == "postgresql":
            self.hand(
                "DROP TRIGGER log_leaves_listed ON log_leaves",
                "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
                "CREATE TRIGGER gone BEFORE INSERT ON log_restrictions FOR EACH ROW EXECUTE FUNCTION nothing()",
            )
        else:
            self.hand(
                "DROP TRIGGER log_leaves_listed",
                "CREATE TRIGGER gone BEFORE INSERT ON log_restrictions BEGIN SELECT RAISE(IGNORE); END",
            )

    def take_out_of_the_list(self, position: int) -> None:
        """Takes a row of the list, whose leaf stays."""
        if self.database.engine.dialect.name == "sqlite":
            self.hand("DROP TRIGGER log_restrictions_no_delete")
        self.hand(f"DELETE FROM log_restrictions WHERE position = {position}")

    def take_out(self, size: int) -> None:
        """Takes every trace of the leaves behind the first `size`."""
        if self.database.engine.dialect.name == "sqlite":
            self.hand(*(f"DROP TRIGGER log_{name}_no_delete" for name in ("leaves", "nodes", "restrictions")))
        self.hand(
            f"DELETE FROM log_leaves WHERE leaf_index >= {size}",
            f"DELETE FROM log_restrictions WHERE leaf_index >= {size}",
            *(f"DELETE FROM log_nodes WHERE level = {n} AND node_index >= {size >> n}" for n in range(8)),
        )


@pytest.fixture
async def world(url: str) -> AsyncIterator[World]:
    world = World(url)
    for version in (1, 2):
        world.append(Kind.RECORD, version)
    assert await world.sign() == (2, 0)
    yield world
    world.database.close()


async def test_a_running_registry_signs_no_list_that_lacks_what_its_leaves_take_back(world: World) -> None:
    world.append(Kind.REVOKED, 1)
    assert await world.sign() == (3, 1)
    world.drop_rows_of_the_list()
    world.append(Kind.RECORD, 3)
    assert await world.sign() == (4, 1), "nothing is missing yet"
    world.append(Kind.REVOKED, 2)
    for _ in range(2):
        assert await world.refusal() == "LOG_DAMAGED"


@pytest.mark.parametrize("restart", [False, True])
async def test_a_list_from_which_a_row_was_taken_is_not_signed(world: World, restart: bool) -> None:
    for version in (1, 2):
        world.append(Kind.REVOKED, version)
    assert await world.sign() == (4, 2)
    world.take_out_of_the_list(1)
    if restart:
        world.start()
    else:
        world.append(Kind.RECORD, 3)
    assert await world.refusal() == "LOG_DAMAGED"


async def test_a_leaf_that_is_taken_out_whole_before_it_is_signed_was_committed_all_the_same(world: World) -> None:
    world.append(Kind.REVOKED, 1)
    world.take_out(2)
    assert await world.refusal() == "LOG_DAMAGED"
    other = Database(world.url)
    world.append(Kind.RECORD, 1, by=other)
    assert await world.refusal() == "LOG_DAMAGED", "another one in its place is not the one that was committed"
    other.close()


async def test_what_another_registry_appends_is_signed_as_well(world: World) -> None:
    other = Database(world.url)
    world.append(Kind.REVOKED, 1, by=other)
    world.append(Kind.REVOKED, 2)
    assert await world.sign() == (4, 2)
    assert world.database.unsigned() == {}
    other.close()


async def test_a_log_that_is_damaged_is_read_once_and_signed_when_its_list_is_mended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.append(Kind.REVOKED, 1)
    if world.database.engine.dialect.name == "sqlite":
        world.hand("DROP TRIGGER log_restrictions_no_update")
    world.hand("UPDATE log_restrictions SET position = 7")
    world.start()
    read: list[int] = []
    compute = log.compute

    def counted(connection: Connection, since: log.Computed) -> log.Computed:
        found = compute(connection, since)
        read.append(found.frontier.size - since.frontier.size)
        return found

    monkeypatch.setattr(log, "compute", counted)
    for _ in range(3):
        assert await world.refusal() == "LOG_DAMAGED"
    world.hand("UPDATE log_restrictions SET position = 0")
    assert await world.sign() == (3, 1)
    assert read == [3, 0, 0, 0]
