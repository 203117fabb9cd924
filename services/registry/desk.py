"""How every change is made: one transaction with the change, its audit event and the result of its request id.

A change that is refused is rolled back whole and then noted as refused, with the reason code; what a service asks for
in vain is noted a bounded number of times a minute, as at the door.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import structlog
from google.protobuf.message import Message
from sqlalchemy import Connection

from loraport.bundle.digest import sha256_digest
from services.registry.refusals import Refusal, Refusals
from services.registry.store import journal
from services.registry.store.database import Database, Transaction
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.rpc.guard import Call, current_call
from services.shared.rpc.server import run_blocking

log = structlog.get_logger()

M = TypeVar("M", bound=Message)
T = TypeVar("T")


@dataclass(slots=True)
class Note:
    """What the audit event will say. Work sets `resource` when it learns the full name of what was asked for. It sets
    `idle` when everything was already as it was asked to be: then there is no event."""

    resource: str
    reason: str = ""
    idle: bool = False


Work = Callable[[Transaction, Note], M]


class Desk:
    """Reads and changes the database on behalf of calls, off the event loop."""

    def __init__(self, database: Database, clock: Clock, *, request_life_s: int) -> None:
        self.database = database
        self._clock = clock
        self._request_life_us = request_life_s * 1_000_000
        self._refusals = Refusals()
        # Refusals are noted by many threads.
        self._counting = threading.Lock()

    def now_us(self) -> int:
        """Returns the time in microseconds since the Unix epoch."""
        return int(self._clock.now() * 1_000_000)

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Returns `function(connection)` over a view of one moment."""
        return await run_blocking(self._read, function)  # type: ignore[no-any-return]

    async def change(
        self,
        request: Message,
        response: type[M],
        work: Work[M],
        *,
        resource: str,
        reason: str = "",
        request_id: str = "",
    ) -> M:
        """Runs `work` in a transaction and returns its response.

        With a `request_id`, a request that was carried out already is answered with the first response.

        Raises:
            LoraportError: what `work` raises; INVALID_REQUEST for a request id that is no UUID or was used for
                another request.
        """
        return await run_blocking(  # type: ignore[no-any-return]
            self._change, request, response, work, Note(resource, reason), request_id
        )

    async def take(self, work: Callable[[Transaction], T]) -> T:
        """Runs `work` in a transaction that is no event by itself: a peer's report, of which there are many a second.

        Raises:
            LoraportError: what `work` raises.
        """
        return await run_blocking(self._take, work)  # type: ignore[no-any-return]

    def note(self, refusal: Refusal) -> list[Refusal]:
        """Returns the events to write for what a peer, or somebody at the door, was refused. From any thread."""
        with self._counting:
            return self._refusals.note(refusal, now=self._clock.monotonic())

    async def refuse(self, refusals: Sequence[Refusal]) -> None:
        """Writes events of refused calls. A database that is down is logged."""
        await run_blocking(self._refuse, refusals)

    def _refuse(self, refusals: Sequence[Refusal]) -> None:
        try:
            with self.database.write() as transaction:
                for item in refusals:
                    journal.add_event(
                        transaction,
                        now_us=self.now_us(),
                        principal=item.principal,
                        method=item.method,
                        resource=item.resource,
                        decision="refused",
                        reason=item.reason,
                        request_id=item.request_id,
                    )
        except LoraportError:
            # The caller must hear of the first error; that the database is down is in the log.
            log.error("refusals not audited", count=len(refusals))

    def _take(self, work: Callable[[Transaction], T]) -> T:
        with self.database.write() as transaction:
            return work(transaction)

    def _read(self, function: Callable[[Connection], T]) -> T:
        with self.database.read() as connection:
            return function(connection)

    def _change(self, request: Message, response: type[M], work: Work[M], note: Note, request_id: str) -> M:
        call = current_call()
        try:
            with self.database.write() as transaction:
                digest = ""
                if request_id:
                    request_id = uuid_of(request_id)
                    digest = sha256_digest(request.SerializeToString(deterministic=True))
                    first = journal.recall(
                        transaction.connection, call.principal.label, call.method, request_id, request_digest=digest
                    )
                    if first is not None:
                        return response.FromString(first)
                result = work(transaction, note)
                if request_id:
                    journal.remember(
                        transaction,
                        call.principal.label,
                        call.method,
                        request_id,
                        request_digest=digest,
                        response=result.SerializeToString(),
                        now_us=self.now_us(),
                        life_us=self._request_life_us,
                    )
                if not note.idle:
                    journal.add_event(
                        transaction,
                        now_us=self.now_us(),
                        principal=call.principal.label,
                        method=call.method,
                        resource=note.resource,
                        decision="allowed",
                        reason=note.reason,
                        request_id=call.request_id,
                    )
        except LoraportError as error:
            self._refused(call, note, error)
            raise
        return result

    def expired(self, *, now: float | None) -> list[Refusal]:
        """Returns events of refusals that were only counted, in minutes that are over; of all of them for None."""
        with self._counting:
            return self._refusals.expire(now=now)

    def _refused(self, call: Call, note: Note, error: LoraportError) -> None:
        refusal = Refusal(
            principal=call.principal.label,
            method=call.method,
            reason=error.reason,
            request_id=call.request_id,
            resource=note.resource,
        )
        if events := self.note(refusal) if call.principal.plane == "peer" else [refusal]:
            self._refuse(events)


def page_of(rows: list[T], limit: int, seal: Callable[[T], Any]) -> tuple[list[T], str]:
    """Returns the rows of a page and the token of the next one (empty at the end), of one row more than `limit`."""
    if len(rows) <= limit:
        return rows, ""
    return rows[:limit], seal(rows[limit - 1])


def uuid_of(text: str) -> str:
    """Returns a request id as it is kept. Raises LoraportError (INVALID_REQUEST) for what is no UUID."""
    try:
        return str(UUID(text))
    except ValueError:
        raise LoraportError("INVALID_REQUEST", "request_id must be a UUID", subject="request_id") from None
