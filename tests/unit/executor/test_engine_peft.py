"""Greedy fp32 answers of mixed batches equal PEFT's token for token; base rows equal the base alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.executor.request import FinishReason, Sampling
from tests.support.compiled import compiled_step
from tests.support.harness import SMALL, open_world
from tests.support.tiny import ALL, ATTENTION, greedy, make_adapter, make_base, prompt_of, read_bundle, with_adapter

ADAPTERS = {
    "r1": {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"], "gain": 0.9},
    "r2": {"r": 2, "lora_alpha": 1, "target_modules": ATTENTION},
    "r3": {"r": 3, "lora_alpha": 5, "target_modules": ["gate_proj", "down_proj"]},
    "r4": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True},
    "r8": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "r16": {"r": 16, "lora_alpha": 16, "target_modules": ALL, "rank_pattern": {"layers.1.self_attn.q_proj": 2, "up_proj": 20}},
    "r64": {"r": 64, "lora_alpha": 128, "target_modules": ALL, "alpha_pattern": {"down_proj": 32}},
    "head": {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "v_proj"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    """(folder of the base, the base, bundles by name, adapter folders)."""
    root = tmp_path_factory.mktemp("family")
    base = make_base(root / "base")
    bundles = {}
    for seed, (name, lora) in enumerate(ADAPTERS.items()):
        make_adapter(base, root / name, seed=100 + seed, **lora)
        bundles[name] = read_bundle(base, root / name)
    return root, base, bundles


def _references(root: Path, base, names, prompts, count):
    out = {}
    for name in names:
        model = base if name is None else with_adapter(base, root / name)
        for p in prompts:
            out[name, p] = greedy(model, p, count)
    return out


@pytest.mark.parametrize("compiled", [False, True])
def test_mixed_batch_with_rows_joining_and_leaving_equals_peft(family, compiled: bool) -> None:
    root, base, bundles = family
    step = compiled_step() if compiled else None
    names = [None, *ADAPTERS]
    prompts = [prompt_of(n) for n in (1, 5, 33, 80)]
    expected = _references(root, base, names, prompts, 20)
    for p in prompts[1:]:
        assert len({tuple(expected[n, p]) for n in names}) == len(names), "adapters must answer differently"
    world = open_world(root / "base", replace(SMALL, pool_bytes=2**23), step=step)
    for bundle in bundles.values():
        world.load(bundle.host())
    rng = random.Random(5)
    wanted = {}
    jobs = [(n, p, rng.choice((3, 9, 20))) for n in names for p in prompts] * 2
    rng.shuffle(jobs)
    for i, (name, p, count) in enumerate(jobs):
        world.submit(f"q{i}", p, name and bundles[name].revision_id, sampling=Sampling(max_tokens=count))
        wanted[f"q{i}"] = (name, p, count)
        world.step(rng.randrange(4))
    world.finish()
    world.assert_idle()
    for request_id, (name, p, count) in wanted.items():
        transcript = world.transcripts[request_id]
        assert transcript.tokens == expected[name, p][:count], (name, len(p))
        path = transcript.ended[0].kernel_path
        kinds = ("cpu-compiled",) if compiled else ("cpu-torch-",)
        assert path.startswith(kinds) or (name is None and path == "base")
    assert max(t.ended[0].distinct_adapters for t in world.transcripts.values()) >= 5


def test_base_rows_are_bit_equal_whatever_adapter_rows_beside_them_use(family) -> None:
    """E1: with the same shapes, the base rows' log-probabilities have the same bits with and without adapters."""
    root, _, bundles = family
    seen = []
    for name in (None, "r4", "r64", "head"):
        world = open_world(root / "base")
        if name:
            world.load(bundles[name].host())
        sampling = Sampling(max_tokens=8, logprobs=5)
        for i, p in enumerate((prompt_of(9), prompt_of(12))):
            world.submit(f"base{i}", p, sampling=sampling)
        world.submit("other", prompt_of(10), name and bundles[name].revision_id, sampling=sampling)
        world.finish()
        seen.append([(t.tokens, t.logprobs) for k, t in world.transcripts.items() if k != "other"])
    assert seen[1:] == seen[:1] * 3


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_families_equal_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    base = make_base(tmp_path / "base", kind, seed=3, tie_word_embeddings=tied)
    make_adapter(base, tmp_path / "one", seed=4, r=5, lora_alpha=7, target_modules=ALL)
    bundle = read_bundle(base, tmp_path / "one")
    world = open_world(tmp_path / "base")
    world.load(bundle.host())
    prompts = [prompt_of(n) for n in (7, 40, 100)]
    for i, p in enumerate(prompts):
        world.submit(f"b{i}", p)
        world.submit(f"a{i}", p, bundle.revision_id)
    world.finish()
    expected = _references(tmp_path, base, [None, "one"], prompts, 12)
    for i, p in enumerate(prompts):
        assert world.transcripts[f"b{i}"].tokens == expected[None, p]
        assert world.transcripts[f"a{i}"].tokens == expected["one", p]


ROPES = {
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "theta": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_rope_kinds_biases_and_odd_sizes_equal_transformers(tmp_path: Path, rope: str) -> None:
    changes = {
        "rope_parameters": ROPES[rope],
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_size": 96,
        "head_dim": 20,
    }
    base = make_base(tmp_path / "base", seed=9, **changes)
    world = open_world(tmp_path / "base")
    p = prompt_of(90)
    transcript = world.submit("x", p)
    world.finish()
    assert transcript.tokens == greedy(base, p, 12)
    assert transcript.ended[0].reason in (FinishReason.LENGTH, FinishReason.EOS)


def test_bfloat16_runs_and_stays_near_fp32(family) -> None:
    root, _, bundles = family
    chosen = []
    for dtype in (torch.float32, torch.bfloat16):
        world = open_world(root / "base", dtype=dtype)
        world.load(bundles["r4"].host())
        sampling = Sampling(max_tokens=1, logprobs=20)
        world.submit("x", prompt_of(20), bundles["r4"].revision_id, sampling=sampling)
        world.submit("y", prompt_of(20), sampling=sampling)
        world.finish()
        chosen.append({k: dict(t.logprobs[0].top) for k, t in world.transcripts.items()})
    for key in ("x", "y"):
        common = chosen[0][key].keys() & chosen[1][key].keys()
        assert len(common) >= 14
        assert max(abs(chosen[0][key][t] - chosen[1][key][t]) for t in common) < 0.3
