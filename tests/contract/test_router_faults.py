"""Two router processes, two executor processes and a Valkey, of which one after the other fails.

The simulator's scenarios on real processes, and fewer: whatever fails, a call ends once, with the whole answer of its
own revision or with a typed error, and when the fault is over both routers answer again.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from loraport import AsyncClient, UnavailableError
from loraport.dev.commands import valkey_program
from services.router import gauges
from services.shared.board import WORK, Board
from tests.contract.router_world import World, api_key, digest, eventually
from tests.support.echo_executor import echo
from tests.support.ports import free_port

TENANTS, TOKENS = ("acme", "globex"), 6
ROUTERS, EXECUTORS = ("r0", "r1"), ("e0", "e1")


class Cable:
    """A connection between two processes that can be cut: everything on it breaks and nothing new comes through."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open: set[asyncio.StreamWriter] = set()
        self._whole = True
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._whole = False
        for writer in list(self._open):
            writer.transport.abort()

    def heal(self) -> None:
        self._whole = True

    async def stop(self) -> None:
        self.cut()
        self._server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._whole:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
            self._open |= {writer, back}
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        self._open -= {writer}

    @staticmethod
    async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()


class Fleet:
    """The processes, started and ended one by one, and callers that never stop asking."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world = World(folder)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.epochs = dict.fromkeys(EXECUTORS, 0)
        self.ports = {name: free_port() for name in (*ROUTERS, *EXECUTORS)}
        self.cable = Cable(self.ports["e0"])
        self.board = Board(f"unix://{folder}/v.sock")
        self.answered = {(router, tenant): 0 for router in ROUTERS for tenant in TENANTS}
        self.refused = dict.fromkeys(ROUTERS, 0)
        self.whys: list[str] = []
        self.wrong: list[str] = []

    async def start(self) -> None:
        registry = self.world.registry
        registry.items += [registry.base()]
        for tenant in TENANTS:
            registry.items += [*registry.tenant(tenant), *registry.adapter(tenant, "a")]
        await self.world.start_registry()
        certificate, key = self.world.leaf("service/executor/e0")
        (self.folder / "peer.pem").write_bytes(certificate)
        (self.folder / "peer.key").write_bytes(key)
        await self.cable.start()
        for name in ("valkey", *EXECUTORS, *ROUTERS):
            self.begin(name)

    def begin(self, name: str) -> None:
        """Starts a process."""
        if name == "valkey":
            (self.folder / "v.sock").unlink(missing_ok=True)
            socket_path = str(self.folder / "v.sock")
            command = [valkey_program(), "--port", "0", "--unixsocket", socket_path, "--save", "", "--appendonly", "no"]
        elif name in EXECUTORS:
            self.epochs[name] += 1
            of = (self.folder, name, self.ports[name], self.world.registry.base_id, self.epochs[name])
            command = [sys.executable, "-m", "tests.support.echo_executor", *of]
        else:
            command = [sys.executable, "-m", "services.router", "--config", self._config(name)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in command], stdout=log, stderr=log, env={**os.environ, "LORAPORT_LOG": "json"}
            )

    def kill(self, name: str) -> None:
        """Ends a process as a crash does."""
        self.processes[name].kill()
        self.processes[name].wait()

    def _config(self, router: str) -> Path:
        # The second router reaches the first executor over the cable that can be cut.
        first = self.cable.port if router == "r1" else self.ports["e0"]
        self.world.addresses.update(e0=f"127.0.0.1:{first}", e1=f"127.0.0.1:{self.ports['e1']}")
        self.world.overrides = {
            "user_address": f"127.0.0.1:{self.ports[router]}", "valkey_url": f"unix://{self.folder}/v.sock",
            "executor_wait_s": 30.0,  # an executor that is slow to say that it is there is no fault of this test's
        }  # fmt: skip
        path = self.folder / f"{router}.json"
        path.write_text(json.dumps(self.world.config()))
        return path

    async def ask(self, router: str, tenant: str) -> None:
        """One call and what became of it."""
        wanted = digest(f"{tenant}/a/1")
        address = f"127.0.0.1:{self.ports[router]}"
        async with AsyncClient(
            address, api_key=api_key(tenant), ca_certificate=self.folder / "ca.pem", timeout=60, tenant=tenant
        ) as client:
            while True:
                try:
                    answer = await client.generate("the fox", adapter="a", max_tokens=TOKENS)
                except UnavailableError as error:
                    self.refused[router] += 1
                    self.whys.append(f"{router} {error.reason}: {error}")
                    await asyncio.sleep(0.05)
                    continue
                if (answer.revision_id, list(answer.token_ids)) != (wanted, echo(wanted, TOKENS)):
                    self.wrong.append(f"{router} {tenant}: {answer}")
                self.answered[router, tenant] += 1

    async def both_answer(self) -> None:
        """Waits until both routers have answered a few calls more of each tenant."""
        before = dict(self.answered)
        await eventually(lambda: all(count >= before[key] + 3 for key, count in self.answered.items()))

    async def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        await self.cable.stop()
        await self.board.close()
        await self.world.stop()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    await fleet.start()
    yield fleet
    await fleet.stop()


async def reports(board: Board, kind: str, condition: Callable[[dict[str, bytes]], bool]) -> dict[str, bytes]:
    """Waits for routers' reports of a kind on the board that are as wanted."""
    async with asyncio.timeout(180):
        while not condition(found := await board.get_reports(kind)):
            await asyncio.sleep(0.05)
    return found


def told(fleet: Fleet) -> str:
    """What the callers and the routers last said, for whoever reads a failure."""
    logs = [(fleet.folder / f"{name}.log").read_text()[-1500:] for name in ROUTERS]
    return "\n".join([*fleet.whys[-3:], *logs])


async def test_calls_end_once_and_rightly_whatever_fails(fleet: Fleet) -> None:
    callers = [asyncio.create_task(fleet.ask(router, tenant)) for router in ROUTERS for tenant in TENANTS]
    await fleet.both_answer()
    # Both routers say on the board what they charged and what is in use.
    await reports(fleet.board, WORK, lambda found: len(found) == 2)
    before = await reports(fleet.board, gauges.KIND, lambda found: len(found) == 2)

    # The board loses everything, then goes away, then comes back empty: the routers fill it again.
    refused = dict(fleet.refused)
    await fleet.board._client.flushall()
    await reports(fleet.board, WORK, lambda found: len(found) == 2)
    fleet.kill("valkey")
    await fleet.both_answer()
    fleet.begin("valkey")
    await reports(fleet.board, gauges.KIND, lambda found: len(found) == 2)
    assert fleet.refused == refused, told(fleet)

    # A router dies in the middle of answers and starts again; the other does not notice.
    fleet.kill("r0")
    other = fleet.refused["r1"]
    fleet.begin("r0")
    await fleet.both_answer()
    assert fleet.refused["r1"] == other, told(fleet)
    # The new process has a new name, and has read back what is in use.
    found = await reports(fleet.board, gauges.KIND, lambda found: len(set(found) - set(before)) == 1)
    (fresh,) = (gauges.decode(found[name]) for name in set(found) - set(before))
    assert fresh
    assert {row[1] for row in fresh["uses"]} == {digest(f"{tenant}/a/1") for tenant in TENANTS}

    # An executor dies, both routers go on with the other one; it comes back empty.
    fleet.kill("e0")
    await fleet.both_answer()
    fleet.begin("e0")
    await fleet.both_answer()

    # One router cannot reach an executor that the other can.
    fleet.cable.cut()
    await fleet.both_answer()
    fleet.cable.heal()
    await fleet.both_answer()

    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    # Whatever else a caller raised would have ended it: no error but `unavailable` was seen.
    assert all(caller.cancelled() for caller in callers)
    assert fleet.wrong == []
    assert all(process.poll() is None for process in fleet.processes.values()), told(fleet)
