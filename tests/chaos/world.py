"""The stack that is disturbed: two executors whose pools are too small for their adapters, the store behind a proxy.

Where it is allowed the stack's data is on a small file system of its own, and its processes have a shim preloaded that
sets their clocks and slows their disks.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.disk import small_disk
from tests.chaos.proxy import Proxy
from tests.chaos.shim import Shim, preloaded
from tests.chaos.traffic import Target
from tests.e2e.harness import Stack, add_tenant, publish, running
from tests.small_world import make_small_world

# tenant → adapter → bundles of its versions; `moving` has two, and its alias goes to and fro.
WORLD = {
    "acme": {"steady": ("alpha_1",), "large": ("plain_r64",), "other": ("alpha_64",)},
    "globex": {"moving": ("alpha_8", "alpha_64"), "small": ("alpha_1",)},
}
SERVICES = ("registry", "loader", "tiny-0", "tiny-1", "router")


@dataclass(frozen=True, slots=True)
class World:
    """A running stack, what may be asked of it, and what it can be disturbed with.

    `small` is where base and bundles are; `own_disk` says whether the data are on a file system of their own.
    """

    stack: Stack
    small: Path
    targets: tuple[Target, ...]
    proxy: Proxy
    own_disk: bool
    shim: Shim | None

    def move_alias(self, version: int) -> str:
        """Moves the alias of `moving`, ready or not; returns why it was refused, empty when it was not."""
        words = ("alias", "set", "moving", "prod", "--tenant", "globex", "--version", str(version))
        answer = self.stack.cli(*words, "--now", "--force", "--reason", "churn")
        # Whatever it was: threads of the traffic may have said something of their own.
        return "" if answer.code == 0 else " ".join(answer.err.split()) or f"exit code {answer.code}"

    def ports(self) -> dict[str, int]:
        """Returns name → port of the stack's processes."""
        state = json.loads((self.stack.data / "run" / "stack.json").read_bytes())
        return {row["name"]: row["port"] for row in state["processes"]}

    def restart(self, name: str) -> None:
        """Ends a process as an upgrade does, and waits until it serves again."""
        answer = self.stack.cli("dev", "restart", name)
        assert answer.code == 0, answer

    def serving(self) -> set[str]:
        """Returns the executors that the router sends requests to."""
        return {row["executor"] for row in self.stack.ok("executor", "list") if row["router"] == "serving"}

    @contextlib.contextmanager
    def started_by(self, name: str, prefix: Sequence[str]) -> Iterator[None]:
        """Has a process started behind a command's words from its next start on, and no more afterwards."""
        path = self.stack.data / "run" / "stack.json"
        state = json.loads(path.read_bytes())
        usual = state["commands"][name]
        try:
            state["commands"][name] = [*prefix, *usual]
            path.write_text(json.dumps(state))
            yield
        finally:
            state = json.loads(path.read_bytes())
            state["commands"][name] = usual
            path.write_text(json.dumps(state))


@contextlib.contextmanager
def world(folder: Path, *, restarted: bool = True) -> Iterator[World]:
    """Gives a world; ends it. Without `restarted` its pools become small with their processes' next start."""
    small = folder / "small"
    make_small_world(small)
    base = ("--base", f"tiny={small / 'bases' / 'tiny'}", "--executors", "2")
    with (
        preloaded(folder / "shim", (*SERVICES, "valkey")) as shim,
        small_disk(folder / "data") as own_disk,
        running(folder / "data", *base) as stack,
    ):
        targets = published(stack, small)
        proxy = Proxy(stack.port_base + 21)
        node = {"disk_dir": str(stack.data / "disk"), "disk_budget_bytes": 4 << 20}
        store = {"s3_endpoint": f"127.0.0.1:{proxy.port}", "host_budget_bytes": 1 << 20, "node": node}
        changes: dict[str, dict[str, Any]] = {"loader": store}
        changes |= {name: {"pool_bytes": 700_000} for name in ("tiny-0", "tiny-1")}
        made = World(stack, small, targets, proxy, own_disk, shim)
        for name, change in changes.items():
            reconfigure(stack, name, change)
            if restarted:
                made.restart(name)
        try:
            yield made
        finally:
            proxy.close()


def published(stack: Stack, small: Path) -> tuple[Target, ...]:
    """Publishes `WORLD`."""
    targets = []
    for tenant, adapters in WORLD.items():
        add_tenant(stack, tenant)
        for adapter, (first, *more) in adapters.items():
            made = [publish(stack, small / "bundles" / first, tenant, adapter)["revision_id"]]
            for bundle in more:
                named = ("--tenant", tenant, "--name", adapter, "--base", "tiny", "--approve")
                made.append(stack.ok("adapter", "register", str(small / "bundles" / bundle), *named)["revision_id"])
            targets.append(Target(tenant, adapter, tuple(made)))
    return tuple(targets)


def reconfigure(stack: Stack, name: str, changes: dict[str, Any]) -> None:
    """Changes fields of a process's configuration, for its next start; an object's fields are laid over those it has."""
    path = stack.data / "run" / f"{name}.json"
    config = json.loads(path.read_bytes())
    for field, value in changes.items():
        config[field] = {**config.get(field, {}), **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))
