"""One request from its queue to its end: place, ticket, execute, translate, settle.

    passage (queued, placed, tried twice at most) ──> executor has begun ──> first token ──> … ──> every answer finished

Nothing is told to the caller before the first token, so a second try is never seen. However it ends — finished, failed,
cancelled, the caller gone — `close` gives everything back, and once.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence

import structlog

from services.router.answers import Answers
from services.router.door import Job
from services.router.events import (
    Event,
    ExecutorEvent,
    ExecutorFinished,
    ExecutorStarted,
    ExecutorTokens,
    Order,
    Started,
)
from services.router.passage import Passage, RelayParts
from services.router.ports import Execution
from services.shared.errors import LoraportError
from services.shared.stall import Stall

log = structlog.get_logger()


class Relay:
    """See the module's text. Used once."""

    def __init__(self, job: Job, parts: RelayParts, *, timeout_s: float | None) -> None:
        self._job = job
        self._parts = parts
        self._passage = Passage(job, parts, timeout_s=timeout_s)
        self._execution: Execution | None = None
        self._finished = 0
        # What the executor had of the prompt when it began.
        self._cached_tokens = 0
        self._unread = Stall(parts.max_unread_s, self._give_up)
        self._given_up = False

    async def events(self) -> AsyncGenerator[Sequence[Event], None]:
        """Yields what the caller is told, all that there is at a time: one Started, then Tokens, one Finished per
        answer.

        Raises:
            LoraportError: why there will be no (further) answer.
        """
        job = self._job
        begun = False
        try:
            started, said = await self._begin()
            begun = True
            answers = Answers(
                job.base.text.table,
                job.sampling,
                prompt_tokens=len(job.prompt_token_ids),
                cached_tokens=self._cached_tokens,
            )
            told: list[Event] = [started]
            while True:
                for event in said:
                    told += self._settle(answers, event)
                if told:
                    self._unread.begin()
                    yield told
                    self._taken()
                if answers.done:
                    self._end()
                    return
                told, said = [], await self._next()
        except LoraportError as error:
            self._passage.note_unavailable(error)
            raise self._passage.for_the_caller(_broken_off(error) if begun else error) from None
        finally:
            self.close()

    def close(self) -> None:
        """Cancels what runs and gives back what is held; harmless when there is nothing (any more)."""
        execution, self._execution = self._execution, None
        if execution is not None:
            execution.cancel()
        self._unread.close()
        self._passage.close()

    def _taken(self) -> None:
        """After a `yield`. Raises LoraportError (DEADLINE_EXCEEDED) when that came too late."""
        self._unread.end()
        if self._given_up:
            raise LoraportError("DEADLINE_EXCEEDED", f"nothing was read for {self._parts.max_unread_s:g} s")

    def _give_up(self) -> None:
        """A caller that does not come back for more in time loses its place while it stalls."""
        log.info("caller does not read", request=self._job.id)
        self._given_up = True
        self.close()

    async def _begin(self) -> tuple[Started, Sequence[ExecutorEvent]]:
        """Waits in the queue and for the first token."""
        if self._job.first_token_timeout_s is None:
            return await self._passage.run(self._run)
        try:
            async with asyncio.timeout(self._job.first_token_timeout_s):
                return await self._passage.run(self._run)
        except TimeoutError:
            raise LoraportError("DEADLINE_EXCEEDED", "no token within first_token_timeout") from None

    async def _run(self, executor: str, queue_ms: float) -> tuple[Started, Sequence[ExecutorEvent]]:
        job, left = self._job, self._passage.left_s()
        order = Order(
            request_id=job.id,
            ticket=self._passage.ticket(),
            revision_id=job.revision_id,
            prompt_token_ids=job.prompt_token_ids,
            sampling=job.sampling,
            priority=job.priority,
        )
        if self._execution is not None:
            self._execution.cancel()
        self._execution = self._parts.fleet.executor(executor).execute(order, timeout_s=left)
        begun, *first = await self._next()
        if not isinstance(begun, ExecutorStarted):
            raise LoraportError("INTERNAL", "the executor sent an event out of order")
        self._passage.require_same(begun.revision_id, begun.base_id)
        self._passage.begun(begun.load_ms, begun.cached_tokens)
        self._cached_tokens = begun.cached_tokens
        started = Started(
            revision_id=begun.revision_id,
            base_id=begun.base_id,
            executor=executor,
            queue_ms=queue_ms,
            load_ms=begun.load_ms,
            prompt_token_ids=job.prompt_token_ids,
            version=job.revision.version if job.revision is not None else 0,
            rollout_arm=job.side.arm if job.side is not None else "",
        )
        return started, first or await self._next()

    async def _next(self) -> Sequence[ExecutorEvent]:
        """Returns what comes next. An executor that ends its stream before every answer has ended has gone away."""
        events = await self._execution.next() if self._execution is not None else ()
        if not events:
            raise LoraportError("EXECUTOR_UNAVAILABLE", "the executor ended the stream early", retry_after_s=1.0)
        return events

    def _end(self) -> None:
        """Lets go of an executor that has told everything. One that an answer here did not wait for `close` cancels."""
        if self._execution is not None and self._finished == self._job.sampling.answers:
            self._execution.leave()
            self._execution = None

    def _settle(self, answers: Answers, event: ExecutorEvent) -> Iterable[Event]:
        if isinstance(event, ExecutorTokens):
            self._passage.decoded(len(event.token_ids))
        elif isinstance(event, ExecutorFinished):
            self._finished += 1
            self._passage.decoded(0)
        return answers.take(event)


def _broken_off(error: LoraportError) -> LoraportError:
    """What it means in the middle of an answer that the executor has gone: nobody can go on with it."""
    if error.reason != "EXECUTOR_UNAVAILABLE":
        return error
    return LoraportError(
        "EXECUTOR_UNAVAILABLE", "the executor went away in the middle of the answer; ask again", retry_after_s=1.0
    )
