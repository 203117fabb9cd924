"""From what a caller asks for to a job that can be queued: resolve, check, tokenize."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.router.bases import Bases, ServedBase
from services.router.catalog_view import (
    RecordChecker,
    Target,
    check_target,
    inactive,
    not_found,
    resolve,
    resolve_base,
    rollout_of,
)
from services.router.fleet import Fleet
from services.router.lanes import SHORT_CHARS, Lanes
from services.router.ports import Catalog
from services.router.rollout_losses import Losses
from services.router.rollout_split import Conversations, Side, choose, revision_of
from services.router.validate import (
    MAX_SESSION_CHARS,
    Prompt,
    RequestLimits,
    Sampling,
    check_prompt,
    check_request,
    check_score,
    fit_context,
)
from services.shared.catalog import RevisionItem
from services.shared.errors import FaultList, LoraportError
from services.shared.split import split_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request as it was sent. `first_token_timeout_s` is None for none."""

    target: Target
    prompt: Prompt
    sampling: Sampling
    session_id: str = ""
    # Who of the tenant asks, where the credential says so.
    user: str = ""
    priority: int = 0
    first_token_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAsk:
    """A question for log-probabilities as it was sent."""

    target: Target
    prompt_token_ids: tuple[int, ...]
    continuation_token_ids: tuple[int, ...]
    top_logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that may be queued. `revision` is None for the base model; `sampling.max_tokens` is set. `side` is that
    of a rollout that chose the revision; `account` pays in its tenant's place.

    One that scores has a continuation; nothing of `sampling` counts then.
    """

    id: str
    tenant: str
    weight: float
    base: ServedBase
    revision: RevisionItem | None
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    priority: int = 0
    first_token_timeout_s: float | None = None
    continuation_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0
    session_id: str = ""
    side: Side | None = None
    account: str = ""

    @property
    def revision_id(self) -> str:
        """The revision's id, empty for the base model."""
        return self.revision.revision_id if self.revision is not None else ""


class Door:
    """See the module's text."""

    def __init__(
        self,
        catalog: Catalog,
        records: RecordChecker,
        bases: Bases,
        fleet: Fleet,
        *,
        max_prompt_tokens: int,
        max_tokens: int,
        now: Callable[[], float],
        conversations: Conversations | None = None,
        losses: Losses | None = None,
    ) -> None:
        self._catalog = catalog
        self._records = records
        self._bases = bases
        self._fleet = fleet
        self._max_prompt_tokens = max_prompt_tokens
        self._max_tokens = max_tokens
        self._lanes = Lanes()
        self._now = now
        self._conversations = conversations or Conversations()
        self._losses = losses or Losses()

    async def admit(self, tenant: str, ask: Ask) -> Job:
        """Returns the job.

        Raises:
            LoraportError: ADAPTER_NOT_FOUND, REVISION_NOT_ACTIVE, INVALID_REQUEST, PROMPT_TOO_LONG,
                EXECUTOR_UNAVAILABLE.
        """
        request_id = secrets.token_hex(16)
        unit = split_unit(session=ask.session_id, user=ask.user, request=request_id)
        # What is too long to be a session is refused below, and not remembered here.
        session = ask.session_id if len(ask.session_id) <= MAX_SESSION_CHARS else ""
        base, revision, side = await self._resolve(tenant, ask.target, unit=unit, session=session)
        limits = self._limits(base)
        check_request(
            ask.prompt,
            ask.sampling,
            session_id=ask.session_id,
            priority=ask.priority,
            first_token_timeout_s=ask.first_token_timeout_s,
            limits=limits,
        )
        token_ids = await self._tokenize(tenant, base, ask.prompt)
        return Job(
            id=request_id,
            tenant=tenant,
            weight=self._weight(tenant),
            base=base,
            revision=revision,
            side=side,
            prompt_token_ids=token_ids,
            sampling=fit_context(ask.sampling, len(token_ids), limits=limits),
            priority=ask.priority,
            first_token_timeout_s=ask.first_token_timeout_s,
            session_id=ask.session_id,
        )

    async def admit_score(self, tenant: str, ask: ScoreAsk) -> Job:
        """Returns the job of a score. Raises as `admit`. Scores are compared with each other, so a split leaves them
        with the revision that the alias points to."""
        base, revision, _ = await self._resolve(tenant, ask.target)
        check_score(
            ask.prompt_token_ids, ask.continuation_token_ids, top_logprobs=ask.top_logprobs, limits=self._limits(base)
        )
        return Job(
            id=secrets.token_hex(16),
            tenant=tenant,
            weight=self._weight(tenant),
            base=base,
            revision=revision,
            prompt_token_ids=ask.prompt_token_ids,
            sampling=Sampling(),
            continuation_token_ids=ask.continuation_token_ids,
            top_logprobs=ask.top_logprobs,
        )

    def _weight(self, tenant: str) -> float:
        owner = self._catalog.view.tenants.get(tenant)
        return owner.weight if owner is not None else 1.0

    async def count_tokens(self, tenant: str, target: Target, prompt: Prompt) -> tuple[int, ...]:
        """Returns the ids that a prompt takes. Raises as `admit`."""
        base, _, _ = await self._resolve(tenant, target)
        faults = FaultList()
        check_prompt(prompt, faults, vocab_size=base.vocab_size)
        faults.raise_if_any()
        return await self._tokenize(tenant, base, prompt)

    async def _resolve(
        self, tenant: str, target: Target, *, unit: str = "", session: str = ""
    ) -> tuple[ServedBase, RevisionItem | None, Side | None]:
        faults = FaultList()
        check_target(target, faults)
        faults.raise_if_any()
        if target.is_base:
            return await self._bases.get(await self._resolve_base(tenant, target.base_model)), None, None
        item, side = await self._resolve_revision(tenant, target, unit, session)
        return await self._bases.get(item.base_model), item, side

    async def _resolve_revision(
        self, tenant: str, target: Target, unit: str, session: str
    ) -> tuple[RevisionItem, Side | None]:
        """A miss, of whatever kind, is answered only after the view is as new as the registry."""
        item, side = self._find(tenant, target, unit, session)
        if item is None or not self._records.is_active(self._catalog.view, item):
            await self._catalog.catch_up()
            item, side = self._find(tenant, target, unit, session)
        if item is None:
            raise not_found()
        if not self._records.is_active(self._catalog.view, item):
            raise inactive(item, tenant)
        return item, side

    def _find(self, tenant: str, target: Target, unit: str, session: str) -> tuple[RevisionItem | None, Side | None]:
        """Returns the revision that is meant, and the side of the rollout that chose it; without a unit nothing is
        split. A new revision that cannot serve, or not this tenant, or that is suspected of having taken an executor
        down, leaves everybody with the old one."""
        view = self._catalog.view
        rollout = rollout_of(view, target, tenant) if unit else None
        # Who may not see the old revision is not split, and leaves nothing behind here.
        if rollout is None or resolve(view, tenant, Target(revision_id=rollout.from_revision_id)) is None:
            return resolve(view, tenant, target), None
        arm, bucket = choose(rollout, tenant, unit)
        arm = self._conversations.settle(rollout, arm, tenant=tenant, session=session, now=self._now())
        item = resolve(view, tenant, Target(revision_id=revision_of(rollout, arm)))
        suspect = self._losses.suspects(rollout, self._now())
        if arm == "new" and (suspect or item is None or not self._records.is_active(view, item)):
            arm = "old"
            item = resolve(view, tenant, Target(revision_id=revision_of(rollout, arm)))
        return item, Side(rollout.name, arm, rollout.step_index, bucket)

    async def _resolve_base(self, tenant: str, wanted: str) -> str:
        try:
            return resolve_base(self._catalog.view.tenants.get(tenant), wanted, self._bases.known())
        except LoraportError:
            await self._catalog.catch_up()
            return resolve_base(self._catalog.view.tenants.get(tenant), wanted, self._bases.known())

    def _limits(self, base: ServedBase) -> RequestLimits:
        return RequestLimits(
            vocab_size=base.vocab_size,
            context_tokens=self._fleet.view().context_tokens(base.base_model, base.max_positions),
            max_prompt_tokens=self._max_prompt_tokens,
            max_tokens=self._max_tokens,
        )

    async def _tokenize(self, tenant: str, base: ServedBase, prompt: Prompt) -> tuple[int, ...]:
        """Runs in a thread: the event loop serves everybody."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        encode: Callable[[Any], tuple[int, ...]]
        source: Any
        if prompt.messages is not None:
            size = sum(len(message.content) for message in prompt.messages)
            encode, source = base.text.encode_messages, prompt.messages
        else:
            source = prompt.text or ""
            encode, size = base.text.encode, len(source)
        if size <= SHORT_CHARS:
            return await asyncio.to_thread(encode, source)
        token_ids: tuple[int, ...] = await self._lanes.run(tenant, encode, source)
        return token_ids
