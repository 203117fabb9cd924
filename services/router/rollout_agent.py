"""A router's hands for the rollouts of the catalog: it loads, probes and tells; the registry decides.

    PRELOADING and later   every serving executor has both revisions loaded and kept; readiness is reported
    PROBING, held or not   every ready executor is probed with the catalog's prompts; the result is reported
    any                    what was observed of ended requests is reported in batches

Any router may do this, several at once do no harm: loads are joined by the executor, the newest word on an executor
counts, and every report may be repeated. Nothing is remembered that a new router could not find out again.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from loraport.bundle.envelope import Signer
from services.router.bases import Bases, ServedBase
from services.router.events import ExecutorScored, ScoreOrder
from services.router.fleet import Fleet
from services.router.observations import Outboxes
from services.router.probing import ProbeResult, Scorer, probe
from services.router.rollout_desk import RolloutDesk, is_over
from services.shared.catalog import CatalogView, PromptItem, RolloutItem
from services.shared.catalog_client import CatalogClient
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.statements import MAX_TICKET_LIFE_S, Ticket, seal

log = structlog.get_logger()

# How long nothing happens before the fleet is looked at again, and how often observations are reported.
TICK_S, REPORT_S = 0.5, 0.5
PRELOAD_S, PROBE_S = 120.0, 60.0
# Between tries of what failed; and how long an executor's word on what it holds counts before its reports must say so.
RETRY_S, SURE_S = 1.0, 5.0


@dataclass(slots=True)
class _Work:
    """What is known of one executor in one rollout. `told` and `probed` say about what the last reports were."""

    task: asyncio.Task[None] | None = None
    told: tuple[object, ...] = ()
    probed: tuple[object, ...] = ()
    retry_at: float = 0.0
    sure_until: float = 0.0


@dataclass(frozen=True, slots=True)
class AgentParts:
    """What the agent works with. `forget` is told of the view after every change."""

    catalog: CatalogClient
    fleet: Fleet
    bases: Bases
    desk: RolloutDesk
    outboxes: Outboxes
    signing_key: Signer
    clock: Clock
    forget: Callable[[CatalogView], None] = field(default=lambda view: None)


class RolloutAgent:
    """See the module's text. Belongs to one event loop."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        # (rollout, executor) → what is known of it.
        self._work: dict[tuple[str, str], _Work] = {}
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self) -> None:
        """Begins, in the running event loop."""
        self._tasks = (asyncio.create_task(self._follow()), asyncio.create_task(self._report()))

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What runs in the background; it ends by `stop` or by a bug."""
        return self._tasks

    async def stop(self) -> None:
        """Stops, and gives up what is under way; what was observed and not told yet is told once more."""
        tasks = [*self._tasks, *(work.task for work in self._work.values() if work.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._tell_once()

    async def _follow(self) -> None:
        while True:
            view = self._parts.catalog.view
            self._parts.forget(view)
            self._look(view)
            await self._parts.catalog.changed(TICK_S)

    def _look(self, view: CatalogView) -> None:
        wanted: set[tuple[str, str]] = set()
        for item in view.rollouts.values():
            executors = self._parts.fleet.view().of_base(item.base_model)
            serving = tuple(executor.name for executor in executors if executor.serving)
            for name in serving:
                wanted.add((item.name, name))
                self._care(item, name, serving)
        for key in self._work.keys() - wanted:
            gone = self._work.pop(key)
            if gone.task is not None:
                gone.task.cancel()

    def _care(self, item: RolloutItem, executor: str, serving: tuple[str, ...]) -> None:
        """Starts what is to be done now for a rollout on an executor, one thing at a time."""
        work = self._work.setdefault((item.name, executor), _Work())
        if work.task is not None and not work.task.done():
            return
        now, epoch = self._parts.clock.monotonic(), self._parts.fleet.members.epoch(executor)
        told, probed = (epoch, serving), (epoch, item.generation)
        if now < work.retry_at:
            return
        if work.told != told or not (now < work.sure_until or self._holds(item, executor)):
            work.retry_at = now + RETRY_S
            work.task = self._begin(self._preload(item, executor, serving, work, told))
        elif (item.golden_prompts or item.eval_prompts) and work.probed != probed:
            # There are prompts only while there is something to probe, also where the rollout is held in that.
            work.retry_at = now + RETRY_S
            work.task = self._begin(self._probe(item, executor, work, probed))

    def _holds(self, item: RolloutItem, executor: str) -> bool:
        view = self._parts.fleet.members.executor(executor)
        return view.holds(item.from_revision_id) and view.holds(item.to_revision_id)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(_log_fault)
        return task

    async def _preload(
        self, item: RolloutItem, executor: str, serving: tuple[str, ...], work: _Work, told: tuple[object, ...]
    ) -> None:
        base = await self._base(item)
        if base is None:
            return
        failure, found = "", item.to_revision_id
        port = self._parts.fleet.executor(executor)
        for revision_id in (item.from_revision_id, item.to_revision_id):
            try:
                ticket = self._ticket(item, base, revision_id)
                held = await port.preload(ticket, revision_id, timeout_s=PRELOAD_S)
                found = held if revision_id == item.to_revision_id else found
            except LoraportError as error:
                # That the old one is missing is no fault of the new one; it will be loaded when it is asked for.
                failure = error.reason if revision_id == item.to_revision_id else ""
                log.info("not preloaded", executor=executor, revision_id=revision_id, reason=error.reason)
        await self._parts.desk.readiness(item.name, executor, found, failure=failure, serving=serving)
        if not failure:
            work.told, work.retry_at = told, 0.0
            work.sure_until = self._parts.clock.monotonic() + SURE_S

    async def _probe(self, item: RolloutItem, executor: str, work: _Work, probed: tuple[object, ...]) -> None:
        base = await self._base(item)
        if base is None:
            return
        golden = [await _token_ids(base, prompt) for prompt in item.golden_prompts]
        evaluated = [await _token_ids(base, prompt) for prompt in item.eval_prompts]
        try:
            result = await probe(
                self._scorer(item, base, executor),
                old=item.from_revision_id,
                new=item.to_revision_id,
                golden=golden,
                evaluated=evaluated,
            )
        except LoraportError as error:
            result = ProbeResult(failure=error.reason)
        log.info("probed", executor=executor, revision_id=item.to_revision_id, result=result)
        await self._parts.desk.probed(item.name, executor, item.to_revision_id, result)
        if not result.failure:
            work.probed, work.retry_at = probed, 0.0

    def _scorer(self, item: RolloutItem, base: ServedBase, executor: str) -> Scorer:
        port = self._parts.fleet.executor(executor)

        async def score(revision_id: str, prompt: Any, continuation: Any, both_ways: bool) -> ExecutorScored:
            order = ScoreOrder(
                ticket=self._ticket(item, base, revision_id),
                revision_id=revision_id,
                prompt_token_ids=tuple(prompt),
                continuation_token_ids=tuple(continuation),
                top_logprobs=0,
                reference=both_ways,
            )
            said = await port.score(order, timeout_s=PROBE_S)
            if (said.revision_id, said.base_id) != (revision_id, base.base_id):
                raise LoraportError("INTERNAL", "the executor probed other weights than were asked for")
            return said

        return score

    async def _base(self, item: RolloutItem) -> ServedBase | None:
        try:
            return await self._parts.bases.get(item.base_model)
        except LoraportError:
            return None

    def _ticket(self, item: RolloutItem, base: ServedBase, revision_id: str) -> bytes:
        ticket = Ticket(
            tenant=item.tenant,
            revision_id=revision_id,
            base_id=base.base_id,
            request_id=uuid.uuid4().hex,
            expires=int(self._parts.clock.now()) + MAX_TICKET_LIFE_S,
        )
        return seal(ticket, self._parts.signing_key)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            await self._tell_once()

    async def _tell_once(self) -> None:
        """Reports what there is; what is not taken now is reported again next time."""
        running = (item.name for item in self._parts.catalog.view.rollouts.values())
        for rollout, outbox in self._parts.outboxes.running(running).items():
            while (batch := outbox.next()) is not None:
                try:
                    sequence = await self._parts.desk.observed(rollout, batch)
                    # One that has ended takes nothing, and wants nothing repeated.
                    outbox.taken(max(sequence, batch.sequence))
                except LoraportError as error:
                    log.warning("observations were not taken", rollout=rollout, reason=error.reason)
                    if not is_over(error):
                        break
                    outbox.taken(batch.sequence)


async def _token_ids(base: ServedBase, prompt: PromptItem) -> tuple[int, ...]:
    return prompt.token_ids or await asyncio.to_thread(base.text.encode, prompt.text)


def _log_fault(task: asyncio.Task[None]) -> None:
    """What failed is tried again; a fault that nobody expected is said."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, LoraportError):
        log.warning("a rollout's report was not taken", reason=error.reason)
    elif error is not None:
        log.error("a rollout's work failed unexpectedly", exc_info=error)
