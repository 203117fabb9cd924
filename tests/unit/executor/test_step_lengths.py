"""How long a step gets beside rows that generate: prompts lengthen it that can have its tokens, and no others."""

from __future__ import annotations

import pytest

from services.executor.kv_blocks import BlockPool
from services.executor.plan import RowResult, SchedulerLimits, StepResult
from services.executor.prefill import PART_OF_STEP
from services.executor.request import RequestSpec, Sampling, Started
from services.executor.scheduler import Scheduler

BLOCK, TOKENS = 4, 512
LEAST = TOKENS // PART_OF_STEP


class Steps:
    """A scheduler of steps in which every row that samples gets the same token. They take 10 ms, and as long again for
    the tokens that prompts have in any case."""

    def __init__(self, *, rows: int, blocks: int = 1001, tokens: int = TOKENS) -> None:
        limits = SchedulerLimits(max_rows=rows, max_step_tokens=tokens, max_context=2000, max_waiting=100)
        pool = BlockPool(blocks, block_size=BLOCK)
        self.scheduler = Scheduler(limits, pool, base_digest="base", vocab_size=64)
        self.least = tokens // PART_OF_STEP
        self.now = 0.0
        self.started: list[Started] = []

    def ask(
        self, name: str, tokens: int, *, tenant: str = "", first: int = 3, output: int = 400, salt: str = "",
    ) -> None:  # fmt: skip
        spec = RequestSpec(
            request_id=name,
            prompt=(first, *[5] * (tokens - 1)),
            sampling=Sampling(max_tokens=output, ignore_eos=True),
            salt=(salt or tenant or name).encode(),
            owner=tenant.encode(),
        )
        self.scheduler.submit(spec, now=self.now)

    def prompt_tokens(self) -> int:
        """Return how many tokens prompts have in the next step."""
        plan = self.scheduler.plan(now=self.now)
        tokens = plan.token_count - sum(row.decodes for row in plan.rows)
        rows = tuple(RowResult(request_id=row.request_id, token=5 if row.sample else None) for row in plan.rows)
        self.now += 0.01 * (1 + tokens / self.least)
        happened = self.scheduler.commit(plan, StepResult(step=plan.step, rows=rows, kernel_path=""), now=self.now)
        self.started += [event for event in happened if isinstance(event, Started)]
        self.scheduler.check()
        return tokens


@pytest.mark.parametrize("free", [0, 1, 3])
def test_of_those_who_wait_as_many_count_as_there_are_rows_for(free: int) -> None:
    steps = Steps(rows=2 + free)
    steps.ask("generates", 400)
    assert [steps.prompt_tokens() for _ in range(3)] == [400, 0, 0]
    steps.ask("asks", 1000)
    assert [steps.prompt_tokens() for _ in range(2)] == [LEAST, LEAST]
    for number in range(40):
        steps.ask(f"waits {number}", 300)
    assert steps.prompt_tokens() == LEAST * (1 + free)


def test_one_tenants_answers_to_one_prompt_count_for_the_one_that_is_computed() -> None:
    steps = Steps(rows=16)
    steps.ask("generates", 400, tenant="only", first=10)
    assert [steps.prompt_tokens() for _ in range(3)] == [400, 0, 0]
    steps.ask("first", 900, tenant="only")
    assert [steps.prompt_tokens() for _ in range(2)] == [LEAST, LEAST]
    for number in range(10):
        steps.ask(f"answer {number}", 900, tenant="only")
    assert steps.prompt_tokens() == LEAST


def test_a_tenants_requests_with_salts_of_their_own_count_for_it_and_share_no_blocks() -> None:
    steps = Steps(rows=64)
    steps.ask("generates", 400, first=10)
    assert [steps.prompt_tokens() for _ in range(3)] == [400, 0, 0]
    steps.ask("asks", 1000, tenant="other")
    assert [steps.prompt_tokens() for _ in range(2)] == [LEAST, LEAST]
    for number in range(30):
        steps.ask(f"probe {number}", 60, tenant="other", salt=str(number), output=1)
    assert steps.prompt_tokens() == LEAST
    assert all(not event.prefix_hit_tokens for event in steps.started)
    assert len(steps.started) > 2


def test_in_a_step_that_took_blocks_away_nobody_who_waits_counts() -> None:
    """A row that generates takes the blocks of the last request while the one between them is still computed."""
    steps = Steps(rows=8, blocks=56, tokens=64)
    steps.ask("generates", 37, tenant="only", first=9, output=100)
    assert [steps.prompt_tokens() for _ in range(3)] == [37, 0, 0]
    steps.ask("asks", 100, tenant="only", first=4, output=1)
    steps.ask("last", 60, tenant="only", first=5, output=80)
    while not steps.scheduler.preemptions:
        tokens = steps.prompt_tokens()
    assert steps.scheduler.running == 2
    assert tokens == steps.least
