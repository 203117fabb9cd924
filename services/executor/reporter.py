"""Tells the notice board what this executor holds: at once when it changes, and before the last notice expires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from services.executor.engine.state import EngineState
from services.shared.clock import Clock
from services.shared.residency import REPORT_EVERY_S, Notice, Resident

LOOK_EVERY_S = 0.1


class NoticeBoard(Protocol):
    """Where notices go; losing one loses nothing."""

    async def put(self, notice: Notice) -> bool:
        """Writes a notice; False when the board is away."""


class Reporter:
    """Follows the engine's state until cancelled."""

    def __init__(
        self,
        board: NoticeBoard,
        state: Callable[[], EngineState],
        *,
        executor: str,
        base_id: str,
        epoch: int,
        clock: Clock,
    ) -> None:
        self._board = board
        self._state = state
        self._executor = executor
        self._base_id = base_id
        self._epoch = epoch
        self._clock = clock

    async def run(self) -> None:
        """Report for ever."""
        told, told_at = -1, 0.0
        while True:
            state, now = self._state(), self._clock.monotonic()
            if state.changes != told or now - told_at >= REPORT_EVERY_S:
                if await self._board.put(self.notice(state)):
                    told = state.changes
                told_at = now
            await asyncio.sleep(LOOK_EVERY_S)

    def notice(self, state: EngineState) -> Notice:
        """Return the notice of a state."""
        return Notice(
            executor=self._executor,
            base_id=self._base_id,
            epoch=self._epoch,
            sequence=state.changes,
            time_ms=int(self._clock.now() * 1000),
            queued_count=state.waiting,
            running_count=state.running,
            pool_used_bytes=(state.page_count - state.free_pages) * state.page_bytes,
            pool_size_bytes=state.page_count * state.page_bytes,
            revisions=tuple(Resident(r.revision_id, r.state.name, r.size_bytes, r.leases) for r in state.residents),
        )
