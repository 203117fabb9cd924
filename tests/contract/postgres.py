"""A PostgreSQL server for one test session: an unprivileged process on a socket in a temporary directory."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ACCOUNTS = ("postgres", "nobody")


def find_binary(name: str) -> str | None:
    """The path of one of PostgreSQL's programs, or None."""
    found = shutil.which(name)
    if found is None:
        installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
        found = str(installed[-1]) if installed else None
    return found


def account() -> str | None:
    """The user to run as: PostgreSQL refuses root. None: stay who we are."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ACCOUNTS if name in names)


@contextmanager
def server() -> Iterator[str]:
    """Yields the directory of the server's socket."""
    initdb, postgres = find_binary("initdb"), find_binary("postgres")
    assert initdb is not None
    assert postgres is not None
    # Not pytest's directory: only root may enter that one when root runs the tests.
    folder = Path(tempfile.mkdtemp(prefix="loraport-pg-"))
    user = account()
    if user is not None:
        shutil.chown(folder, user)
    try:
        data = str(folder / "data")
        setup = [initdb, "-D", data, "-U", "loraport", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"]
        subprocess.run(setup, check=True, user=user, cwd=folder, capture_output=True, timeout=120)
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", f"unix_socket_directories={folder}"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([postgres, "-D", data, *options], user=user, cwd=folder, stdout=log, stderr=log)
        try:
            _wait(process, folder)
            yield str(folder)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    import psycopg

    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            psycopg.connect(f"host={folder} user=loraport dbname=postgres").close()
        except psycopg.OperationalError:
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        else:
            return
