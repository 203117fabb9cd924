"""How long a step gets beside rows that generate: prompts lengthen it that can have its tokens, and no others."""

from __future__ import annotations

import pytest

from services.executor.kv_blocks import BlockPool
from services.executor.plan import Plan, RowResult, SchedulerLimits, StepResult
from services.executor.prefill import PART_OF_STEP
from services.executor.request import RequestSpec, Sampling
from services.executor.scheduler import Scheduler

BLOCK, TOKENS = 4, 512
LEAST = TOKENS // PART_OF_STEP


class Steps:
    """A scheduler of steps that all take no time, in which every row that samples gets the same token."""

    def __init__(self, *, rows: int, blocks: int = 1001, tokens: int = TOKENS) -> None:
        limits = SchedulerLimits(max_rows=rows, max_step_tokens=tokens, max_context=2000, max_waiting=100)
        pool = BlockPool(blocks, block_size=BLOCK)
        self.scheduler = Scheduler(limits, pool, base_digest="base", vocab_size=64)

    def ask(self, name: str, tokens: int, *, tenant: str = "", first: int = 3, output: int = 400) -> None:
        prompt, salt = (first, *[5] * (tokens - 1)), (tenant or name).encode()
        sampling = Sampling(max_tokens=output, ignore_eos=True)
        self.scheduler.submit(RequestSpec(request_id=name, prompt=prompt, sampling=sampling, salt=salt), now=0.0)

    def step(self) -> Plan:
        plan = self.scheduler.plan(now=0.0)
        rows = tuple(RowResult(request_id=row.request_id, token=5 if row.sample else None) for row in plan.rows)
        self.scheduler.commit(plan, StepResult(step=plan.step, rows=rows, kernel_path=""), now=0.0)
        self.scheduler.check()
        return plan

    def prompt_tokens(self) -> int:
        plan = self.step()
        return plan.token_count - sum(row.decodes for row in plan.rows)


@pytest.mark.parametrize("free", [0, 1, 3])
def test_of_those_who_wait_as_many_count_as_there_are_rows_for(free: int) -> None:
    steps = Steps(rows=2 + free)
    steps.ask("generates", 400)
    steps.step()
    steps.ask("asks", 1000)
    assert steps.prompt_tokens() == LEAST
    for number in range(40):
        steps.ask(f"waits {number}", 300)
    assert steps.prompt_tokens() == LEAST * (1 + free)


def test_one_tenants_answers_to_one_prompt_count_for_the_one_that_is_computed() -> None:
    steps = Steps(rows=16)
    steps.ask("generates", 3, tenant="only", first=10)
    steps.step()
    steps.ask("first", 900, tenant="only")
    assert steps.prompt_tokens() == LEAST
    for number in range(10):
        steps.ask(f"answer {number}", 900, tenant="only")
    assert steps.prompt_tokens() == LEAST


def test_in_a_step_that_took_blocks_away_nobody_who_waits_counts() -> None:
    """A row that generates takes the blocks of the last request while the one between them is still computed."""
    steps = Steps(rows=8, blocks=60, tokens=64)
    for name, tokens, output in (("generates", 40, 100), ("asks", 160, 1), ("last", 60, 80)):
        steps.ask(name, tokens, tenant="only", first=len(name), output=output)
    tokens = 0
    while not steps.scheduler.preemptions:
        tokens = steps.prompt_tokens()
    assert steps.scheduler.running == 2
    assert tokens == 4
