"""A registry that tells its peers two histories: `loraport log peers` and `log verify` hold them side by side."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraport.bundle.envelope import SigningKey
from loraport.cli.main import run
from loraport.dev.layout import ENDPOINTS_SCHEMA
from loraport.executor.v1 import executor_service_pb2 as executor_pb
from loraport.executor.v1.executor_service_pb2_grpc import (
    ExecutorServiceServicer,
    add_ExecutorServiceServicer_to_server,
)
from loraport.loader.v1 import loader_service_pb2 as loader_pb
from loraport.loader.v1.loader_service_pb2_grpc import LoaderServiceServicer, add_LoaderServiceServicer_to_server
from loraport.types.v1.types_pb2 import SeenCheckpoint
from tests.contract.registry_rig import ADMIN_CA, LEAVES, REGISTRY_KEY, SERVICE_CA, Rig, serving, write_config
from tests.support.translog import FakeLog


class Peers(LoaderServiceServicer, ExecutorServiceServicer):
    """A loader and an executor that say what they are told to say."""

    loader: SeenCheckpoint | None = None
    executor: SeenCheckpoint | None = None

    async def Inventory(self, request: Any, context: Any) -> Any:
        return loader_pb.InventoryResponse(checkpoint=self.loader)

    async def State(self, request: Any, context: Any) -> Any:
        return executor_pb.StateResponse(checkpoint=self.executor)


class World:
    """A registry, its peers, and the command line."""

    def __init__(self, rig: Rig, peers: Peers, folder: Path, output: pytest.CaptureFixture[str]) -> None:
        self.rig, self.peers, self._folder, self._output = rig, peers, folder, output

    async def cli(self, *words: str, as_json: bool = True) -> tuple[int, Any]:
        self._output.readouterr()
        options = ["--data", str(self._folder), *(["--json"] if as_json else [])]
        code = await asyncio.to_thread(run, ["log", *words, *options])
        out = self._output.readouterr().out
        return code, json.loads(out) if as_json else out

    async def standings(self, code: int) -> dict[str, str]:
        exit_code, rows = await self.cli("peers")
        assert exit_code == code, rows
        return {row["peer"]: row["standing"] for row in rows}

    async def seen(self) -> SeenCheckpoint:
        """What an honest peer believes now."""
        newest = await self.rig.service._checkpoints.newest()
        size, root = newest.checkpoint.tree_size, newest.checkpoint.root_hash
        return SeenCheckpoint(tree_size=size, root_hash=root, envelope=newest.envelope)


def told(log: FakeLog, *, age_s: float = 0) -> SeenCheckpoint:
    envelope = log.checkpoint(1, now=time.time() - age_s)
    return SeenCheckpoint(tree_size=log.size, root_hash=log.root().hex(), envelope=envelope)


@asynccontextmanager
async def answering(peers: Peers) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_LoaderServiceServicer_to_server(peers, server)
    add_ExecutorServiceServicer_to_server(peers, server)
    leaf = LEAVES["loader"]
    trusted = SERVICE_CA.certificate + ADMIN_CA.certificate
    credentials = grpc.ssl_server_credentials([(leaf.key, leaf.certificate)], trusted, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest.fixture
async def world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    monkeypatch.setattr("loraport.cli.peers.PAUSE_S", 0.02)
    peers = Peers()
    async with serving(write_config(tmp_path)) as rig, answering(peers) as address:
        await rig.tenant("acme")
        (tmp_path / "admin.pem").write_bytes(LEAVES["admin"].certificate)
        (tmp_path / "admin.key").write_bytes(LEAVES["admin"].key)
        endpoints = {
            "schema": ENDPOINTS_SCHEMA,
            **dict.fromkeys(("registry", "router_admin", "loader_upload"), rig.address),
            "loader": address,
            # Nobody listens there.
            "executors": {"a": address, "gone": "127.0.0.1:9"},
            "credentials": {"ca": "ca.pem", "admin_certificate": "admin.pem", "admin_key": "admin.key"},
        }
        (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))
        world = World(rig, peers, tmp_path, capsys)
        peers.loader = peers.executor = await world.seen()
        yield world


GOOD = {"loader": "OK", "executor/a": "OK", "executor/gone": "UNREACHABLE"}


async def test_peers_that_were_told_one_history_are_good_though_it_has_grown(world: World) -> None:
    await world.rig.base()
    assert await world.standings(0) == GOOD
    code, found = await world.cli("verify")
    assert (code, found["good"]) == (0, True)
    assert {row["peer"]: row["standing"] for row in found["peers"]} == GOOD


async def test_a_peer_that_saw_another_history_is_an_alarm(world: World) -> None:
    other = FakeLog(REGISTRY_KEY, size=1, history="other")
    world.peers.executor = told(other)
    assert await world.standings(1) == GOOD | {"executor/a": "SPLIT_VIEW"}
    code, text = await world.cli("peers", as_json=False)
    assert code == 1
    assert "ALARM: executor/a: SPLIT_VIEW" in text
    code, found = await world.cli("verify")
    assert (code, found["good"], found["code"]) == (1, False, None), "the log itself is without fault"
    [row] = [row for row in found["peers"] if row["alarm"]]
    assert base64.b64decode(row["checkpoint"]) == world.peers.executor.envelope, "the evidence is there to be kept"
    assert (await world.cli("verify", "--no-peers"))[0] == 0


async def test_two_roots_of_one_size_are_an_alarm_of_both(world: World) -> None:
    size = world.peers.loader.tree_size
    world.peers.executor = told(FakeLog(REGISTRY_KEY, size=size, history="other"))
    assert await world.standings(1) == GOOD | {"executor/a": "SPLIT_VIEW", "loader": "SPLIT_VIEW"}


async def test_a_forged_envelope_is_an_alarm_of_its_own_and_says_nothing_of_the_others(world: World) -> None:
    world.peers.executor = told(FakeLog(SigningKey.generate(), size=world.peers.loader.tree_size))
    assert await world.standings(1) == GOOD | {"executor/a": "FORGED"}
    honest = world.peers.loader
    world.peers.executor = SeenCheckpoint(
        tree_size=honest.tree_size + 1, root_hash=honest.root_hash, envelope=honest.envelope
    )
    assert await world.standings(1) == GOOD | {"executor/a": "FORGED"}


async def test_a_peer_that_is_ahead_shows_that_the_registry_went_back(world: World) -> None:
    world.peers.executor = told(FakeLog(REGISTRY_KEY, size=1000))
    assert await world.standings(1) == GOOD | {"executor/a": "ROLLBACK"}


async def test_a_peer_that_hears_nothing_new_is_an_alarm(world: World) -> None:
    world.peers.executor = told(FakeLog(REGISTRY_KEY, size=0), age_s=601)
    assert await world.standings(1) == GOOD | {"executor/a": "STALE"}


async def test_a_peer_that_believes_nothing_yet_is_none(world: World) -> None:
    world.peers.loader = world.peers.executor = None
    assert await world.standings(0) == GOOD | {"executor/a": "NONE", "loader": "NONE"}
