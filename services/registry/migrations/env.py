"""Alembic's entry: runs the migrations on the connection that `services.registry.store.migrate` holds."""

from alembic import context


def run() -> None:
    """Runs within the caller's transaction, which is also the lock."""
    context.configure(connection=context.config.attributes["connection"])
    context.run_migrations()


# Alembic loads this file under this name; importing it otherwise does nothing.
if __name__ == "env_py":
    run()
