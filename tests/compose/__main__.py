"""`make compose-test`: deploy/compose.yaml, really run.

Builds every image without pulling one, brings the stack up, publishes an adapter and asks it, looks at the walls from
inside, kills each container in turn and asks again, takes the stack down and up again and finds everything, and leaves
nothing behind. Ends with `N passed, N failed`; exit code 3 where no Docker engine can run, with the reason.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.compose.checks import Checks
from tests.compose.engine import Engine, NoEngine, compose_program, engine
from tests.compose.fleet import Fleet
from tests.compose.images import ROOT, build, variables
from tests.small_world import make_small_world

CACHE = Path.home() / ".cache" / "loraport-compose"


@contextlib.contextmanager
def checkout() -> Iterator[Path]:
    """Gives a copy of the files that git knows of, as they are now: the context of the builds."""
    with tempfile.TemporaryDirectory(prefix="loraport-context-") as folder:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                target = Path(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        yield Path(folder)


def say(text: str) -> None:
    """Shows what is being done."""
    print(f"compose-test: {text}", file=sys.stderr, flush=True)


def test(found: Engine, options: argparse.Namespace, work: Path) -> Checks:
    """Builds, runs and takes down. Raises RuntimeError when it cannot be built."""
    checks = Checks()
    with checkout() as context:
        if not options.keep_images or not _built(found):
            with checks.timed("images built"):
                build(found, Path(options.cache), context, say)
        say("a small base model and adapters")
        world = work / "world"
        make_small_world(world)
        for path in (work, *world.rglob("*")):  # read by another user, in the containers
            path.chmod(0o755 if path.is_dir() else 0o644)
        fleet = Fleet(
            found,
            compose_program(),
            context / "deploy" / "compose.yaml",
            base=world / "bases" / "tiny",
            bundles=world / "bundles",
            images=variables(),
        )
        try:
            checks.run(fleet, work, say)
        except RuntimeError as error:
            checks.add("could not go on", str(error)[-1500:], started=time.monotonic(), passed=False)
        finally:
            with checks.timed("taken down, with its volumes"):
                fleet.down(volumes=True)
            if not options.keep_images:
                found.docker("rmi", "-f", *variables().values(), check=False)
    return checks


def _built(found: Engine) -> bool:
    there = found.docker("images", "--format", "{{.Repository}}:{{.Tag}}").split()
    return set(variables().values()) <= set(there)


def main() -> int:
    """Runs the test. Exit code 1: something failed, 3: no engine can run here."""
    parser = argparse.ArgumentParser(prog="make compose-test")
    parser.add_argument("--running", action="store_true", help="use an engine that runs; do not start one")
    parser.add_argument("--keep-images", action="store_true", help="use images of an earlier run, and leave them")
    parser.add_argument("--cache", default=str(CACHE), help="directory for the base system and wheels")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="loraport-compose-", dir="/var/tmp") as folder:
        try:
            with engine(Path(folder) / "engine", start=not options.running) as found:
                say(f"a Docker engine {'of its own' if found.own else 'that runs'}")
                checks = test(found, options, Path(folder))
        except NoEngine as error:
            print(f"compose-test: skipped: {error}", flush=True)
            return 3
    checks.print()
    failed = sum(1 for check in checks.rows if not check.passed)
    print(f"compose-test took {time.monotonic() - started:.0f} s")
    print(f"{len(checks.rows) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
