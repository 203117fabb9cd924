"""Both decoders on many families: logits equal transformers', greedy answers of mixed batches equal PEFT's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.executor.engine.backend import cpu_backend
from services.executor.kernels.compiled import load_step
from services.executor.model.families import Wanted
from services.executor.model.hf_check import compare, record
from services.executor.model.interface import ModelUnsupported
from services.executor.model.load import load_decoder
from services.executor.request import Sampling
from tests.support.families import BOTH, FAMILIES, WINDOW, linears, make_family
from tests.support.harness import SMALL, World
from tests.support.tiny import greedy, make_adapter, prompt_of, read_bundle, with_adapter

# Prompts longer than the sliding window; chunks of 16 tokens, so that prefill meets cached keys of its own.
LENGTHS = (3, WINDOW + 1, 5 * WINDOW)
SIZES = replace(SMALL, max_rows=8, max_step_tokens=16, block_size=4)
NEW = 8
# Of a row's size: two float32 programs that compute one formula in two orders.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """Bases by family name, each made once."""
    root, found = tmp_path_factory.mktemp("families"), {}

    def make(name: str):
        if name not in found:
            found[name] = (root / name, make_family(root / name, name))
        return found[name]

    return make


@pytest.mark.parametrize(("name", "path"), BOTH)
def test_chunks_and_single_tokens_give_transformers_logits(made, name: str, path: Wanted) -> None:
    folder, model = made(name)
    decoder = load_decoder(folder, dtype=torch.float32, wanted=path)
    assert decoder.info.path == path
    compare(decoder, record(model, decoder.info), tolerance=CLOSE)


def _adapters(root: Path, base: Any) -> dict[str, Any]:
    """All linears; every second with its own rank and rsLoRA; the embedding; the output head where it is a module."""
    names = linears(base)
    embedding = next(path for path, module in base.named_modules() if module is base.get_input_embeddings())
    wanted = {
        "all": {"r": 5, "lora_alpha": 7, "target_modules": names},
        "some": {"r": 3, "lora_alpha": 4, "target_modules": names[::2], "use_rslora": True, "rank_pattern": {names[0]: 9}},
        "embedding": {"r": 4, "lora_alpha": 6, "target_modules": [embedding.rpartition(".")[2], names[0]]},
    }  # fmt: skip
    if base.get_output_embeddings().weight is not base.get_input_embeddings().weight:
        wanted["head"] = {"r": 2, "lora_alpha": 3, "target_modules": ["lm_head", names[-1]], "gain": 0.9}
    bundles = {}
    for seed, (name, lora) in enumerate(wanted.items()):
        make_adapter(base, root / name, seed=40 + seed, **lora)
        bundles[name] = read_bundle(base, root / name)
    return bundles


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_mixed_batches_give_pefts_tokens(made, tmp_path: Path, name: str) -> None:
    folder, base = made(name)
    bundles = _adapters(tmp_path, base)
    vocab = base.config.vocab_size
    prompts = [prompt_of(length, vocab=vocab) for length in LENGTHS]
    expected = {
        (who, p): greedy(base if who is None else with_adapter(base, tmp_path / who), p, NEW)
        for who in (None, *bundles)
        for p in prompts
    }
    assert len({tuple(tuple(expected[who, p]) for p in prompts) for who in (None, *bundles)}) == 1 + len(bundles)
    for path, step in itertools.product(FAMILIES[name].paths, dict.fromkeys((None, load_step("auto")))):
        decoder = load_decoder(folder, dtype=torch.float32, wanted=path, step=step)
        world = World(decoder, SIZES, cpu_backend(step))
        for bundle in bundles.values():
            world.load(bundle.host())
        for i, (who, p) in enumerate(expected):
            world.submit(f"{who}/{len(p)}", p, who and bundles[who].revision_id, sampling=Sampling(max_tokens=NEW))
            world.step(i % 3)
        world.finish()
        world.assert_idle()
        for (who, p), tokens in expected.items():
            assert world.transcripts[f"{who}/{len(p)}"].tokens == tokens, (path, step, who, len(p))


ROPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 3.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 48},
    "longrope": {"short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0], "long_factor": [4.0] * 6, "factor": 2.0,
                 "original_max_position_embeddings": 96},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(ROPES))
@pytest.mark.parametrize("path", ["native", "transformers"])
def test_rope_kinds(tmp_path: Path, kind: str, path: Wanted) -> None:
    rope = {"rope_type": kind, "rope_theta": 5000.0, **ROPES[kind]}
    model = make_family(tmp_path, "llama", rope_parameters=rope)
    decoder = load_decoder(tmp_path, dtype=torch.float32, wanted=path)
    compare(decoder, record(model, decoder.info), tolerance=CLOSE)
    # Where the frequencies would change for the whole batch, a context ends.
    assert decoder.info.max_context == (96 if kind == "longrope" else 192)


def test_bfloat16_stays_near_transformers(tmp_path: Path) -> None:
    """Two roundings of one formula; a wrong mask or position gives an error near 1."""
    model = make_family(tmp_path, "gemma3").to(torch.bfloat16)
    decoder = load_decoder(tmp_path, dtype=torch.bfloat16)
    compare(decoder, record(model, decoder.info), tolerance=0.05)


@pytest.mark.parametrize("wrong", ["window", "scale", "softcap"])
def test_a_packed_path_that_computes_something_else_does_not_serve(
    tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_family(tmp_path, "gemma2")
    hf = pytest.importorskip("services.executor.model.hf")
    attend = hf._attend
    bad = {"window": {"sliding_window": None}, "scale": {"scaling": 1.0}, "softcap": {"softcap": None}}[wrong]
    monkeypatch.setattr(hf, "_attend", lambda *a, **k: attend(*a, **{**k, **bad}))
    with pytest.raises(ModelUnsupported, match="window" if wrong == "window" else "differ from transformers"):
        load_decoder(tmp_path, dtype=torch.float32)
