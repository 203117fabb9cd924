"""One request from its queue to its end: place, ticket, execute, translate, settle.

    queue ──> placed ──> executor has begun ──> first token ──> … ──> every answer finished
                 ^                │
                 └── once more, ──┘   only before the first token, when the executor became unavailable

Nothing is told to the caller before the first token, so a second try is never seen. However it ends — finished, failed,
cancelled, the caller gone — `close` gives everything back, and once.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass

import structlog

from loraport.bundle.envelope import SigningKey
from services.router.admission import Admission, Grant
from services.router.answers import Answers
from services.router.door import Job
from services.router.events import Event, ExecutorEvent, ExecutorStarted, ExecutorTokens, Order, Started
from services.router.fair_queue import Waiting
from services.router.fleet import Fleet
from services.router.ledger import Ledger
from services.router.ports import Execution
from services.shared.catalog import RevisionItem
from services.shared.clock import Clock
from services.shared.errors import Code, LoraportError
from services.shared.statements import MAX_TICKET_LIFE_S, Ticket, seal

log = structlog.get_logger()

# Reasons of an executor that mean something to the caller; any other is a fault between the services.
_FOR_THE_CALLER = frozenset(
    {
        "INVALID_REQUEST", "PROMPT_TOO_LONG", "REVISION_NOT_ACTIVE", "CHECKPOINT_STALE", "POOL_TOO_SMALL",
        "HOST_TIER_FULL", "OVERLOADED", "DRAINING", "EXECUTOR_UNAVAILABLE", "LOADER_UNAVAILABLE", "STORE_UNAVAILABLE",
        "REGISTRY_UNAVAILABLE", "DEADLINE_EXCEEDED", "DIGEST_MISMATCH", "NON_FINITE_LOGITS", "INTERNAL",
        "NOT_IMPLEMENTED",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RelayParts:
    """What every relay of a router shares."""

    admission: Admission
    fleet: Fleet
    ledger: Ledger
    signing_key: SigningKey
    clock: Clock
    max_request_s: float
    max_unread_s: float


class Relay:
    """See the module's text. Used once."""

    def __init__(self, job: Job, parts: RelayParts, *, timeout_s: float | None) -> None:
        self._job = job
        self._parts = parts
        longest = parts.max_request_s
        self._ends = parts.clock.monotonic() + min(longest, timeout_s if timeout_s is not None else longest)
        self._grant: Grant | None = None
        self._execution: Execution | None = None
        self._given_up = False

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields what the caller is told: one Started, then Tokens, one Finished per answer.

        Raises:
            LoraportError: why there will be no (further) answer.
        """
        job = self._job
        answers = Answers(job.base.text.table, job.sampling, prompt_tokens=len(job.prompt_token_ids))
        try:
            started, first, rest = await self._begin()
            with self._reading():
                yield started
            for event in self._settle(answers, first):
                with self._reading():
                    yield event
            while not answers.done:
                for event in self._settle(answers, await _next(rest)):
                    with self._reading():
                        yield event
        except LoraportError as error:
            if error.reason == "EXECUTOR_UNAVAILABLE" and self._grant is not None:
                self._note_unavailable(self._grant.executor, error)
            raise self._for_the_caller(error) from None
        finally:
            self.close()

    def close(self) -> None:
        """Cancels what runs and gives back what is held; harmless when there is nothing (any more)."""
        execution, self._execution = self._execution, None
        if execution is not None:
            execution.cancel()
        grant, self._grant = self._grant, None
        if grant is not None:
            grant.release()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Around a `yield`: a caller that does not come back for more in time loses its place while it stalls."""
        timer = asyncio.get_running_loop().call_later(self._parts.max_unread_s, self._give_up)
        try:
            yield
        finally:
            timer.cancel()
        if self._given_up:
            raise LoraportError("DEADLINE_EXCEEDED", f"nothing was read for {self._parts.max_unread_s:g} s")

    def _give_up(self) -> None:
        log.info("caller does not read", request=self._job.id)
        self._given_up = True
        self.close()

    async def _begin(self) -> tuple[Started, ExecutorEvent, AsyncIterator[ExecutorEvent]]:
        """Waits in the queue and for the first token; tries a second executor when the first is unavailable."""
        try:
            async with asyncio.timeout(self._job.first_token_timeout_s):
                arrived = self._parts.clock.monotonic()
                grant = self._grant = await self._parts.admission.enter(self._waiting(arrived))
                queue_ms = (self._parts.clock.monotonic() - arrived) * 1000
                try:
                    return await self._run(grant.executor, queue_ms)
                except LoraportError as error:
                    failed = grant.executor
                    if error.code != Code.UNAVAILABLE:
                        raise
                    self._note_unavailable(failed, error)
                    if not self._parts.admission.move(grant, frozenset({failed})):
                        raise
                    return await self._run(grant.executor, queue_ms)
        except TimeoutError:
            raise LoraportError("DEADLINE_EXCEEDED", "no token within first_token_timeout") from None

    async def _run(self, executor: str, queue_ms: float) -> tuple[Started, ExecutorEvent, AsyncIterator[ExecutorEvent]]:
        job = self._job
        left = self._ends - self._parts.clock.monotonic()
        if left <= 0:
            raise LoraportError("DEADLINE_EXCEEDED")
        order = Order(
            ticket=self._ticket(),
            revision_id=job.revision_id,
            prompt_token_ids=job.prompt_token_ids,
            sampling=job.sampling,
            priority=job.priority,
        )
        if self._execution is not None:
            self._execution.cancel()
        self._execution = self._parts.fleet.executor(executor).execute(order, timeout_s=left)
        said = self._execution.events()
        begun = await _next(said)
        if not isinstance(begun, ExecutorStarted):
            raise LoraportError("INTERNAL", "the executor sent an event out of order")
        self._require_same(begun, executor)
        if begun.load_ms > 0:
            self._parts.ledger.charge_load(job.tenant, begun.load_ms)
        first = await _next(said)
        started = Started(
            revision_id=begun.revision_id,
            base_id=begun.base_id,
            executor=executor,
            queue_ms=queue_ms,
            load_ms=begun.load_ms,
            prompt_token_ids=job.prompt_token_ids,
            version=job.revision.version if job.revision is not None else 0,
        )
        return started, first, said

    def _require_same(self, begun: ExecutorStarted, executor: str) -> None:
        """The promise of the whole system: no token of any other revision than the one that was resolved."""
        if (begun.revision_id, begun.base_id) != (self._job.revision_id, self._job.base.base_id):
            log.error(
                "executor began with other weights",
                executor=executor,
                wanted=self._job.revision_id,
                began=begun.revision_id,
            )
            raise LoraportError("INTERNAL", "the executor began with other weights than were asked for")

    def _settle(self, answers: Answers, event: ExecutorEvent) -> list[Event]:
        if isinstance(event, ExecutorTokens):
            self._parts.ledger.charge_decode(self._job.tenant, len(event.token_ids))
        return list(answers.take(event))

    def _waiting(self, arrived: float) -> Waiting:
        job = self._job
        return Waiting(
            id=job.id,
            tenant=job.tenant,
            base_model=job.base.base_model,
            revision_id=job.revision_id,
            rank=job.revision.max_rank if job.revision is not None else 0,
            prompt_tokens=len(job.prompt_token_ids),
            priority=job.priority,
            arrived=arrived,
            weight=job.weight,
            answers=job.sampling.answers,
        )

    def _ticket(self) -> bytes:
        job = self._job
        ticket = Ticket(
            tenant=job.tenant,
            revision_id=job.revision_id,
            base_id=job.base.base_id,
            request_id=job.id,
            expires=int(self._parts.clock.now()) + MAX_TICKET_LIFE_S,
        )
        return seal(ticket, self._parts.signing_key)

    def _note_unavailable(self, executor: str, error: LoraportError) -> None:
        log.info("executor unavailable", executor=executor, reason=error.reason)
        if error.reason in ("EXECUTOR_UNAVAILABLE", "DRAINING"):
            self._parts.fleet.note_failure(executor, error.reason)

    def _for_the_caller(self, error: LoraportError) -> LoraportError:
        revision: RevisionItem | None = self._job.revision
        if error.reason == "REVISION_NOT_ACTIVE" and revision is not None and revision.tenant != self._job.tenant:
            return LoraportError("ADAPTER_NOT_FOUND")
        if error.reason in _FOR_THE_CALLER:
            return error
        log.error("executor refused the router", reason=error.reason, why=error.message)
        return LoraportError("INTERNAL", f"internal error, incident {self._job.id[:12]}")


async def _next(said: AsyncIterator[ExecutorEvent]) -> ExecutorEvent:
    """Returns the next event. An executor that ends its stream before every answer has ended has gone away."""
    event = await anext(said, None)
    if event is None:
        raise LoraportError("EXECUTOR_UNAVAILABLE", "the executor ended the stream early", retry_after_s=1.0)
    return event
