"""A long random life of an engine: requests beyond what the KV pool holds, cancels, loads, evictions, revocations.

The driver knows what every request must answer and what must be left at the end; what computes the tokens is the
caller's. Every choice comes from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from services.executor.engine.loads import Lease
from services.executor.engine.loop import Engine
from services.executor.engine.staging import Staged
from services.executor.request import Ended, Event, FinishReason, RefusalReason, Refused, RequestSpec, Sampling
from services.executor.scheduler import Scheduler

DEMAND = 1.10  # blocks that the known tokens of all open requests need, of those there are
TENANTS = (b"acme", b"globex", b"initech")


@dataclass(slots=True)
class Asked:
    """One request and what it was told."""

    spec: RequestSpec
    content: str | None
    tokens: list[int] = field(default_factory=list)
    ended: FinishReason | None = None
    cancelled_at: int | None = None

    def sink(self, event: Event) -> None:
        assert self.ended is None, "an event after the end"
        if isinstance(event, Ended):
            self.ended = event.reason
        elif hasattr(event, "token_ids"):
            self.tokens += event.token_ids


class Churn:
    """`stage(content, revision_id)` arranges an adapter; `answer(content, prompt, count)` is what it must say."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        *,
        contents: Sequence[str],
        prompts: Sequence[tuple[int, ...]],
        stage: Callable[[str, str], Staged],
        answer: Callable[[str | None, tuple[int, ...], int], list[int]],
        step: Callable[[], None],
        seed: int,
        most_tokens: int = 24,
    ) -> None:
        self.engine, self.scheduler = engine, scheduler
        self._contents, self._prompts = contents, prompts
        self._stage, self._answer, self._step = stage, answer, step
        self._random = random.Random(seed)
        self._most_tokens = most_tokens
        self._revision = {content: f"sha256:{content}-0" for content in contents}
        self._born = dict.fromkeys(contents, 0)
        self._loads: dict[str, Future[Lease]] = {}
        self.asked: list[Asked] = []
        self.open: list[Asked] = []
        self.steps = 0
        self.seen = {"cancelled": 0, "revoked": 0, "evicted": 0, "over": 0}

    def run(self, steps: int) -> None:
        """Lives for so many steps, then lets everything end and checks that nothing is left."""
        while self.steps < steps:
            self._fill()
            self._disturb()
            self.step()
        self._drain()

    def step(self) -> None:
        self._step()
        self.steps += 1
        for asked in self.open:
            late = asked.cancelled_at is not None and self.steps - asked.cancelled_at >= 2
            assert not (late and asked.ended is None), "a cancelled request outlived two steps"
        for asked in [a for a in self.open if a.ended is not None]:
            self.open.remove(asked)
            self._judge(asked)
        for revision_id in [r for r, load in self._loads.items() if load.done()]:
            load = self._loads.pop(revision_id)
            if not load.cancelled() and load.exception() is None:
                load.result().release()

    def _need(self, asked: Asked) -> int:
        return self.scheduler.blocks.blocks_for(len(asked.spec.prompt) + len(asked.tokens))

    def _fill(self) -> None:
        """Asks for more than there is, all the time."""
        total = self.scheduler.blocks.block_count - 1
        for _ in range(8):
            if sum(self._need(a) for a in self.open) >= DEMAND * total:
                self.seen["over"] += 1
                return
            self._ask()

    def _ask(self) -> None:
        chance = self._random
        content = chance.choice((None, *self._contents))
        revision_id = None if content is None else self._revision[content]
        spec = RequestSpec(
            request_id=f"q{len(self.asked)}",
            prompt=chance.choice(self._prompts),
            sampling=Sampling(max_tokens=chance.randint(1, self._most_tokens)),
            revision_id=revision_id,
            salt=chance.choice(TENANTS),
            priority=chance.choice((0, 0, 0, 5, -5)),
        )
        asked = Asked(spec, content)
        try:
            self.engine.submit(spec, asked.sink)
        except Refused as refused:
            if refused.reason is not RefusalReason.NOT_RESIDENT:
                raise
            if content is not None and revision_id is not None and revision_id not in self._loads:
                self._loads[revision_id] = self.engine.load(self._stage(content, revision_id))
            return
        self.asked.append(asked)
        self.open.append(asked)

    def _disturb(self) -> None:
        chance = self._random
        if self.open and chance.random() < 0.08:
            victim = chance.choice(self.open)
            self.engine.cancel(victim.spec.request_id)
            if victim.cancelled_at is None:
                victim.cancelled_at = self.steps
        content = chance.choice(self._contents)
        if chance.random() < 0.03:
            self.engine.evict(self._revision[content])
            self.seen["evicted"] += 1
        if chance.random() < 0.01:
            self.engine.revoke(self._revision[content], final=True)
            self._born[content] += 1
            self._revision[content] = f"sha256:{content}-{self._born[content]}"
        if self._loads and chance.random() < 0.02:
            self._loads[chance.choice(sorted(self._loads))].cancel()

    def _judge(self, asked: Asked) -> None:
        whole = self._answer(asked.content, asked.spec.prompt, asked.spec.sampling.max_tokens)
        told = asked.tokens
        assert told == whole[: len(told)], (asked.spec.request_id, asked.content)
        if asked.ended is FinishReason.CANCELLED:
            self.seen["cancelled"] += asked.cancelled_at is not None
        elif asked.ended is FinishReason.REVOKED:
            assert asked.spec.revision_id not in self._revision.values()
            self.seen["revoked"] += 1
        else:
            assert asked.ended is not None
            assert asked.ended.is_answer, asked.ended
            assert told == whole

    def _drain(self) -> None:
        """Nothing new is taken; what runs ends by itself; then every counter is where it began."""
        self.engine.drain()
        for _ in range(5000):
            if not self.open and not self.engine.state().pending_loads and not self._loads:
                break
            self.step()
        assert not self.open, "somebody never ends"
        for revision in self.engine.state().residents:
            self.engine.evict(revision.revision_id)
        self.step()
        state = self.engine.state()
        assert state.open_requests == state.running == state.waiting == state.pending_loads == 0
        assert self.scheduler.idle
        assert state.residents == ()
        assert state.free_pages == state.page_count
        assert state.kv_free + state.kv_cached == state.kv_total
        assert not any(self.scheduler.blocks.references())
        assert not self.engine._open
        assert not self.engine._adapters._lease_owner
