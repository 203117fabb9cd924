"""Brings a database's tables up to this release, under a lock, when a registry starts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources

import structlog
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from services.registry.store.database import Database

log = structlog.get_logger()

# Any number will do, as long as every registry uses the same one.
_LOCK = 0x6C6F7261706F7274


def upgrade(database: Database, *, to: str = "head") -> None:
    """Runs the migrations that the database has not had. Registries that start together wait for each other.

    Raises:
        LoraportError: REGISTRY_UNAVAILABLE.
        alembic.util.CommandError: the database was made by a newer release.
    """
    _run(database, lambda config: command.upgrade(config, to))


def downgrade(database: Database, *, to: str) -> None:
    """Takes migrations back, newest first, for the release whose newest one is `to`. All or nothing.

    Raises:
        LoraportError: REGISTRY_UNAVAILABLE.
        alembic.util.CommandError: there is no such migration, or one between has no way back.
    """
    _run(database, lambda config: command.downgrade(config, to))


@cache
def head() -> str:
    """Returns this release's newest migration."""
    with _config() as config:
        found = ScriptDirectory.from_config(config).get_current_head()
    assert found is not None
    return found


def _run(database: Database, work: Callable[[Config], None]) -> None:
    with _config() as config, database.exclusive() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        config.attributes["connection"] = connection
        before = MigrationContext.configure(connection).get_current_revision()
        work(config)
        after = MigrationContext.configure(connection).get_current_revision()
    if after != before:
        log.info("database migrated", before=before, after=after)


@contextmanager
def _config() -> Iterator[Config]:
    with resources.as_file(resources.files("services.registry") / "migrations") as directory:
        config = Config()
        config.set_main_option("script_location", str(directory).replace("%", "%%"))
        yield config
