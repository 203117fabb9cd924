"""Thousands of random steps with more demand than blocks: every answer is the lone one, every counter comes home.

Once on a real tiny model in poison mode (what is free is NaN), where the oracle is transformers and PEFT; once on a
modelled device, which checks more steps and names what was read wrongly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from services.executor.adapter_pool import AdapterPool
from services.executor.engine.device_pool import POOL_DTYPE
from services.executor.engine.loop import Engine, EngineOptions
from services.executor.engine.staging import Staged, stage
from services.executor.eviction import make_policy
from services.executor.kv_blocks import BlockPool
from services.executor.plan import Plan, RowResult, SchedulerLimits, StepResult
from services.executor.scheduler import Scheduler
from tests.support.churn import Churn
from tests.support.harness import SMALL, open_world
from tests.support.tiny import ALL, greedy, make_adapter, make_base, prompt_of, read_bundle, with_adapter

STEPS = 2500
REAL_STEPS = 250
RANKS = {"r1": 1, "r3": 3, "r12": 12, "r20": 20, "r8": 8}


@pytest.fixture
def nan_scratch() -> Iterator[None]:
    """Memory that torch hands out unwritten holds NaN, as freed blocks and pages do."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("churn")
    base = make_base(root / "base")
    bundles = {}
    for seed, (name, rank) in enumerate(RANKS.items()):
        make_adapter(base, root / name, seed=seed, r=rank, lora_alpha=2 * rank, target_modules=ALL)
        bundles[name] = read_bundle(base, root / name)
    return root, base, bundles


def test_a_real_model_in_poison_mode(family, nan_scratch: None) -> None:
    root, base, bundles = family
    block, page = 2 * 2 * 4 * 2 * 16 * 4, 8 * 4 * 2 * (320 + 128 + 384 + 192) + 8 * 4 * (64 + 256)
    # Forty blocks, where a request takes up to fourteen; six pages, where the five adapters need nine.
    sizes = replace(SMALL, kv_bytes=41 * block, block_size=4, pool_bytes=7 * page, max_rows=12, max_step_tokens=48)
    world = open_world(root / "base", sizes)
    prompts = [prompt_of(3), prompt_of(9), prompt_of(21)]
    models = {None: base} | {name: with_adapter(base, root / name) for name in bundles}
    known: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}

    def answer(content: str | None, prompt: tuple[int, ...], count: int) -> list[int]:
        key = (content, prompt)
        if key not in known:
            known[key] = greedy(models[content], prompt, 32)
        return known[key][:count]

    def arrange(content: str, revision_id: str) -> Staged:
        host = replace(bundles[content], revision_id=revision_id).host()
        return stage(host, world.decoder.groups, dtype=POOL_DTYPE)

    churn = Churn(
        world.engine, world.engine._scheduler, contents=sorted(bundles), prompts=prompts, stage=arrange, answer=answer,
        step=world.step, seed=7, most_tokens=32,
    )  # fmt: skip
    churn.run(REAL_STEPS)
    assert_eventful(churn, often=1)


def assert_eventful(churn: Churn, *, often: int) -> None:
    state = churn.engine.state()
    assert state.totals.steps >= churn.steps * 0.9, "almost every step computes"
    assert min(state.preemptions, state.evictions, state.loads_done) >= often, state
    assert churn.seen["over"] > churn.steps * 0.5, "demand stayed above what there is"
    assert min(churn.seen.values()) > 0, churn.seen
    assert len({a.ended for a in churn.asked}) >= 3


class NullDevice:
    """Stands for cache, pool and runner at once: remembers what every slot and page holds, computes no numbers.

    A slot or page that was freed is gone, so that reading it is a KeyError: the poison of this device.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, tuple[str | None, int, int]] = {}
        self.page_owner: dict[int, str] = {}
        self.pages: dict[str, tuple[int, ...]] = {}
        self.cache = self.pool = self.decoder = self

    def _forget(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            for i in range(self.block_size):
                self.slots.pop(block * self.block_size + i, None)

    def clear(self, blocks: Sequence[int]) -> None:
        self._forget(blocks)

    def erase(self, blocks: Sequence[int]) -> None:
        self._forget(blocks)

    def prepare(self, pages: Sequence[int]) -> None:
        assert not set(pages) & self.page_owner.keys(), "a page was given out with its last owner's numbers"

    def scrub(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.page_owner.pop(page, None)

    def write(self, staged: Staged, pages: Sequence[int]) -> Iterator[int]:
        for page in pages:
            self.page_owner[page] = staged.revision_id
            yield 700

    def bind(self, staged: Staged, pages: tuple[int, ...]) -> None:
        self.pages[staged.revision_id] = pages

    def run(self, plan: Plan) -> StepResult:
        self.clear(plan.fresh_blocks)
        results = []
        for row in plan.rows:
            if row.revision_id is not None:
                pages = self.pages[row.revision_id]
                assert all(self.page_owner[page] == row.revision_id for page in pages), "another's page is read"
            places = [row.blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(row.end)]
            for i, token in enumerate(row.tokens):
                self.slots[places[row.start + i]] = (row.revision_id, row.start + i, token)
            held = [self.slots[place] for place in places]
            assert [(r, p) for r, p, _ in held] == [(row.revision_id, p) for p in range(row.end)], "another's block"
            content = None if row.revision_id is None else row.revision_id.split("-")[0].removeprefix("sha256:")
            token = next_token(content, tuple(t for _, _, t in held)) if row.sample else None
            results.append(RowResult(request_id=row.request_id, token=token))
        return StepResult(step=plan.step, rows=tuple(results), kernel_path="model")


def next_token(content: str | None, tokens: tuple[int, ...]) -> int:
    return 3 + hashlib.sha256(repr((content, tokens)).encode()).digest()[0] % 61


def lone_answer(content: str | None, prompt: tuple[int, ...], count: int) -> list[int]:
    out: list[int] = []
    while len(out) < count:
        out.append(next_token(content, (*prompt, *out)))
    return out


@pytest.mark.parametrize("seed", range(3))
def test_a_modelled_device_over_more_steps(seed: int) -> None:
    device, faults = NullDevice(4), []
    limits = SchedulerLimits(max_rows=10, max_step_tokens=24, max_context=64, max_waiting=200)
    scheduler = Scheduler(limits, BlockPool(41, block_size=4), base_digest="base", vocab_size=64)
    pool = AdapterPool(6, page_rows=8, page_bytes=700, policy=make_policy("gdsf-d" if seed else "lru"))
    now = iter(range(10**9))
    engine = Engine(
        runner=device,  # type: ignore[arg-type]
        scheduler=scheduler, adapters=pool, clock=lambda: float(next(now)), on_fault=faults.append,
        options=EngineOptions(load_bytes_per_step=700, check_every_step=True),
    )  # fmt: skip

    def step() -> None:
        engine.step()
        assert not faults, faults

    churn = Churn(
        engine, scheduler, contents=sorted(RANKS), prompts=[tuple(range(3, 3 + n)) for n in (1, 5, 8, 15, 22)],
        stage=lambda content, revision_id: Staged(revision_id, RANKS[content], 700, {}), answer=lone_answer, step=step,
        seed=seed, most_tokens=20,
    )  # fmt: skip
    churn.run(STEPS)
    assert_eventful(churn, often=20)
