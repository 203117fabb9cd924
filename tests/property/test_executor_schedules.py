"""Random schedules. A model of the device remembers which token every cache slot holds, so a wrong block table shows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.kv_blocks import BlockPool
from services.executor.plan import Plan, RowResult, SchedulerLimits, StepResult
from services.executor.request import Ended, FinishReason, RequestSpec, Sampling, Started, Tokens
from services.executor.scheduler import Scheduler

BLOCK = 4


def next_token(revision: str | None, tokens: tuple[int, ...]) -> int:
    digest = hashlib.sha256(repr((revision, tokens)).encode()).digest()
    return 3 + digest[0] % 61


def alone(spec: RequestSpec) -> list[int]:
    """What the model answers to one request with nobody else around."""
    tokens, out = spec.prompt, []
    while len(out) < spec.sampling.max_tokens:
        token = next_token(spec.revision_id, tokens)
        if token in spec.sampling.stop_token_ids:
            break
        out.append(token)
        tokens = (*tokens, token)
    return out


@dataclass
class Device:
    """Every slot holds (revision, position, token) as written; attention reads it back and must find the row's own."""

    slots: dict[int, tuple[str | None, int, int]] = field(default_factory=dict)

    def run(self, plan: Plan, fail: bool) -> StepResult:
        for block in plan.fresh_blocks:
            for i in range(BLOCK):
                self.slots.pop(block * BLOCK + i, None)
        results = []
        for row in plan.rows:
            assert row.tokens
            for i, token in enumerate(row.tokens):
                position = row.start + i
                self.slots[row.blocks[position // BLOCK] * BLOCK + position % BLOCK] = (
                    row.revision_id,
                    position,
                    token,
                )
            held = [self.slots[row.blocks[p // BLOCK] * BLOCK + p % BLOCK] for p in range(row.end)]
            assert [(r, p) for r, p, _ in held] == [(row.revision_id, p) for p in range(row.end)]
            token = next_token(row.revision_id, tuple(t for _, _, t in held)) if row.sample else None
            failure = FinishReason.NON_FINITE_LOGITS if fail and row.sample else None
            results.append(RowResult(request_id=row.request_id, token=None if failure else token, failure=failure))
        return StepResult(step=plan.step, rows=tuple(results), kernel_path="model")


requests = st.tuples(
    st.just("submit"),
    st.integers(1, 40),  # prompt length
    st.integers(1, 12),  # max_tokens
    st.sampled_from([None, "A", "B"]),
    st.sampled_from([b"", b"acme"]),
    st.integers(0, 2),  # priority
    st.booleans(),  # shares its prompt with others
)
actions = st.lists(
    st.one_of(
        requests,
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("revoke"), st.sampled_from(["A", "B"])),
        st.tuples(st.just("fault"), st.booleans()),
        st.tuples(st.just("expire"), st.just(0)),
    ),
    max_size=40,
)


class Story:
    """One scheduler, one modelled device, and what every request was told."""

    def __init__(self, blocks: int, rows: int, budget: int) -> None:
        limits = SchedulerLimits(max_rows=rows, max_step_tokens=max(budget, rows), max_context=64, max_waiting=100)
        self.pool = BlockPool(blocks, block_size=BLOCK)
        self.scheduler = Scheduler(limits, self.pool, base_digest="base", vocab_size=64)
        self.device = Device()
        self.specs: dict[str, RequestSpec] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.started: set[str] = set()
        self.now = 0.0

    def submit(self, length: int, count: int, revision: str | None, salt: bytes, priority: int, shared: bool) -> None:
        length = min(length, self.scheduler.max_length - count)
        if length < 1:
            return
        request_id = f"q{len(self.specs)}"
        start = 0 if shared else len(self.specs)
        spec = RequestSpec(
            request_id=request_id,
            prompt=tuple(3 + (start + i * i) % 60 for i in range(length)),
            sampling=Sampling(max_tokens=count, stop_token_ids=(7,)),
            revision_id=revision,
            salt=salt,
            priority=priority,
            deadline=self.now + 50 if length % 5 == 0 else None,
        )
        self.scheduler.submit(spec, now=self.now)
        self.specs[request_id] = spec
        self.tokens[request_id] = []

    def step(self, *, fail: bool = False, fault: bool = False) -> None:
        self.now += 1
        plan = self.scheduler.plan(now=self.now)
        self.scheduler.check()
        assert plan.token_count <= self.scheduler.limits.max_step_tokens
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        owners = [row.revision_id for row in plan.rows]
        assert owners == sorted(owners, key=lambda o: (o is not None, o or ""))
        if fault and plan.rows:
            lost = tuple(RowResult(request_id=row.request_id, failure=FinishReason.ENGINE_FAULT) for row in plan.rows)
            result = StepResult(step=plan.step, rows=lost, kernel_path="")
            self.hear(self.scheduler.commit(plan, result, now=self.now))
        elif plan.rows:
            self.hear(self.scheduler.commit(plan, self.device.run(plan, fail), now=self.now))
        self.hear(self.scheduler.take_events())
        self.scheduler.check()

    def hear(self, events: tuple[Started | Tokens | Ended, ...]) -> None:
        for event in events:
            assert event.request_id not in self.ended, "an event after the end"
            if isinstance(event, Started):
                assert event.request_id not in self.started
                self.started.add(event.request_id)
            elif isinstance(event, Tokens):
                self.tokens[event.request_id].extend(event.token_ids)
            else:
                self.ended[event.request_id] = event.reason
                assert event.usage.output_tokens == len(self.tokens[event.request_id])


@settings(max_examples=150)
@given(actions, st.integers(4, 16), st.integers(1, 5), st.integers(1, 24))
def test_every_request_ends_once_with_its_own_answer_and_the_books_balance(steps, blocks, rows, budget) -> None:
    story = Story(blocks, rows, budget)
    for name, *arguments in steps:
        if name == "submit":
            story.submit(*arguments)
        elif name == "step":
            for _ in range(arguments[0]):
                story.step()
        elif name == "cancel":
            story.scheduler.end(f"q{arguments[0]}", FinishReason.CANCELLED)
        elif name == "revoke":
            story.scheduler.end_revision(arguments[0], FinishReason.REVOKED)
        elif name == "expire":
            story.now += 60
        else:
            story.step(fail=arguments[0], fault=not arguments[0])
        story.scheduler.check()
    for _ in range(3000):
        if story.scheduler.idle:
            break
        story.step()
    story.hear(story.scheduler.take_events())
    assert story.scheduler.idle, "somebody never ends"
    assert set(story.ended) == set(story.specs), "everybody ends"
    counts = story.pool.counts()
    assert counts.held == 0
    assert counts.free + counts.cached == blocks - 1
    for request_id, spec in story.specs.items():
        whole = alone(spec)
        assert story.tokens[request_id] == whole[: len(story.tokens[request_id])], "a neighbour changed an answer"
        if story.ended[request_id].is_answer:
            assert story.tokens[request_id] == whole


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12), st.integers(4, 12))
def test_something_always_advances(requests, blocks) -> None:
    story = Story(blocks, 4, 8)
    for length, count in requests:
        story.submit(length, count, None, b"", 0, False)
    limit = 400 + sum(min(length, 64) + 8 * count for length, count in requests) * 4
    for _ in range(limit):
        if story.scheduler.idle:
            return
        story.step()
    raise AssertionError("the schedule makes no progress")
