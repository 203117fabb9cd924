"""A Docker engine: the one that runs, or one of the test's own for the length of a `with` block.

The own one lives in a directory of the test's and is ended by its process id; afterwards the machine's packet filter and
bridges are as they were. Debian's packages are installed where they are missing, and stay.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("docker.io", "docker-compose", "debootstrap", "iptables")
START_S = 40.0


class NoEngine(Exception):
    """No Docker engine can run here; one line says why."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How to reach an engine. `own`: it was started by this test, whose user is root."""

    host: str
    own: bool

    def environment(self) -> dict[str, str]:
        """Returns the environment for the client programs."""
        extra = {"DOCKER_HOST": self.host} if self.host else {}
        # The classic builder is in every engine; BuildKit may be a plug-in that is not there.
        return {**os.environ, **extra, "DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}

    def docker(self, *arguments: str, timeout: float = 600, check: bool = True) -> str:
        """Runs `docker` and returns what it printed."""
        return run(["docker", *arguments], env=self.environment(), timeout=timeout, check=check)


def run(command: list[str], *, env: dict[str, str] | None = None, timeout: float = 600, check: bool = True) -> str:
    """Runs a program and returns its output. Raises RuntimeError with its last lines when it fails."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise RuntimeError(f"{' '.join(command)[:200]} ended with {done.returncode}:\n{tail}")
    return done.stdout


@contextlib.contextmanager
def engine(work: Path, *, start: bool) -> Iterator[Engine]:
    """Gives an engine; with `start`, one is installed and started where none runs. Raises NoEngine."""
    host = os.environ.get("DOCKER_HOST", "")
    if shutil.which("docker") and _answers(Engine(host, own=False)):
        if not _compose_program():
            raise NoEngine("an engine runs, but there is neither docker-compose nor docker compose")
        yield Engine(host, own=False)
        return
    if not start:
        raise NoEngine("no Docker engine runs; make compose-test starts one where it may")
    if os.geteuid() != 0:
        raise NoEngine("no Docker engine runs, and starting one needs root")
    _install()
    with _daemon(work) as started:
        yield started


def compose_program() -> list[str]:
    """Returns the compose program: the plug-in where there is one. Raises NoEngine."""
    found = _compose_program()
    if not found:
        raise NoEngine("there is neither docker-compose nor docker compose")
    return found


def _compose_program() -> list[str]:
    if shutil.which("docker"):
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if plugin.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


def _answers(candidate: Engine) -> bool:
    done = subprocess.run(
        ["docker", "info", "--format", "{{.ServerVersion}}"],
        env=candidate.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    return done.returncode == 0 and bool(done.stdout.strip())


def _install() -> None:
    if shutil.which("dockerd") and shutil.which("debootstrap") and _compose_program():
        return
    if not shutil.which("apt-get"):
        raise NoEngine("no Docker engine is installed, and there is no apt-get to install one")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(["apt-get", "update", "-qq"], env=env, timeout=300)
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES], env=env, timeout=600)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        raise NoEngine(f"Docker could not be installed: {str(error).splitlines()[-1]}") from None


@contextlib.contextmanager
def _daemon(work: Path) -> Iterator[Engine]:
    work.mkdir(parents=True, exist_ok=True)
    filters = {save: run([save]) for save in ("iptables-save", "ip6tables-save") if shutil.which(save)}
    bridge = Path("/sys/class/net/docker0").exists()
    socket = work / "docker.sock"
    found = Engine(f"unix://{socket}", own=True)
    command = [
        *("dockerd", "--data-root", str(work / "data"), "--exec-root", str(work / "exec")),
        *("--pidfile", str(work / "pid"), "-H", found.host),
    ]
    with (work / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        ends = time.monotonic() + START_S
        while not _answers(found):
            if process.poll() is not None or time.monotonic() > ends:
                last = (work / "dockerd.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise NoEngine(f"dockerd does not come up here: {''.join(last)[:300]}")
            time.sleep(0.5)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for save, text in filters.items():
            subprocess.run([save.replace("save", "restore")], input=text, text=True, capture_output=True, check=False)
        if not bridge:
            subprocess.run(["ip", "link", "del", "docker0"], capture_output=True, check=False)
