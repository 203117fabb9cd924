"""Any adapters in any company: greedy float32 answers are PEFT's, and base rows have the bits that they always have."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.executor.request import Sampling
from tests.support.harness import SMALL, World, open_world
from tests.support.tiny import ALL, Bundle, greedy, make_adapter, make_base, prompt_of, read_bundle, with_adapter

SIZES = replace(SMALL, pool_bytes=2**24, kv_bytes=2**20, max_rows=8, max_step_tokens=40)
RANKS = (1, 2, 3, 5, 8, 12, 16, 24, 63, 64, 100, 256)
MOST_TOKENS = 6
# Two tokens whose logits differ by less than this may change places: sums in another order.
TIE = 1e-4

ranks = st.sampled_from(RANKS)
adapters = st.fixed_dictionaries(
    {
        "r": ranks,
        "lora_alpha": st.sampled_from((1, 3, 8, 16, 100)),
        "target_modules": st.lists(st.sampled_from([*ALL, "lm_head"]), min_size=1, unique=True),
        "use_rslora": st.booleans(),
        "rank_pattern": st.dictionaries(
            st.sampled_from(["q_proj", "layers.1.self_attn.v_proj", "layers.0.mlp.down_proj", "up_proj"]), ranks, max_size=2
        ),
        "alpha_pattern": st.dictionaries(st.sampled_from(["k_proj", "layers.1.mlp.gate_proj"]), st.sampled_from((2, 7)), max_size=1),
        "seed": st.integers(0, 1000),
    }
)  # fmt: skip
rows = st.lists(
    st.tuples(
        st.integers(-1, 2),  # whose: -1 for the base
        st.sampled_from((1, 2, 15, 16, 17, 33, 60)),  # prompt length
        st.integers(1, MOST_TOKENS),
        st.integers(0, 3),  # steps until the next one comes
        st.booleans(),  # leaves early
    ),
    min_size=3,
    max_size=12,
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("mixed")
    return root, make_base(root / "base")


def live(root: Path, bundles: list[Bundle], schedule: list[tuple[int, int, int, int, bool]], **sampling: Any) -> World:
    """Plays a schedule; revision ids do not depend on what the adapters are, so the order of rows does not either."""
    world = open_world(root / "base", SIZES)
    for i, bundle in enumerate(bundles):
        world.load(replace(bundle, revision_id=f"sha256:{i}").host())
    for i, (whose, length, count, wait, leaves) in enumerate(schedule):
        revision = None if whose < 0 else f"sha256:{whose % len(bundles)}"
        options = Sampling(max_tokens=count, **sampling)
        world.submit(f"q{i}", prompt_of(length), revision, sampling=options, salt=bytes([i % 3]))
        world.step(wait)
        if leaves and i > 1:
            world.engine.cancel(f"q{i - 1}")
    world.finish()
    world.assert_idle()
    return world


def assert_same(model: Any, prompt: tuple[int, ...], got: list[int], wanted: list[int]) -> None:
    """Token for token, up to a tie."""
    for at, (mine, theirs) in enumerate(zip(got, wanted, strict=False)):
        if mine != theirs:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *wanted[:at]]]), use_cache=False).logits[0, -1]
            assert abs(float(logits[mine] - logits[theirs])) < TIE, (at, got, wanted)
            return
    assert len(got) <= len(wanted)


@settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(adapters, min_size=3, max_size=3), rows)
def test_a_mixed_batch_answers_as_peft_does(family, chosen, schedule) -> None:
    root, base = family
    bundles, models = [], {-1: base}
    for i, lora in enumerate(chosen):
        folder = root / f"adapter{i}"
        shutil.rmtree(folder, ignore_errors=True)
        make_adapter(base, folder, **lora)
        bundles.append(read_bundle(base, folder))
        models[i] = with_adapter(base, folder)
    world = live(root, bundles, schedule)
    for i, (whose, length, count, _, _) in enumerate(schedule):
        told, prompt = world.transcripts[f"q{i}"], prompt_of(length)
        wanted = greedy(models[whose], prompt, count)
        assert_same(models[whose], prompt, told.tokens, wanted)
        if told.ended[0].reason.is_answer and told.tokens == wanted[: len(told.tokens)]:
            assert len(told.tokens) == len(wanted)
        assert told.ended[0].reason.is_answer or any(later[4] for later in schedule[i + 1 : i + 2])


@settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(adapters, min_size=2, max_size=3), rows)
def test_base_rows_have_the_same_bits_whatever_their_neighbours_are(family, chosen, schedule) -> None:
    """The same schedule once with these adapters, once with the same ones in each other's places and twice as loud."""
    root, base = family
    bundles = []
    for i, lora in enumerate(chosen):
        folder = root / f"adapter{i}"
        shutil.rmtree(folder, ignore_errors=True)
        make_adapter(base, folder, **lora)
        bundles.append(read_bundle(base, folder))
    others = [replace(b, modules=tuple(replace(m, scaling=2 * m.scaling) for m in b.modules)) for b in bundles[::-1]]
    schedule = [(whose, length, count, wait, False) for whose, length, count, wait, _ in schedule]
    seen = []
    for choice in (bundles, others):
        world = live(root, choice, schedule, ignore_eos=True, logprobs=3)
        seen.append([world.transcripts[f"q{i}"].logprobs for i, row in enumerate(schedule) if row[0] < 0])
    assert seen[0] == seen[1]
