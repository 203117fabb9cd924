"""The reference of a probe equals transformers and PEFT, and tells a wrong scale, page or revision on the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from services.executor.engine.reference import reference_logprobs
from services.executor.model.hf import load_transformers
from services.executor.model.native import load_native
from services.executor.request import Score
from tests.support.harness import open_world
from tests.support.tiny import ALL, make_adapter, make_base, prompt_of, read_bundle, with_adapter

TOKENS = prompt_of(90)
P = 40
# float32 on both sides; only the order of sums differs.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("reference")
    base = make_base(root / "base")
    make_adapter(base, root / "one", seed=1, r=5, lora_alpha=9, target_modules=[*ALL, "lm_head", "embed_tokens"])
    make_adapter(base, root / "two", seed=2, r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    return root, base, {name: read_bundle(base, root / name) for name in ("one", "two")}


@torch.no_grad()
def wanted(model) -> list[float]:
    rows = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0][P - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(TOKENS[P:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("load", [load_native, load_transformers])
@pytest.mark.parametrize("name", ["", "one", "two"])
def test_the_reference_is_peft(family, load, name: str) -> None:
    root, base, bundles = family
    decoder = load(root / "base", dtype=torch.float32)
    adapter = bundles[name].host() if name else None
    found = reference_logprobs(decoder, adapter, prompt=TOKENS[:P], continuation=TOKENS[P:])
    expected = wanted(with_adapter(base, root / name) if name else base)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < TOLERANCE


@pytest.mark.parametrize("load", [load_native, load_transformers])
def test_a_base_whose_head_is_its_embedding_has_a_reference(tmp_path, load) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    make_adapter(base, tmp_path / "one", seed=1, r=5, lora_alpha=9, target_modules=ALL)
    decoder, adapter = load(tmp_path / "base", dtype=torch.float32), read_bundle(base, tmp_path / "one").host()
    found = reference_logprobs(decoder, adapter, prompt=TOKENS[:P], continuation=TOKENS[P:])
    expected = wanted(with_adapter(base, tmp_path / "one"))
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < TOLERANCE


def test_a_window_and_a_cap_are_those_of_the_served_attention(tmp_path) -> None:
    base = make_base(tmp_path / "base", "mistral", sliding_window=16)
    decoder = load_native(tmp_path / "base", dtype=torch.float32)
    found = reference_logprobs(decoder, None, prompt=TOKENS[:P], continuation=TOKENS[P:])
    assert max(abs(a - b) for a, b in zip(found, wanted(base), strict=True)) < TOLERANCE


def served(world, request_id: str, revision: str) -> list[float]:
    told = world.submit(request_id, TOKENS[:P], revision, score=Score(TOKENS[P:], 0), salt=request_id.encode())
    world.finish()
    return [value.chosen for value in told.logprobs]


def differs(world, request_id: str, bundle) -> float:
    """Mean of |difference| between what is served under a revision's id and the reference of that revision."""
    found = served(world, request_id, bundle.revision_id)
    known = reference_logprobs(world.decoder, bundle.host(), prompt=TOKENS[:P], continuation=TOKENS[P:])
    return sum(abs(a - b) for a, b in zip(found, known, strict=True)) / len(known)


def test_what_is_wrong_on_the_device_is_seen(family) -> None:
    """The gates of a probe are a mean of 0.02 and a maximum of 0.2; a sound revision is far below, a wrong one above."""
    root, _, bundles = family
    one, two = bundles["one"], bundles["two"]
    world = open_world(root / "base")
    world.load(one.host())
    assert differs(world, "sound", one) < TOLERANCE
    pool = world.engine._runner.pool
    for bank in pool.banks.values():
        bank.scale.mul_(1.2)
    bound = pool._bound[one.revision_id]
    for part in bound.groups.values():
        part.scaling, part._run = [[value * 1.2 for value in layer] for layer in part.scaling], None
    pool._batches.clear()
    assert differs(world, "scale off by a fifth", one) > 0.02
    # The bytes of another revision under this one's name: a stale load.
    other = open_world(root / "base")
    other.load(dataclasses.replace(two.host(), revision_id=one.revision_id))
    assert differs(other, "stale", one) > 0.02
