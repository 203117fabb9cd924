"""Makes the moves of rollouts that time alone brings, and those that a crash left undone.

Every process of a registry may do it: a move is decided again in the transaction that writes it, so the second one
finds it done.
"""

import asyncio

import structlog
from sqlalchemy import Connection

from services.registry import moving
from services.registry.records import RolloutRow
from services.registry.rollout import machine
from services.registry.store import rollouts
from services.registry.store.database import Database
from services.shared.clock import Clock
from services.shared.errors import LoraportError

log = structlog.get_logger()


class RolloutTicker:
    """Looks at every running rollout, again and again."""

    def __init__(self, database: Database, clock: Clock, *, interval_s: float) -> None:
        self._database = database
        self._clock = clock
        self._interval_s = interval_s

    async def run(self) -> None:
        """Looks every `interval_s` seconds, until it is cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.tick)
            except LoraportError as error:
                log.error("rollouts not looked at", reason=error.reason, why=error.message)
            await asyncio.sleep(self._interval_s)

    def tick(self) -> None:
        """Makes at most one move of each rollout; one that cannot be moved stops no other.

        Raises:
            LoraportError: REGISTRY_UNAVAILABLE.
        """
        for row in self._due():
            try:
                self._move(row)
            except Exception as error:
                log.error("rollout not moved", rollout=row.name, why=str(error), exc_info=_unforeseen(error))

    def _move(self, row: RolloutRow) -> None:
        with self._database.write() as transaction:
            fresh = rollouts.require(transaction.connection, row.adapter_name, row.number)
            moved = moving.advance(transaction, fresh, now_us=self._now_us()) if fresh.running else fresh
        if moved.generation != fresh.generation:
            log.info("rollout moved", rollout=moved.name, state=str(moved.position.state), share=moved.share)

    def _due(self) -> list[RolloutRow]:
        """Returns the rollouts that have a move to make, by a reader's view, which stops no writer."""
        with self._database.read() as connection:
            return [row for row in rollouts.running(connection) if self._has_move(connection, row)]

    def _has_move(self, connection: Connection, row: RolloutRow) -> bool:
        try:
            evidence = rollouts.evidence(connection, row)
            return machine.decide(row.position, row.settings, evidence, now_us=self._now_us()) is not None
        except (ArithmeticError, ValueError, LookupError) as error:
            log.error("rollout not judged", rollout=row.name, why=str(error), exc_info=error)
            return False

    def _now_us(self) -> int:
        return int(self._clock.now() * 1_000_000)


def _unforeseen(error: Exception) -> Exception | None:
    """Returns an error whose traceback somebody should read: any that has no reason of its own."""
    return None if isinstance(error, LoraportError) else error
