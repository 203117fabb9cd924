"""Brings routers' charges together over the notice board; without it, each goes by its own."""

import asyncio
import json
from typing import Protocol

from services.router.shared_work import EXCHANGE_S, STALE_S, SharedWork
from services.shared.board import asked_to_end
from services.shared.clock import Clock

MAX_REPORT_BYTES = 1 << 20


class WorkBoard(Protocol):
    """Where routers leave their reports; losing one loses nothing."""

    async def put_work(self, router: str, report: bytes) -> bool:
        """Writes a report; False when the board is away."""

    async def get_work(self) -> dict[str, bytes]:
        """Returns the reports that are there."""

    async def drop_work(self, router: str) -> None:
        """Removes a report."""


class Exchange:
    """See the module's text. Belongs to one event loop."""

    def __init__(self, board: WorkBoard, shared: SharedWork, *, clock: Clock) -> None:
        self._board = board
        self._shared = shared
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins, in the running event loop."""
        self._task = asyncio.create_task(self._run())

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What runs in the background; it ends by `stop` or by a bug."""
        return (self._task,) if self._task is not None else ()

    async def stop(self) -> None:
        """Stops, and takes this router's report away."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._board.drop_work(self._shared.router)

    async def once(self) -> None:
        """Says and hears once."""
        now = self._clock.now()
        report = json.dumps({"time": now, "work": self._shared.say()}).encode()
        await self._board.put_work(self._shared.router, report)
        found = await self._board.get_work()
        reports = {name: known for name, data in found.items() if (known := decode(data)) is not None}
        self._shared.hear({name: work for name, (time, work) in reports.items() if abs(now - time) < STALE_S})
        for name, (time, _) in reports.items():
            if now - time > 6 * STALE_S:
                await self._board.drop_work(name)

    async def _run(self) -> None:
        await self.once()
        while not asked_to_end():
            await asyncio.sleep(EXCHANGE_S)
            await self.once()


def decode(data: bytes) -> tuple[float, dict[str, float]] | None:
    """Returns a report's time and work, or None for anything that is not one: the board holds hints."""
    if len(data) > MAX_REPORT_BYTES:
        return None
    try:
        value = json.loads(data)
        time, work = float(value["time"]), {str(tenant): float(ms) for tenant, ms in value["work"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    sound = all(0 <= ms < float("inf") for ms in work.values())
    return (time, work) if sound else None
