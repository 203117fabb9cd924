"""`python -m services.registry.upkeep COMMAND --config FILE`: what is done to a registry's database by hand.

    backup FILE        writes everything into one file, while registries go on
    restore FILE       fills an empty database from one; no registry may run on it. What this one signed is forgotten
    migrate [--to N]   brings the tables to this release, or back to an older one before that is started again

Exit code 1: it was not done, with one line why; 2: the configuration cannot be used.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from alembic.util import CommandError
from sqlalchemy.exc import SQLAlchemyError

from services.registry.config import RegistryConfig
from services.registry.store.database import Database
from services.registry.store.dump import DumpError, backup, restore
from services.registry.store.migrate import downgrade, head, upgrade
from services.shared import telemetry
from services.shared.config import ConfigError, load_config
from services.shared.errors import LoraportError


def run(options: argparse.Namespace) -> str:
    """Does what is asked and returns a line that says what was done."""
    config = load_config(RegistryConfig, options.config)
    try:
        database = Database(config.database_url)
    except (ValueError, SQLAlchemyError) as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    try:
        if options.command == "backup":
            return _told(options.file, backup(database, Path(options.file), now_us=time.time_ns() // 1000))
        if options.command == "restore":
            done = restore(database, Path(options.file))
            # Whoever restores knows that the registry goes back behind what it signed.
            return _told(options.file, done) + _forget(config.state_file)
        if options.to in ("head", head()):
            upgrade(database)
        else:
            downgrade(database, to=options.to)
        return f"the database is at migration {head() if options.to == 'head' else options.to}"
    finally:
        database.close()


def _forget(state_file: str) -> str:
    """Removes what was signed last; returns what is left to do when that cannot be done, for the restore has been."""
    try:
        if state_file:
            Path(state_file).unlink(missing_ok=True)
    except OSError as error:
        return f"\nremove {state_file} before a registry starts: {error.strerror}"
    return ""


def _told(file: str, header: dict[str, Any]) -> str:
    return (
        f"{file}: {sum(header['rows'].values())} rows, catalog epoch {header['epoch']}, "
        f"a log of {header['tree_size']} leaves, root {header['root_hash']}"
    )


def main() -> int:
    """Runs one command."""
    parser = argparse.ArgumentParser(prog="python -m services.registry.upkeep")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("backup", "restore", "migrate"):
        command = commands.add_parser(name)
        command.add_argument("--config", required=True, help="the registry's configuration")
        if name == "migrate":
            command.add_argument("--to", default="head", help="number of a migration; default: this release's")
        else:
            command.add_argument("file")
    options = parser.parse_args()
    telemetry.setup("registry")
    try:
        sys.stdout.write(run(options) + "\n")
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"upkeep: {error}\n")
        return 2
    except (DumpError, CommandError, LoraportError, NotImplementedError, SQLAlchemyError) as error:
        sys.stderr.write(f"upkeep: {str(error).splitlines()[0]}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
