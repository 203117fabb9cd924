"""One request's way from its tenant's queue to an executor that answers it.

    queue ──> placed ──> attempt ──> the executor has answered
      ^          ^          │
      │          ├── moved ─┤   another executor has room
      └──────────┴── again ─┘   none has, and this one has gone: wait for one that serves, maybe itself, come back

An attempt may fail once without the caller seeing it, as long as nothing was answered and the executor was unavailable
or took no ticket.
Not so with a revision that a rollout tries, where the executor went away: it may have been the reason, and the next one
would go the same way.
However it ends, `close` gives the place back, and once.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog

from services.router.admission import Admission
from services.router.dispatch import Grant
from services.router.door import Job
from services.router.fair_queue import Waiting
from services.router.fleet import Fleet
from services.router.locality import BLOCK_TOKENS, MAX_BLOCKS
from services.router.reasons import for_the_caller
from services.router.rollout_losses import ON_TRIAL, Losses
from services.router.tickets import Tickets
from services.shared import metrics, telemetry, tracing
from services.shared.clock import Clock
from services.shared.errors import Code, LoraportError
from services.shared.prefix_hash import prefix_chain, tenant_salt

log = structlog.get_logger()

T = TypeVar("T")

# The executor itself is gone or going; any other reason for UNAVAILABLE is that of an executor that serves.
_GONE = ("EXECUTOR_UNAVAILABLE", "DRAINING")
# It does not take this ticket. Its clock may be off, or its trust old; another executor's need not be.
_ASTRAY = "INVALID_TICKET"


@dataclass(frozen=True, slots=True)
class RelayParts:
    """What every request of a router shares."""

    admission: Admission
    fleet: Fleet
    tickets: Tickets
    clock: Clock
    max_request_s: float
    max_unread_s: float
    losses: Losses


class Passage:
    """See the module's text. Used once."""

    def __init__(self, job: Job, parts: RelayParts, *, timeout_s: float | None) -> None:
        self._job = job
        self._parts = parts
        longest = parts.max_request_s
        self._ends = parts.clock.monotonic() + min(longest, timeout_s if timeout_s is not None else longest)
        self._grant: Grant | None = None

    async def run(self, attempt: Callable[[str, float], Awaitable[T]]) -> T:
        """Waits for a place and returns what `attempt(executor, queue_ms)` returns.

        Raises:
            LoraportError: as `Admission.enter`, or the last attempt's.
        """
        async with self._parts.losses.in_turn(self._job.revision_id):
            return await self._run(attempt)

    async def _run(self, attempt: Callable[[str, float], Awaitable[T]]) -> T:
        arrived = self._parts.clock.monotonic()
        request = self._waiting(arrived)
        with tracing.part("router.queue") as span:
            grant = self._grant = await self._parts.admission.enter(request)
            if span.is_recording() and grant.story is not None:
                span.set_attributes({"why": grant.story.text(), "executor": grant.executor, "cold": grant.story.cold})
        queue_ms = (self._parts.clock.monotonic() - arrived) * 1000
        try:
            with tracing.part("router.attempt", executor=grant.executor):
                return await attempt(grant.executor, queue_ms)
        except LoraportError as error:
            failed = grant.executor
            if error.code != Code.UNAVAILABLE and error.reason != _ASTRAY:
                raise
            self.note_unavailable(error)
            if error.reason == "EXECUTOR_UNAVAILABLE" and self._parts.losses.on_trial(self._job.revision_id):
                raise LoraportError(error.reason, ON_TRIAL, retry_after_s=1.0) from None
            if not self._parts.admission.move(grant, frozenset({failed})):
                if error.reason not in _GONE:
                    raise
                grant = await self._enter_again(request)
            with tracing.part("router.attempt", executor=grant.executor, again=True):
                return await attempt(grant.executor, queue_ms)

    async def _enter_again(self, request: Waiting) -> Grant:
        if self._grant is not None:
            self._grant.uncharge()
        self.close()
        grant = self._grant = await self._parts.admission.enter(replace(request, arrived=self._parts.clock.monotonic()))
        return grant

    def begun(self, load_ms: float, cached_tokens: int) -> None:
        """The executor has begun; `load_ms` is what it spent on bringing the revision, `cached_tokens` what of the
        prompt it has."""
        if self._grant is not None:
            self._parts.fleet.note_ticket(self._grant.executor, self._job.tenant, taken=True)
            self._grant.begun(load_ms, cached_tokens, now=self._parts.clock.monotonic())

    def decoded(self, tokens: int) -> None:
        """The executor has computed the prompt, and made so many tokens more."""
        if self._grant is not None:
            self._grant.decoded(tokens, now=self._parts.clock.monotonic())

    def close(self) -> None:
        """Gives the place back; harmless when there is none (any more)."""
        grant, self._grant = self._grant, None
        if grant is not None:
            grant.release()

    def left_s(self) -> float:
        """Returns how many seconds the request has left.

        Raises:
            LoraportError: DEADLINE_EXCEEDED.
        """
        left = self._ends - self._parts.clock.monotonic()
        if left <= 0:
            raise LoraportError("DEADLINE_EXCEEDED")
        return left

    def ticket(self) -> bytes:
        """Returns a ticket for this request."""
        return self._parts.tickets.ticket(**self._opened())

    def _opened(self) -> dict[str, str]:
        """What the ticket is for."""
        job = self._job
        return {"tenant": job.tenant, "revision_id": job.revision_id, "base_id": job.base.base_id}

    def require_same(self, revision_id: str, base_id: str) -> None:
        """The promise of the whole system: nothing of any other revision than the one that was resolved.

        Raises:
            LoraportError: INTERNAL.
        """
        right = (revision_id, base_id) == (self._job.revision_id, self._job.base.base_id)
        telemetry.count(metrics.ANSWERED, revision="right" if right else "wrong")
        if not right:
            log.error("executor began with other weights", wanted=self._job.revision_id, began=revision_id)
            raise LoraportError("INTERNAL", "the executor began with other weights than were asked for")

    def note_unavailable(self, error: LoraportError) -> None:
        """Takes the executor out of the fleet until it answers again, if it is gone or going. A ticket that it did not
        take is noted."""
        if self._grant is None or error.reason not in (*_GONE, _ASTRAY):
            return
        executor = self._grant.executor
        log.info("executor unavailable", executor=executor, reason=error.reason)
        if error.reason == _ASTRAY:
            self._parts.tickets.forget(**self._opened())
            self._parts.fleet.note_ticket(executor, self._job.tenant, taken=False)
        else:
            self._parts.fleet.note_failure(executor, error.reason)

    def for_the_caller(self, error: LoraportError) -> LoraportError:
        """Returns what the caller is told of an error."""
        revision, incident = self._job.revision, self._job.id[:12]
        told = for_the_caller(error, incident=incident)
        if told is not error:
            log.error("executor refused the router", reason=error.reason, why=error.message, incident=incident)
        if told.reason == "REVISION_NOT_ACTIVE" and revision is not None and revision.tenant != self._job.tenant:
            return LoraportError("ADAPTER_NOT_FOUND")
        return told

    def _prefix(self) -> tuple[bytes, ...]:
        job = self._job
        if len(job.prompt_token_ids) < BLOCK_TOKENS:
            return ()
        return prefix_chain(
            job.prompt_token_ids[: MAX_BLOCKS * BLOCK_TOKENS],
            block_size=BLOCK_TOKENS,
            base_digest=job.base.base_id,
            revision_id=job.revision_id or None,
            salt=tenant_salt(job.tenant),
        )

    def _waiting(self, arrived: float) -> Waiting:
        job = self._job
        prompt_tokens = len(job.prompt_token_ids) + len(job.continuation_token_ids)
        return Waiting(
            id=job.id,
            tenant=job.account or job.tenant,
            base_model=job.base.base_model,
            revision_id=job.revision_id,
            rank=job.revision.max_rank if job.revision is not None else 0,
            prompt_tokens=prompt_tokens,
            length=prompt_tokens + (0 if job.continuation_token_ids else job.sampling.max_tokens or 0),
            priority=job.priority,
            arrived=arrived,
            weight=job.weight,
            answers=job.sampling.answers,
            mib=job.revision.size_bytes / 2**20 if job.revision is not None else 0.0,
            prefix=self._prefix(),
            session=job.session_id,
        )
