"""`loraport executor list`, `drain` and `undrain` against a real router between executors that the test plays."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from loraport import Completion
from loraport.cli.main import run
from loraport.dev.layout import ENDPOINTS_SCHEMA
from loraport.values import DRAINING
from services.router.config import RouterConfig
from services.router.service import build
from services.shared.config import from_mapping
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
        return code, "\n".join(line for line in out.splitlines() if not re.match(r"\d{4}-\d\d-", line)), err

    yield world, call
    await world.stop()


async def router_says(cli: Cli) -> dict[str, str | None]:
    return {row["executor"]: row["router"] for row in json.loads((await cli("list", "--json"))[1])}


def other_than(name: str) -> str:
    return "e1" if name == "e0" else "e0"


@pytest.fixture
async def busy(fleet: tuple[World, Cli]) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Task[Completion]]]:
    """The executor that a request runs on, what lets it go on, and the request."""
    world, _ = fleet
    held = asyncio.Event()
    for executor in world.executors.values():
        executor.held = held
    async with world.client(timeout=60.0) as client:
        running = asyncio.create_task(client.generate("x", adapter="pirate", max_tokens=8))
        await eventually(lambda: any(executor.running for executor in world.executors.values()))
        yield next(name for name, executor in world.executors.items() if executor.running), held, running
        held.set()
        await running


Busy = tuple[str, asyncio.Event, "asyncio.Task[Completion]"]


async def test_a_drained_executor_ends_what_runs_and_gets_nothing_more_until_it_is_put_back(
    fleet: tuple[World, Cli], busy: Busy
) -> None:
    world, cli = fleet
    name, held, running = busy
    code, out, err = await cli("drain", name, "--wait", "0.3", "--json")
    row = {"executor": name, "serving": False, "running_count": 1, "executor_told": True}
    assert (code, json.loads(out)) == (1, row)
    assert err.splitlines() == [f"1 still run on {name}", f"after 0.3 s something still runs on {name}"]
    assert await router_says(cli) == {name: "is drained by an admin", other_than(name): "serving"}
    # What ran there ends as it would have, and only then does nothing run.
    waiting = asyncio.create_task(cli("drain", name, "--wait", "60"))
    held.set()
    code, out, _ = await waiting
    assert (code, out.strip()) == (0, f"{name} gets no further request; 0 still run there")
    assert (await running).executor == name
    sent = len(world.executors[name].requests)
    async with world.client() as client:
        answered = {(await client.generate("y", adapter="pirate", max_tokens=1)).executor for _ in range(4)}
        assert answered == {other_than(name)}
        assert len(world.executors[name].requests) == sent
        code, out, _ = await cli("undrain", name)
        assert (code, out.strip()) == (0, f"{name} is in service")
        assert (await cli("drain", other_than(name)))[0] == 0
        assert (await client.generate("z", adapter="pirate", max_tokens=1)).executor == name


async def test_whoever_waits_only_looks(fleet: tuple[World, Cli], busy: Busy) -> None:
    world, cli = fleet
    name, _, _ = busy
    told = world.executors[name].drains
    waiting = asyncio.create_task(cli("drain", name, "--wait", "60"))
    await eventually(lambda: world.executors[name].state == "DRAINING")
    # Another operator has it back.
    world.executors[name].state = "SERVING"
    code, _, err = await waiting
    assert (code, err.splitlines()[-1]) == (1, f"somebody put {name} back into service")
    assert world.executors[name].state == "SERVING"
    assert world.executors[name].drains == told + 1


async def test_a_drain_reaches_every_router(fleet: tuple[World, Cli]) -> None:
    world, cli = fleet
    second = await build(from_mapping(RouterConfig, world.config(), where="test"))
    await second.start()
    try:
        fault = second._fleet.members.fault
        await eventually(lambda: fault("e0") == fault("e1") == "")
        assert (await cli("drain", "e0"))[0] == 0
        await eventually(lambda: fault("e0") == DRAINING)
        assert (await cli("undrain", "e0"))[1].strip() == "e0 is in service"
        await eventually(lambda: fault("e0") == "")
    finally:
        await second.stop()


async def test_what_is_not_there_is_said(fleet: tuple[World, Cli]) -> None:
    world, cli = fleet
    code, _, err = await cli("drain", "e9")
    assert (code, err.count("\n")) == (1, 1)
    assert "No such executor" in err
    assert (await cli("drain", "e0"))[0] == 0
    await world.stop_server("e0")
    code, _, err = await cli("drain", "e0", "--wait", "1")
    assert (code, "only this router knows: e0 itself was not told" in err) == (1, True)
    await eventually(lambda: world.router._fleet.members.fault("e0") == "does not answer")
    assert (await cli("undrain", "e0"))[1].strip() == "e0 is no longer drained, but out: see executor list"
    row = next(row for row in json.loads((await cli("list", "--json"))[1]) if row["executor"] == "e0")
    assert row["router"] == "does not answer"
    assert row["error"]
    await world.router.stop()
    world.router = None
    # Without a router the executors are shown all the same.
    assert await router_says(cli) == {"e0": None, "e1": None}
