"""Which requests compute which tokens in the next step. Pure: clocks and ids are arguments.

    plan = scheduler.plan(now=…)          # decides, allocates blocks, preempts
    result = runner.run(plan)             # the device
    events = scheduler.commit(plan, result, now=…)

Rules:
 - Rows that decode go first (one token each); then waiting requests are admitted, first come first served, where
   priority orders a tenant's own; then all rows in prefill share what is left of the step's tokens (prefill.py).
 - When blocks run out, the last request in that order loses its blocks and waits again; its tokens are kept and
   computed anew (preemption by recompute). The first in order can always take blocks from all others,
   and no request is accepted that does not fit the pool alone: so something always advances.
 - A waiting request is admitted only if all its known tokens fit beside what the running rows still need for theirs
   (at least one block each), and never in a step that preempted: admission must not cause the next preemption.
 - A request whose prefix is being computed by a running one waits for those blocks instead of computing them too:
   n answers to one prompt compute it once. It holds nothing meanwhile, and others pass it.
 - Cancellation, deadlines and revocation take effect before the next plan.
"""

from __future__ import annotations

from services.executor.block_tables import BlockTables
from services.executor.kv_blocks import BlockPool
from services.executor.plan import Plan, Row, RowResult, SchedulerLimits, StepResult
from services.executor.prefill import PrefillShares, Prompt, PromptPace, count_waiting
from services.executor.request import (
    Ended,
    Event,
    FinishReason,
    Logprob,
    Move,
    RefusalReason,
    Refused,
    Request,
    RequestSpec,
    Started,
    State,
    Tokens,
    in_order,
)
from services.executor.spec_check import check_spec


class Scheduler:
    """Continuous batching over a BlockPool. Not thread-safe: one owner, the engine's loop."""

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockPool,
        *,
        base_digest: str,
        vocab_size: int,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self._tables = BlockTables(blocks, base_digest=base_digest)
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._by_id: dict[str, Request] = {}
        self._events: list[Event] = []
        self._sequence = 0
        self._step = 0
        self._shares = PrefillShares()
        self._pace = PromptPace()
        self._planned_at = 0.0
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        """No request is known; nothing to plan."""
        return not self._by_id

    @property
    def max_length(self) -> int:
        """Longest prompt plus output that one request may reach."""
        return min(self.limits.max_context, (self.blocks.block_count - 1) * self.blocks.block_size)

    def validate(self, spec: RequestSpec) -> None:
        """Raises Refused when the request could never be served; needs no state, so any thread may ask."""
        check_spec(spec, vocab_size=self._vocab_size, max_length=self.max_length)

    def submit(self, spec: RequestSpec, *, now: float) -> None:
        """Accept a request; it will end with exactly one Ended event.

        Raises:
            Refused: as `validate`, or DUPLICATE_REQUEST, or QUEUE_FULL.
        """
        self.validate(spec)
        if spec.request_id in self._by_id:
            raise Refused(RefusalReason.DUPLICATE_REQUEST, f"request {spec.request_id} is running")
        if len(self._waiting) >= self.limits.max_waiting:
            raise Refused(RefusalReason.QUEUE_FULL, f"{len(self._waiting)} requests are waiting")
        self._sequence += 1
        request = Request(spec=spec, sequence=self._sequence, arrival=now)
        self._by_id[spec.request_id] = request
        self._waiting.append(request)

    def end(self, request_id: str, reason: FinishReason) -> bool:
        """End a request now, whatever it is doing. Returns False when it is unknown or has ended."""
        request = self._by_id.get(request_id)
        if request is None:
            return False
        self._finish(request, reason)
        return True

    def end_revision(self, revision_id: str, reason: FinishReason) -> int:
        """End all requests of a revision and drop its named blocks. Returns how many ended."""
        victims = [r for r in self._by_id.values() if r.spec.revision_id == revision_id]
        for request in victims:
            self._finish(request, reason)
        self.blocks.forget(revision_id)
        return len(victims)

    def end_all(self, reason: FinishReason) -> None:
        """End every request."""
        for request in list(self._by_id.values()):
            self._finish(request, reason)

    def take_events(self) -> tuple[Event, ...]:
        """Return the events since the last call, in order."""
        events, self._events = tuple(self._events), []
        return events

    def plan(self, *, now: float) -> Plan:
        """Decide the next step. An empty plan means that nothing can be computed now."""
        self._expire(now)
        self._running, self._waiting = in_order(self._running), in_order(self._waiting)
        self._step += 1
        self._planned_at = now
        step = _Step(self.limits.max_step_tokens)
        for request in [r for r in self._running if r.pending == 1]:
            self._grow(request, 1, step)
        asking = [r.spec.tenant for r in (*self._running, *self._may_join(step)) if r.pending > 1]
        generating = [r.spec.tenant for r in self._running if r.pending == 1]
        waiting = count_waiting(asking, generating)
        step.budget = self._pace.beside(len(step.rows), self.limits.max_step_tokens, waiting=waiting)
        joined = self._admit(now, step) if not step.preempted else set()
        self._prefill(joined, now, step)
        rows = sorted(step.rows, key=lambda row: (row.revision_id is not None, row.revision_id or ""))
        return Plan(step=self._step, rows=tuple(rows), fresh_blocks=tuple(step.fresh))

    def _may_join(self, step: _Step) -> list[Request]:
        """Return who waits for tokens of this step and nothing else: no longer step gives the others a row."""
        room = 0 if step.preempted else self.limits.max_rows - len(self._running)
        first = self._waiting[: self.limits.max_rows] if room else []
        coming = self._tables.coming(self._running) if first else set()
        return [request for request in first if not self._tables.awaits(request, coming)][:room]

    def _prefill(self, joined: set[str], now: float, step: _Step) -> None:
        rows = [r for r in self._running if r.pending > 1 or r.spec.request_id in joined]
        shares = self._shares.divide([Prompt(r.spec.tenant, r.pending) for r in rows], step.budget, now=now)
        for request, share in zip(rows, shares, strict=True):
            self._grow(request, share, step)

    def _expire(self, now: float) -> None:
        for request in [r for r in self._by_id.values() if r.spec.deadline is not None and now >= r.spec.deadline]:
            self._finish(request, FinishReason.DEADLINE)

    def _grow(self, request: Request, count: int, step: _Step) -> None:
        """Plan `count` tokens of a running request, taking blocks from later ones when there are none left."""
        if count < 1 or request.state is State.WAITING:
            return
        while self._tables.lack(request, request.computed + count) > self.blocks.available:
            victim = self._last_unplanned(step)
            if victim is None:
                return
            self._preempt(victim)
            step.preempted = True
            if victim is request:
                return
        self._place(request, count, step)

    def _place(self, request: Request, count: int, step: _Step) -> None:
        end = request.computed + count
        step.fresh.extend(self._tables.extend(request, end))
        step.budget -= count
        step.planned.add(request.spec.request_id)
        sampling, score = request.spec.sampling, request.spec.score
        history = (request.spec.prompt, tuple(request.output)) if sampling.has_penalties else None
        step.rows.append(
            Row(
                request_id=request.spec.request_id,
                revision_id=request.spec.revision_id,
                start=request.computed,
                tokens=request.tokens(request.computed, end),
                blocks=tuple(request.blocks[: self.blocks.blocks_for(end)]),
                sample=score is None and end == request.length,
                sampling=sampling,
                generated=len(request.output),
                history=history,
                targets=request.targets(request.computed, end),
                top=score.top if score is not None else 0,
            )
        )

    def _last_unplanned(self, step: _Step) -> Request | None:
        for request in reversed(self._running):
            if request.spec.request_id not in step.planned:
                return request
        return None

    def _preempt(self, request: Request) -> None:
        request.move(Move.PREEMPT, cause=f"step {self._step}: no blocks")
        request.preemptions += 1
        self.preemptions += 1
        self._tables.drop(request)
        self._running.remove(request)
        self._waiting.append(request)

    def _admit(self, now: float, step: _Step) -> set[str]:
        """Let waiting requests join, as long as there is a token of this step for each; returns their ids."""
        prefilling, joined = sum(r.pending > 1 for r in self._running), set[str]()
        coming = self._tables.coming(self._running) if self._waiting else set()
        passed = 0
        while passed < len(self._waiting) and len(self._running) < self.limits.max_rows:
            if step.budget <= prefilling + len(joined):
                break
            request = self._waiting[passed]
            if passed < self.limits.max_rows and self._tables.awaits(request, coming):
                passed += 1
                continue
            cached = self._tables.share(request)
            need = self._tables.lack(request, request.length) + self._tables.owed(self._running)
            if need > self.blocks.available:
                self._tables.drop(request)
                break
            self._waiting.pop(passed)
            request.move(Move.ADMIT, cause=f"step {self._step}")
            if request.admitted_at is None:
                request.admitted_at = now
                request.prefix_hit_tokens = cached
                queue_s = max(0.0, now - request.arrival)
                self._events.append(
                    Started(request_id=request.spec.request_id, queue_s=queue_s, prefix_hit_tokens=cached)
                )
            self._running.append(request)
            joined.add(request.spec.request_id)
            coming |= self._tables.coming((request,))
        return joined

    def commit(self, plan: Plan, result: StepResult, *, now: float) -> tuple[Event, ...]:
        """Take the step's results, publish full blocks, end what is done. Returns all events since the last call.

        Raises:
            ValueError: the result is not of this plan.
        """
        if result.step != plan.step or len(result.rows) != len(plan.rows):
            raise ValueError("the result belongs to another plan")
        decoding = sum(row.decodes for row in plan.rows)
        prompt_tokens = plan.token_count - decoding
        self._pace.note(decoding=decoding, prompt_tokens=prompt_tokens, took_s=now - self._planned_at)
        distinct = len(plan.revisions)
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            request = self._by_id.get(row.request_id)
            if request is None or request.state is State.WAITING:
                continue
            request.kernel_path = result.kernel_path if row.revision_id is not None else "base"
            request.distinct_adapters = max(request.distinct_adapters, distinct)
            request.batch_rows = max(request.batch_rows, len(plan.rows))
            request.computed = row.end
            if outcome.failure is None:
                self._tables.publish(request)
            if request.state is State.PREFILL and row.sample:
                request.move(Move.PREFILLED, cause=f"step {plan.step}")
            self._take(request, row, outcome)
        return self.take_events()

    def _take(self, request: Request, row: Row, outcome: RowResult) -> None:
        if outcome.failure is not None:
            self._tables.distrust(request)
            self._finish(request, outcome.failure)
            return
        if row.targets:
            request.scored += len(row.targets)
            self._tell(request, row.targets, outcome.scores)
            if request.computed == request.length:
                self._finish(request, FinishReason.SCORED)
        if outcome.token is None:
            return
        stop = self._stops(request, outcome.token)
        if stop is not None:
            self._finish(request, stop, stop_id=outcome.token)
            return
        request.output.append(outcome.token)
        self._tell(request, (outcome.token,), (outcome.logprob,) if outcome.logprob is not None else ())
        if len(request.output) >= request.spec.sampling.max_tokens or request.length >= self.max_length:
            self._finish(request, FinishReason.LENGTH)

    def _tell(self, request: Request, token_ids: tuple[int, ...], logprobs: tuple[Logprob, ...]) -> None:
        self._events.append(
            Tokens(
                request_id=request.spec.request_id,
                token_ids=token_ids,
                kernel_path=request.kernel_path,
                distinct_adapters=request.distinct_adapters,
                logprobs=logprobs,
            )
        )

    def _stops(self, request: Request, token: int) -> FinishReason | None:
        sampling = request.spec.sampling
        if len(request.output) < sampling.min_tokens:
            return None
        if token in sampling.stop_token_ids:
            return FinishReason.STOP_TOKEN
        return FinishReason.EOS if token in self._eos_ids and not sampling.ignore_eos else None

    def _finish(self, request: Request, reason: FinishReason, *, stop_id: int | None = None) -> None:
        if request.state is State.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        request.move(Move.END, cause=reason)
        self._tables.drop(request)
        del self._by_id[request.spec.request_id]
        self._events.append(
            Ended(
                request_id=request.spec.request_id,
                reason=reason,
                usage=request.usage,
                kernel_path=request.kernel_path,
                distinct_adapters=request.distinct_adapters,
                batch_rows=request.batch_rows,
                stop_token_id=stop_id,
            )
        )

    def check(self) -> None:
        """Raises AssertionError when the books do not balance."""
        self.blocks.check()
        held = sum(len(r.blocks) for r in self._running)
        assert sum(self.blocks.references()) == held, "block references and block tables disagree"
        assert not any(r.blocks for r in self._waiting), "a waiting request holds blocks"
        assert len(self._by_id) == len(self._waiting) + len(self._running), "a request is lost"
        assert len(self._running) <= self.limits.max_rows, "too many rows"


class _Step:
    """Working state of one plan() call."""

    __slots__ = ("budget", "fresh", "planned", "preempted", "rows")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Row] = []
        self.fresh: list[int] = []
        self.planned: set[str] = set()
        self.preempted = False
