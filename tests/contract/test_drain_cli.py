"""`loraport executor list`, `drain` and `undrain` against a real router between executors that the test plays."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from loraport.cli.main import run
from loraport.dev.layout import ENDPOINTS_SCHEMA
from tests.contract.router_world import World, digest, eventually

PIRATE = digest("acme/pirate/1")
Cli = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[tuple[World, Cli]]:
    """Two executors that hold the same revision, and what runs a command and gives (exit code, stdout, stderr)."""
    world = World(tmp_path)
    world.registry.items += [world.registry.base(), *world.registry.tenant("acme")]
    world.registry.items += world.registry.adapter("acme", "pirate")
    await world.start_registry()
    for name in ("e0", "e1"):
        await world.start_executor(name, resident=[PIRATE])
    await world.start_router()
    await eventually(lambda: sum(one.serving for one in world.router._fleet.view().executors) == 2)
    certificate, key = world.leaf("admin/ops")
    (tmp_path / "admin.pem").write_bytes(certificate)
    (tmp_path / "admin.key").write_bytes(key)
    endpoints = {
        "schema": ENDPOINTS_SCHEMA,
        **dict.fromkeys(("registry", "loader", "loader_upload"), world.addresses["registry"]),
        "router_admin": f"127.0.0.1:{world.router.admin_port}",
        "executors": {name: world.addresses[name] for name in ("e0", "e1")},
        "credentials": {"ca": "ca.pem", "admin_certificate": "admin.pem", "admin_key": "admin.key"},
    }
    (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))

    async def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = await asyncio.to_thread(run, ["executor", *words, "--data", str(tmp_path)])
        out, err = capsys.readouterr()
        return code, "\n".join(line for line in out.splitlines() if "[info" not in line), err

    yield world, call
    await world.stop()


async def router_says(cli: Cli) -> dict[str, str | None]:
    return {row["executor"]: row["router"] for row in json.loads((await cli("list", "--json"))[1])}


async def test_a_drained_executor_ends_what_runs_and_gets_nothing_more_until_it_is_put_back(
    fleet: tuple[World, Cli],
) -> None:
    world, cli = fleet
    assert await router_says(cli) == {"e0": "serving", "e1": "serving"}
    for executor in world.executors.values():
        executor.pause_s = 0.2
    async with world.client() as client:
        running = asyncio.create_task(client.generate("x", adapter="pirate", max_tokens=8))
        await eventually(lambda: any(executor.running for executor in world.executors.values()))
        busy = next(name for name, executor in world.executors.items() if executor.running)
        code, out, err = await cli("drain", busy, "--wait", "0.3", "--json")
        assert (code, json.loads(out)) == (1, {"executor": busy, "serving": False, "running_count": 1})
        assert "still runs" in err
        assert (await router_says(cli))[busy] == "is drained by an admin"
        # What ran there ends as it would have, and only then does nothing run.
        code, out, _ = await cli("drain", busy, "--wait", "20")
        assert (code, out.strip()) == (0, f"{busy} gets no further request; 0 still run there")
        assert (await running).executor == busy
        sent = len(world.executors[busy].requests)
        assert {(await client.generate("y", adapter="pirate", max_tokens=1)).executor for _ in range(4)} == {
            "e1" if busy == "e0" else "e0"
        }
        assert len(world.executors[busy].requests) == sent
        code, out, _ = await cli("undrain", busy)
        assert (code, out.strip()) == (0, f"{busy} is in service")
        other = "e1" if busy == "e0" else "e0"
        assert (await cli("drain", other))[0] == 0
        assert (await client.generate("z", adapter="pirate", max_tokens=1)).executor == busy


async def test_what_is_not_there_is_said(fleet: tuple[World, Cli]) -> None:
    world, cli = fleet
    code, _, err = await cli("drain", "e9")
    assert (code, err.count("\n")) == (1, 1)
    assert "No such executor" in err
    assert (await cli("drain", "e0"))[0] == 0
    await world.stop_server("e0")
    await eventually(lambda: world.router._fleet.members.fault("e0") != "")
    assert (await cli("undrain", "e0"))[1].strip() == "e0 is no longer drained, but out: see executor list"
    row = next(row for row in json.loads((await cli("list", "--json"))[1]) if row["executor"] == "e0")
    assert row["router"] == "does not answer"
    assert row["error"]
    await world.router.stop()
    world.router = None
    # Without a router the executors are shown all the same.
    assert await router_says(cli) == {"e0": None, "e1": None}
