"""Popularity and thrash on the notice board: what routers tell each other, and one that is started again itself.

A report outlives its router by `KEPT_S`, so that a router that is started again knows which revisions are in use where,
which have several homes and who thrashes. The board holds hints: what is not a report is ignored, and what is believed
decides about nothing but the number of homes, within the same bounds as ever.
"""

import asyncio
import json
from typing import Any, Protocol

from services.router.capacity import PoolNeeds
from services.router.popularity import Popularity
from services.shared.board import asked_to_end
from services.shared.clock import Clock

EXCHANGE_S = 2.0
KEPT_S = 300.0
MAX_REPORT_BYTES = 2 << 20
KIND = "gauges"


class GaugeBoard(Protocol):
    """Where reports of a kind lie, by router; losing them loses nothing."""

    async def put_report(self, kind: str, router: str, report: bytes, *, ttl_s: int) -> bool: ...

    async def get_reports(self, kind: str) -> dict[str, bytes]: ...

    async def drop_report(self, kind: str, router: str) -> None: ...


class Gauges:
    """See the module's text. `router` names this process. Belongs to one event loop."""

    def __init__(
        self, board: GaugeBoard, needs: PoolNeeds, popularity: Popularity, *, router: str, clock: Clock
    ) -> None:
        self._board = board
        self._needs = needs
        self._popularity = popularity
        self._router = router
        self._clock = clock
        self._restored = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins, in the running event loop."""
        self._task = asyncio.create_task(self._run())

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What runs in the background; it ends by `stop` or by a bug."""
        return (self._task,) if self._task is not None else ()

    async def stop(self) -> None:
        """Stops; the last report stays."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def once(self) -> None:
        """Hears and says once."""
        now = self._clock.now()
        for router, data in (await self._board.get_reports(KIND)).items():
            if router == self._router:
                continue
            report = decode(data)
            if report is None or not 0 <= now - report["time"] + 60 < KEPT_S + 60:
                await self._board.drop_report(KIND, router)
                continue
            self._hear(report, age=max(0.0, now - report["time"]))
        monotonic = self._clock.monotonic()
        said = {"time": now, "uses": self._needs.say(monotonic), "homes": self._popularity.homes(monotonic)}
        self._restored |= await self._board.put_report(
            KIND, self._router, json.dumps(said).encode(), ttl_s=int(KEPT_S) + 60
        )

    def _hear(self, report: dict[str, Any], *, age: float) -> None:
        monotonic = self._clock.monotonic()
        try:
            self._needs.hear(report["uses"], monotonic - age)
            if not self._restored:
                # Once: from then on this router judges by its own work.
                self._popularity.restore({str(key): int(count) for key, count in report["homes"].items()}, monotonic)
        except (ValueError, TypeError, IndexError, AttributeError, OverflowError):
            return

    async def _run(self) -> None:
        await self.once()
        while not asked_to_end():
            await asyncio.sleep(EXCHANGE_S)
            await self.once()


def decode(data: bytes) -> dict[str, Any] | None:
    """Returns a report, None for what is none."""
    if len(data) > MAX_REPORT_BYTES:
        return None
    try:
        report = json.loads(data)
        time = float(report["time"])
        found = {"time": time, "uses": list(report["uses"]), "homes": dict(report["homes"])}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return found if abs(time) < float("inf") else None
