"""The stack of deploy/compose.yaml as the test drives it: up, asked, broken, mended, down."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraport import Client
from tests.compose.engine import Engine, run
from tests.support.ports import free_ports

PROJECT = "loraport-test"
UP_S = 300.0
# Every container that goes on running; the jobs end.
CONTAINERS = ("database", "store", "board", "registry", "loader", "executor-0", "router")


@dataclass(frozen=True, slots=True)
class State:
    """What the engine says of a container. `fresh` changes with every start of it."""

    running: bool
    health: str
    pid: int
    fresh: str
    restarts: int


class Fleet:
    """One project of compose."""

    def __init__(
        self, engine: Engine, program: list[str], file: Path, *, base: Path, bundles: Path, images: Mapping[str, str]
    ) -> None:
        self._engine = engine
        router, registry, upload, admin = free_ports(4)
        self._port = router
        self._env = {
            **engine.environment(),
            **images,
            "LORAPORT_BASE_DIR": str(base),
            "LORAPORT_BUNDLES": str(bundles),
            "LORAPORT_BASE_NAME": "tiny",
            "LORAPORT_S3_USERS": "none",
            "LORAPORT_EXECUTOR_CPUS": "2",
            "LORAPORT_PORT": str(router),
            "LORAPORT_REGISTRY_PORT": str(registry),
            "LORAPORT_UPLOAD_PORT": str(upload),
            "LORAPORT_ROUTER_ADMIN_PORT": str(admin),
        }
        self._compose = [*program, "-p", PROJECT, "-f", str(file)]
        self._ids: dict[str, str] = {}
        self._ca = b""
        self._key = ""

    def compose(self, *arguments: str, timeout: float = 600) -> str:
        """Runs compose. Raises RuntimeError."""
        return run([*self._compose, *arguments], env=self._env, timeout=timeout)

    def up(self) -> float:
        """Brings everything up, waits until it is healthy, and returns how long that took, seconds."""
        started = time.monotonic()
        self._ids.clear()
        self.compose("up", "-d", timeout=UP_S)
        for name in CONTAINERS:
            self.wait_healthy(name)
        return time.monotonic() - started

    def down(self, *, volumes: bool) -> None:
        """Ends it, with `volumes` for good."""
        self.compose("down", "--remove-orphans", "--timeout", "30", *(["--volumes"] if volumes else []))

    def container(self, name: str) -> str:
        """Returns the id of a container. Raises RuntimeError when there is none."""
        if name in self._ids:
            return self._ids[name]
        label = f"label=com.docker.compose.service={name}"
        project = f"label=com.docker.compose.project={PROJECT}"
        found = self._engine.docker("ps", "-aq", "--no-trunc", "--filter", label, "--filter", project).split()
        if not found:
            raise RuntimeError(f"no container of {name}")
        self._ids[name] = found[0]
        return self._ids[name]

    def inspect(self, name: str) -> dict[str, Any]:
        """Returns everything that the engine knows of a container."""
        found: dict[str, Any] = json.loads(self._engine.docker("inspect", self.container(name)))[0]
        return found

    def addresses(self, name: str) -> list[str]:
        """Returns a container's addresses, one in each of its networks."""
        networks = self.inspect(name)["NetworkSettings"]["Networks"].values()
        return [network["IPAddress"] for network in networks if network["IPAddress"]]

    def state(self, name: str) -> State:
        """Returns how a container does."""
        whole = self.inspect(name)
        now = whole["State"]
        return State(
            running=now["Running"],
            health=now.get("Health", {}).get("Status", "none"),
            pid=now["Pid"],
            fresh=now["StartedAt"],
            restarts=whole["RestartCount"],
        )

    def wait_healthy(self, name: str, *, not_since: str = "", within_s: float = UP_S) -> State:
        """Waits until a container is healthy, and another run of it than `not_since`."""
        ends = time.monotonic() + within_s
        while True:
            now = self.state(name)
            if now.running and now.health == "healthy" and now.fresh != not_since:
                return now
            if time.monotonic() > ends:
                logs = self._engine.docker("logs", "--tail", "8", self.container(name), check=False)
                raise RuntimeError(f"{name} is not healthy after {within_s:.0f} s: {now}\n{logs}")
            time.sleep(0.5)

    def kill(self, name: str) -> State:
        """Kills a container's first process as a crash would, so that its restart policy acts; returns what it was."""
        before = self.state(name)
        cgroup = Path(f"/proc/{before.pid}/cgroup")
        if os.geteuid() == 0 and cgroup.exists() and self.container(name) in cgroup.read_text():
            os.kill(before.pid, signal.SIGKILL)
        else:  # Out of reach; the engine takes this for a wish, so that it has to be started again by hand.
            self.compose("kill", "-s", "SIGKILL", name)
            self.compose("start", name)
        return before

    def exec(self, name: str, *command: str, check: bool = True) -> str:
        """Runs a command in a container."""
        return self._engine.docker("exec", self.container(name), *command, check=check)

    def operator(self, *arguments: str) -> Any:
        """Runs a command of `loraport` in the operator's container and returns its JSON."""
        return json.loads(self.compose("run", "--rm", "-T", "operator", *arguments, "--json"))

    def read(self, path: str) -> str:
        """Returns a file of the operator's volume."""
        return self.compose("run", "--rm", "-T", "--entrypoint", "cat", "operator", f"/volumes/operator/{path}")

    def upkeep(self, *arguments: str) -> str:
        """Runs a command of the registry's upkeep in a container of its own, and returns what it says."""
        python = ("-I", "-m", "services.registry.upkeep")
        config = ("--config", "/run/loraport/config.json")
        start = ("run", "--rm", "-T", "--no-deps", "--entrypoint", "/opt/loraport/bin/python", "registry")
        return self.compose(*start, *python, *arguments, *config).strip()

    def learn(self, tenant: str) -> None:
        """Takes the tenant's key and the CA out of the operator's volume, as an operator hands them to a user."""
        self._key = self.read(f"keys/{tenant}.key").strip()
        self._ca = self.read("pki/ca.pem").encode()

    def client(self, folder: Path, *, timeout: float = 60) -> Client:
        """Returns a client of the published port."""
        path = folder / "ca.pem"
        path.write_bytes(self._ca)
        return Client(f"127.0.0.1:{self._port}", api_key=self._key, ca_certificate=path, timeout=timeout)


def wait_for(ask: Callable[[], Any], *, within_s: float, what: str) -> tuple[Any, float]:
    """Asks until there is an answer; returns it and how long it took, seconds."""
    started, last = time.monotonic(), None
    while time.monotonic() - started < within_s:
        try:
            return ask(), time.monotonic() - started
        except Exception as error:
            last = error
            time.sleep(0.3)
    raise RuntimeError(f"{what}: still {last} after {within_s:.0f} s")
