"""Brings a database's tables up to this release, under a lock, when a registry starts."""

from importlib import resources

import structlog
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
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
    with resources.as_file(resources.files("services.registry") / "migrations") as directory:
        config = Config()
        config.set_main_option("script_location", str(directory).replace("%", "%%"))
        with database.exclusive() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            config.attributes["connection"] = connection
            before = MigrationContext.configure(connection).get_current_revision()
            command.upgrade(config, to)
            after = MigrationContext.configure(connection).get_current_revision()
    if after != before:
        log.info("database migrated", before=before, after=after)
