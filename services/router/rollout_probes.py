"""The probe's way to an executor: through the fair queue, in the rollout's name and at its cost, each prompt once.

prompt ──> queue (the rollout's account, a quarter of a tenant's weight, after everybody else's requests of its own)
       ──> the executor that is probed, and no other ──> kept until the whole probe has been told
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.router.admission import Admission
from services.router.bases import ServedBase
from services.router.events import ExecutorScored, ScoreOrder
from services.router.fair_queue import Waiting
from services.router.fleet import Fleet
from services.router.probing import Scorer
from services.router.tickets import Tickets
from services.shared.catalog import CatalogView, RolloutItem
from services.shared.clock import Clock
from services.shared.errors import LoraportError

PROBE_S = 60.0
# Of a tenant of weight 1.
WEIGHT, LOWEST_PRIORITY = 0.25, -10

Kept = dict[tuple[str, tuple[int, ...], bool], ExecutorScored]


@dataclass(frozen=True, slots=True)
class Probes:
    """See the module's text."""

    admission: Admission
    fleet: Fleet
    tickets: Tickets
    clock: Clock

    def ticket(self, item: RolloutItem, base: ServedBase, revision_id: str) -> bytes:
        """Returns a ticket for one call of a rollout."""
        return self.tickets.ticket(tenant=item.tenant, revision_id=revision_id, base_id=base.base_id)

    def refused(
        self, error: LoraportError, item: RolloutItem, base: ServedBase, executor: str, revision_id: str
    ) -> None:
        """Takes note of why an executor did not answer a call of a rollout."""
        if error.reason == "EXECUTOR_UNAVAILABLE":
            self.fleet.note_failure(executor, error.reason)
        elif error.reason == "INVALID_TICKET":
            self.tickets.forget(tenant=item.tenant, revision_id=revision_id, base_id=base.base_id)

    def scorer(self, item: RolloutItem, base: ServedBase, executor: str, *, view: CatalogView, kept: Kept) -> Scorer:
        """Returns what scores on one executor. What is in `kept` is not asked for again."""

        async def score(
            revision_id: str, prompt: Sequence[int], continuation: Sequence[int], both_ways: bool
        ) -> ExecutorScored:
            key = (revision_id, (*prompt, *continuation), both_ways)
            if key not in kept:
                order = (revision_id, tuple(prompt), tuple(continuation), both_ways)
                kept[key] = await self._ask(item, base, executor, view, *order)
            return kept[key]

        return score

    async def _ask(
        self,
        item: RolloutItem,
        base: ServedBase,
        executor: str,
        view: CatalogView,
        revision_id: str,
        prompt: tuple[int, ...],
        continuation: tuple[int, ...],
        both_ways: bool,
    ) -> ExecutorScored:
        revision = view.revisions.get(revision_id)
        ways = 2 if both_ways else 1
        request = Waiting(
            id=secrets.token_hex(16),
            tenant=item.name,
            base_model=item.base_model,
            revision_id=revision_id,
            rank=revision.max_rank if revision is not None else 0,
            # The reference computes them once more.
            prompt_tokens=ways * (len(prompt) + len(continuation)),
            priority=LOWEST_PRIORITY,
            arrived=self.clock.monotonic(),
            weight=WEIGHT,
            mib=revision.size_bytes / 2**20 if revision is not None else 0.0,
            only=executor,
        )
        grant = await self.admission.enter(request)
        try:
            order = ScoreOrder(
                request_id=request.id,
                ticket=self.ticket(item, base, revision_id),
                revision_id=revision_id,
                prompt_token_ids=prompt,
                continuation_token_ids=continuation,
                top_logprobs=0,
                reference=both_ways,
            )
            said = await self.fleet.executor(executor).score(order, timeout_s=PROBE_S)
            if (said.revision_id, said.base_id) != (revision_id, base.base_id):
                raise LoraportError("INTERNAL", "the executor probed other weights than were asked for")
            grant.begun(said.load_ms, said.usage.cached_tokens, now=self.clock.monotonic())
            grant.decoded(0, now=self.clock.monotonic())
            return replace(said, logprobs=())
        except LoraportError as error:
            self.refused(error, item, base, executor, revision_id)
            raise
        finally:
            grant.release()
