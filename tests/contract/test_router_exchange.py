"""Three routers over one Valkey: their counters come together, also after the board was lost."""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraport.dev.commands import valkey_program
from services.router import exchange
from services.router.exchange import Exchange, decode
from services.router.ledger import Ledger
from services.router.shared_work import SharedWork, slack_ms
from services.shared import board
from services.shared.board import WORK_KEY, Board
from services.shared.clock import SystemClock


def start(socket: Path) -> subprocess.Popen[bytes]:
    command = [str(valkey_program()), "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not socket.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board that is there answers in the end, and what it says is not too old by then."""
    monkeypatch.setattr(board, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(exchange, "STALE_S", 600.0)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    socket = tmp_path / "v.sock"
    process = start(socket)
    yield socket, process
    process.kill()
    process.wait()


class Router:
    """A ledger, and its exchange over the board."""

    def __init__(self, name: str, socket: Path) -> None:
        self.ledger = Ledger()
        self.board = Board(f"unix://{socket}")
        self.exchange = Exchange(self.board, SharedWork(self.ledger, router=name), clock=SystemClock())


async def test_three_routers_know_of_each_others_charges(valkey: tuple[Path, subprocess.Popen[bytes]]) -> None:
    socket, process = valkey
    routers = [Router(f"r{number}", socket) for number in range(3)]

    async def all_exchange() -> None:
        for _ in range(2):
            for router in routers:
                await router.exchange.once()

    await all_exchange()
    for number, router in enumerate(routers):
        router.ledger.open("acme", prefill_ms=100.0 * (number + 1))
        router.ledger.open("globex", prefill_ms=10.0)
    await all_exchange()
    assert [router.ledger.counter("acme") for router in routers] == [600.0] * 3
    assert [router.ledger.counter("globex") for router in routers] == [30.0] * 3
    assert routers[0].ledger.accounts["acme"].elsewhere == 500.0

    process.kill()
    process.wait()
    routers[1].ledger.open("acme", prefill_ms=50.0)
    await all_exchange()
    assert [router.ledger.counter("acme") for router in routers] == [600.0, 650.0, 600.0]
    socket.unlink(missing_ok=True)
    again = start(socket)
    try:
        # A router that was away is heard anew, so what it charged meanwhile is not known; from then on it is.
        await all_exchange()
        routers[1].ledger.open("acme", prefill_ms=5.0)
        await all_exchange()
        counters = [router.ledger.counter("acme") for router in routers]
        assert counters == [605.0, 655.0, 605.0]
        assert max(counters) - min(counters) <= slack_ms(executors=1)
        await routers[0].board._client.hset(WORK_KEY, "liar", b'{"time": 1e999, "work": []}')
        await all_exchange()
        assert [router.ledger.counter("acme") for router in routers] == counters
        for router in routers:
            await router.board.close()
    finally:
        again.kill()
        again.wait()


async def test_it_runs_in_the_background_and_takes_its_report_away(
    valkey: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    socket, _ = valkey
    router, other = Router("r0", socket), Router("r1", socket)
    router.ledger.open("acme", prefill_ms=1.0)
    router.exchange.start()
    async with asyncio.timeout(60):
        while not await other.board.get_work():
            await asyncio.sleep(0.01)
    await router.exchange.stop()
    assert await other.board.get_work() == {}
    await router.board.close()
    await other.board.close()


async def test_it_ends_also_when_its_board_swallows_the_cancellation() -> None:
    """As a client may that is cancelled in the middle of a call."""

    class Swallowing:
        async def put_work(self, router: str, report: bytes) -> bool:
            entered.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            return False

        async def get_work(self) -> dict[str, bytes]:
            return {}

        async def drop_work(self, router: str) -> None: ...

    entered = asyncio.Event()
    swallowed = Exchange(Swallowing(), SharedWork(Ledger(), router="r0"), clock=SystemClock())
    swallowed.start()
    await entered.wait()
    async with asyncio.timeout(60):
        await swallowed.stop()


def test_what_is_not_a_report_is_ignored() -> None:
    for data in (b"", b"[]", b'{"time": 1}', b'{"time": 1, "work": {"a": -1}}', b'{"time": 1, "work": {"a": 1e999}}'):
        assert decode(data) is None
    assert decode(b'{"time": 1, "work": {"a": 2}}') == (1.0, {"a": 2.0})
