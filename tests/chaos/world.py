"""The stack that is disturbed: two executors whose pools are too small for their adapters, the store behind a proxy."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.proxy import Proxy
from tests.chaos.traffic import Target
from tests.e2e.harness import Stack, add_tenant, publish, running
from tests.small_world import make_small_world

# tenant → adapter → bundles of its versions; `moving` has two, and its alias goes to and fro.
WORLD = {
    "acme": {"steady": ("alpha_1",), "large": ("plain_r64",), "other": ("alpha_64",)},
    "globex": {"moving": ("alpha_8", "alpha_64"), "small": ("alpha_1",)},
}


@dataclass(frozen=True, slots=True)
class World:
    """A running stack, what may be asked of it, and the proxy before its store."""

    stack: Stack
    targets: tuple[Target, ...]
    proxy: Proxy

    def move_alias(self, version: int) -> int:
        """Moves the alias of `moving`; returns the command's exit code."""
        words = ("alias", "set", "moving", "prod", "--tenant", "globex", "--version", str(version))
        return self.stack.cli(*words, "--now", "--reason", "churn").code


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    """Gives a world; ends it."""
    make_small_world(folder / "small")
    base = f"tiny={folder / 'small' / 'bases' / 'tiny'}"
    with running(folder / "data", "--base", base, "--executors", "2") as stack:
        targets = []
        for tenant, adapters in WORLD.items():
            add_tenant(stack, tenant)
            for adapter, bundles in adapters.items():
                made = [
                    publish(stack, folder / "small" / "bundles" / bundles[0], tenant, adapter)["revision_id"],
                ]
                for bundle in bundles[1:]:
                    named = ("--tenant", tenant, "--name", adapter, "--base", "tiny", "--approve")
                    row = stack.ok("adapter", "register", str(folder / "small" / "bundles" / bundle), *named)
                    made.append(row["revision_id"])
                targets.append(Target(tenant, adapter, tuple(made)))
        proxy = Proxy(stack.port_base + 21)
        _reconfigure(stack, "loader", {"s3_endpoint": f"127.0.0.1:{proxy.port}", "host_budget_bytes": 1 << 20})
        for name in ("tiny-0", "tiny-1"):
            _reconfigure(stack, name, {"pool_bytes": 700_000})
        try:
            yield World(stack, tuple(targets), proxy)
        finally:
            proxy.close()


def _reconfigure(stack: Stack, name: str, changes: dict[str, object]) -> None:
    path = stack.data / "run" / f"{name}.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))
    answer = stack.cli("dev", "restart", name)
    assert answer.code == 0, answer
