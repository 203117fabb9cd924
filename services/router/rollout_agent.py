"""A router's hands for the rollouts of the catalog: it loads, probes and tells; the registry decides.

    PRELOADING and later   every serving executor has both revisions loaded and kept; readiness is reported
    PROBING, held or not   every ready executor is probed with the catalog's prompts; the result is reported
    any                    what was observed of ended requests is reported in batches; so is an executor that went away
                           while it had work of the new revision

Any router may do this, several at once do no harm: loads are joined by the executor, the newest word on an executor
counts, and every report may be repeated. Nothing is remembered that a new router could not find out again.

The first executor goes alone, in each of loading and probing, and the others follow once it is through: what takes an
executor down with it meets one of them. What an executor refuses is tried again ever more seldom.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.router.bases import Bases, ServedBase
from services.router.fleet import Fleet
from services.router.observations import Outboxes
from services.router.probing import ProbeResult, probe
from services.router.rollout_desk import RolloutDesk, is_over
from services.router.rollout_losses import Losses
from services.router.rollout_probes import Kept, Probes
from services.shared.catalog import CatalogView, PromptItem, RolloutItem
from services.shared.catalog_client import CatalogClient
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.futures import fault_of

log = structlog.get_logger()

# How long nothing happens before the fleet is looked at again, and how often observations are reported.
TICK_S, REPORT_S = 0.5, 0.5
PRELOAD_S = 120.0
# Between tries of what an executor refused: doubled with every refusal in a row. And how long an executor's word on
# what it holds counts before its reports must say so.
RETRY_S, LAST_RETRY_S, SURE_S = 1.0, 30.0, 5.0


@dataclass(slots=True)
class _Work:
    """What is known of one process of an executor in one rollout. `told` and `probed` say about what the last reports
    were, `kept` holds the prompts that a probe has had answered."""

    epoch: int
    task: asyncio.Task[None] | None = None
    told: tuple[object, ...] = ()
    probed: tuple[object, ...] = ()
    kept: Kept = field(default_factory=dict)
    refusals: int = 0
    retry_at: float = 0.0
    sure_until: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return self.task is not None and not self.task.done()

    def refused(self, now: float) -> None:
        """The executor did not do what it was asked to."""
        self.refusals += 1
        self.retry_at = now + min(LAST_RETRY_S, RETRY_S * 2 ** (self.refusals - 1))

    def did(self) -> None:
        """It did."""
        self.refusals, self.retry_at = 0, 0.0


@dataclass(frozen=True, slots=True)
class AgentParts:
    """What the agent works with. `forget` is told of the view after every change."""

    catalog: CatalogClient
    fleet: Fleet
    bases: Bases
    desk: RolloutDesk
    outboxes: Outboxes
    probes: Probes
    losses: Losses
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
            self._parts.losses.follow(view)
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
        now, epoch = self._parts.clock.monotonic(), self._parts.fleet.members.epoch(executor)
        work = self._work.get((item.name, executor))
        if work is None or (work.epoch != epoch and not work.busy):
            work = self._work[item.name, executor] = _Work(epoch)
        if work.busy or now < work.retry_at or self._parts.losses.suspects(item, now):
            return
        told, probed = (epoch, serving), (epoch, item.generation)
        loads = work.told != told or not (now < work.sure_until or self._holds(item, executor))
        # There are prompts only while there is something to probe, also where the rollout is held in that.
        probes = not loads and bool(item.golden_prompts or item.eval_prompts) and work.probed != probed
        if loads and self._may(item, lambda other: bool(other.told)):
            work.retry_at = now + RETRY_S
            work.task = self._begin(self._preload(item, executor, serving, work, told))
        elif probes and self._may(item, lambda other: other.probed[1:] == probed[1:]):
            work.retry_at = now + RETRY_S
            work.task = self._begin(self._probe(item, executor, work, probed))

    def _may(self, item: RolloutItem, through: Callable[[_Work], bool]) -> bool:
        """Whether an executor may begin: nobody else has, or one is through."""
        works = [work for (rollout, _), work in self._work.items() if rollout == item.name]
        return any(map(through, works)) or not any(work.busy for work in works)

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
        for revision_id in (item.from_revision_id, item.to_revision_id):
            try:
                held = await self._load(item, base, executor, revision_id)
                found = held if revision_id == item.to_revision_id else found
            except LoraportError as error:
                # That the old one is missing is no fault of the new one; it will be loaded when it is asked for. But
                # where there is no room to keep it, the way back would need a load.
                if revision_id == item.to_revision_id or error.reason == "PIN_BUDGET":
                    failure = error.reason
                log.info("not preloaded", executor=executor, revision_id=revision_id, reason=error.reason)
        if failure:
            work.refused(self._parts.clock.monotonic())
        await self._parts.desk.readiness(item.name, executor, found, failure=failure, serving=serving)
        if not failure:
            work.told = told
            work.did()
            work.sure_until = self._parts.clock.monotonic() + SURE_S

    async def _load(self, item: RolloutItem, base: ServedBase, executor: str, revision_id: str) -> str:
        ticket, port = self._parts.probes.ticket(item, base, revision_id), self._parts.fleet.executor(executor)
        with self._parts.losses.boarding(executor, revision_id):
            try:
                return await port.preload(ticket, revision_id, timeout_s=PRELOAD_S)
            except LoraportError as error:
                self._parts.probes.refused(error, item, base, executor, revision_id)
                raise

    async def _probe(self, item: RolloutItem, executor: str, work: _Work, probed: tuple[object, ...]) -> None:
        base = await self._base(item)
        if base is None:
            return
        golden = [await _token_ids(base, prompt) for prompt in item.golden_prompts]
        evaluated = [await _token_ids(base, prompt) for prompt in item.eval_prompts]
        view = self._parts.catalog.view
        try:
            result = await probe(
                self._parts.probes.scorer(item, base, executor, view=view, kept=work.kept),
                old=item.from_revision_id,
                new=item.to_revision_id,
                golden=golden,
                evaluated=evaluated,
            )
        except LoraportError as error:
            result = ProbeResult(failure=error.reason)
            work.refused(self._parts.clock.monotonic())
        log.info("probed", executor=executor, revision_id=item.to_revision_id, result=result)
        await self._parts.desk.probed(item.name, executor, item.to_revision_id, result)
        if not result.failure:
            work.probed = probed
            work.kept.clear()
            work.did()

    async def _base(self, item: RolloutItem) -> ServedBase | None:
        try:
            return await self._parts.bases.get(item.base_model)
        except LoraportError:
            return None

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            await self._tell_once()

    async def _tell_losses(self) -> None:
        now, answering = self._parts.clock.monotonic(), self._parts.fleet.answering
        for loss in self._parts.losses.untold(now, answering=answering):
            try:
                await self._parts.desk.lost(loss)
            except LoraportError as error:
                log.warning("a lost executor was not taken", rollout=loss.rollout, reason=error.reason)
                if not is_over(error):
                    continue
            loss.told = self._parts.clock.monotonic()
            if (work := self._work.get((loss.rollout, loss.executor))) is not None:
                work.told = ()  # what has come back meanwhile is told once more: the last word counts

    async def _tell_once(self) -> None:
        """Reports what there is; what is not taken now is reported again next time."""
        await self._tell_losses()
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
    error = fault_of(task)
    if isinstance(error, LoraportError):
        log.warning("a rollout's report was not taken", reason=error.reason)
    elif error is not None:
        log.error("a rollout's work failed unexpectedly", exc_info=error)
