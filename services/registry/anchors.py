"""Ties the audit trail to the log, so that its newest events cannot be cut off unnoticed.

The chain of events shows every change but the loss of its end. So now and then a leaf of the log names the newest
event and its hash; the log's root is signed, and peers and auditors remember how long it was. `loraport audit verify`
asks for every event that was named. What was written since the last leaf, `interval_s` at most, is not covered.
"""

import asyncio

import structlog

from services.registry.store import journal
from services.registry.store.database import Database
from services.shared.clock import Clock
from services.shared.errors import LoraportError

log = structlog.get_logger()


class Anchors:
    """Writes the leaves: none when nothing happened since the last one of this process."""

    def __init__(self, database: Database, clock: Clock, *, interval_s: float) -> None:
        self._database = database
        self._clock = clock
        self._interval_s = interval_s
        self._named = 0

    async def run(self) -> None:
        """Writes a leaf every `interval_s` seconds, until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.anchor()
            except LoraportError as error:
                log.error("audit trail not anchored", reason=error.reason, why=error.message)

    async def anchor(self) -> None:
        """Writes a leaf about the newest event, unless there is one.

        Raises:
            LoraportError: REGISTRY_UNAVAILABLE or LOG_DAMAGED.
        """
        await asyncio.to_thread(self._anchor)

    def _anchor(self) -> None:
        with self._database.write() as transaction:
            named = journal.anchor(transaction, after=self._named, now_us=int(self._clock.now() * 1_000_000))
        self._named = named
