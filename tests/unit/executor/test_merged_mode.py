"""Merged mode: one revision in the weights, exact within tolerance, entered and left only while nothing runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.executor.engine.build import build_engine
from services.executor.engine.loop import EngineOptions
from services.executor.model.load import load_decoder
from services.executor.request import FinishReason, RefusalReason, Refused, Sampling
from tests.support.families import make_family
from tests.support.harness import BASE, SMALL, World
from tests.support.tiny import ALL, greedy, make_adapter, prompt_of, read_bundle, with_adapter

PROMPT = prompt_of(30, vocab=160)
DECODERS = [("llama", "native"), ("llama", "transformers"), ("phi3", "transformers")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    root, found = tmp_path_factory.mktemp("merged"), {}

    def make(family: str):
        if family not in found:
            base = make_family(root / family / "base", family)
            modules = ["qkv_proj", "down_proj"] if family == "phi3" else [*ALL, "embed_tokens", "lm_head"]
            for seed, name in enumerate(("one", "two")):
                make_adapter(base, root / family / name, seed=seed, r=3, lora_alpha=5, target_modules=modules)
            bundles = {name: read_bundle(base, root / family / name) for name in ("one", "two")}
            found[family] = (root / family, base, bundles)
        return found[family]

    return make


def open_world(made, family: str = "llama", path: str = "native", *, dedicated: bool = True) -> tuple[World, dict]:
    root, _, bundles = made(family)
    world = World(load_decoder(root / "base", dtype=torch.float32, wanted=path), replace(SMALL, pool_bytes=2**23))
    world.engine = build_engine(
        world.decoder,
        base_digest=BASE,
        sizes=replace(SMALL, pool_bytes=2**23),
        clock=lambda: world.now,
        options=EngineOptions(check_every_step=True, dedicated=dedicated),
        on_fault=world.faults.append,
    )
    for bundle in bundles.values():
        world.load(bundle.host())
    return world, bundles


def turn(world: World, revision_id: str | None) -> None:
    done = world.engine.merge(revision_id)
    world.steps_until(done.done)
    done.result()


def bits(world: World) -> dict[str, torch.Tensor]:
    paths = [path for group in world.decoder.groups for layer in group.paths for path in layer]
    return {path: world.decoder.weight(path).clone() for path in paths}


@pytest.mark.parametrize(("family", "path"), DECODERS)
def test_merged_answers_are_pefts_and_the_base_comes_back_bit_for_bit(made, family: str, path: str) -> None:
    root, base, _ = made(family)
    world, bundles = open_world(made, family, path)
    one = bundles["one"].revision_id
    before = bits(world)
    grouped = world.submit("grouped", PROMPT, one, sampling=Sampling(max_tokens=10, logprobs=0))
    world.finish()
    alone = world.submit("base", PROMPT, sampling=Sampling(max_tokens=10, logprobs=0), salt=b"before")
    world.finish()
    turn(world, one)
    touched = {path for path, weight in bits(world).items() if not torch.equal(weight, before[path])}
    assert touched == {module.path for module in bundles["one"].modules}
    merged = world.submit("merged", PROMPT, one, sampling=Sampling(max_tokens=10, logprobs=0))
    world.finish()
    assert merged.tokens == grouped.tokens == greedy(with_adapter(base, root / "one"), PROMPT, 10)
    assert merged.ended[0].kernel_path == "merged"
    assert merged.ended[0].usage.prefix_hit_tokens == 0, "keys of the other arithmetic are not used"
    chosen = [[p.chosen for p in t.logprobs] for t in (merged, grouped)]
    assert chosen[0] == pytest.approx(chosen[1], abs=1e-4)
    turn(world, None)
    after = bits(world)
    assert all(torch.equal(after[path], weight) for path, weight in before.items())
    again = world.submit("again", PROMPT, sampling=Sampling(max_tokens=10, logprobs=0), salt=b"after")
    world.finish()
    assert (again.tokens, again.logprobs) == (alone.tokens, alone.logprobs)


def test_a_change_waits_for_everything_that_runs_and_lets_nothing_new_in(made) -> None:
    world, bundles = open_world(made)
    one, two = (bundles[name].revision_id for name in ("one", "two"))
    before = bits(world)
    running = [world.submit(f"r{i}", PROMPT, who, sampling=Sampling(max_tokens=6)) for i, who in enumerate((None, two))]
    held = world.engine.acquire(two)
    world.step(2)
    done = world.engine.merge(one)
    for who in (None, one, two):
        with pytest.raises(Refused) as refusal:
            world.submit(f"late{who}", PROMPT, who)
        assert refusal.value.reason is RefusalReason.MERGED_MODE
    world.finish()
    world.step(3)
    assert all(t.ended[0].reason is FinishReason.LENGTH for t in running)
    assert not done.done(), "a lease is held"
    assert all(torch.equal(weight, before[path]) for path, weight in bits(world).items())
    held.release()
    world.step()
    assert done.done()
    assert world.engine.state().mode == "merged"
    for who in (None, two):
        with pytest.raises(Refused, match="another revision"):
            world.submit(f"other{who}", PROMPT, who)
    mine = world.submit("mine", PROMPT, one, sampling=Sampling(max_tokens=6))
    world.step(2)
    back = world.engine.merge(None)
    world.step()
    assert not back.done()
    world.finish()
    world.step()
    assert back.done()
    assert mine.ended[0].reason is FinishReason.LENGTH
    assert world.engine.state().mode == "grouped"


def test_who_may_not_be_merged(made) -> None:
    world, bundles = open_world(made, dedicated=False)
    one, two = (bundles[name].revision_id for name in ("one", "two"))
    with pytest.raises(Refused, match="SHARED_EXECUTOR"):
        world.engine.merge(one)
    world, _ = open_world(made)
    with pytest.raises(Refused, match="NOT_RESIDENT"):
        world.engine.merge("sha256:" + "0" * 64)
    turn(world, one)
    turn(world, one)
    with pytest.raises(Refused, match="MERGED_MODE"):
        world.engine.merge(two)
    evicted = world.engine.evict(one)
    world.step()
    with pytest.raises(Refused, match="MERGED_MODE"):
        evicted.result()
    turn(world, None)
    turn(world, None)


def test_a_change_can_be_taken_back_before_it_happens(made) -> None:
    world, bundles = open_world(made)
    world.submit("r", PROMPT, sampling=Sampling(max_tokens=6))
    done = world.engine.merge(bundles["one"].revision_id)
    turn(world, None)
    with pytest.raises(Refused, match="taken back"):
        done.result()
    assert world.submit("new", PROMPT, bundles["two"].revision_id)
    world.finish()


@pytest.mark.parametrize("running", [False, True])
def test_a_revoked_revision_leaves_the_weights_at_once(made, running: bool) -> None:
    world, bundles = open_world(made)
    one = bundles["one"].revision_id
    before = bits(world)
    turn(world, one)
    mine = world.submit("mine", PROMPT, one, sampling=Sampling(max_tokens=50)) if running else None
    world.step(2)
    gone = world.engine.revoke(one, final=True)
    world.steps_until(gone.done)
    assert all(torch.equal(weight, before[path]) for path, weight in bits(world).items())
    assert mine is None or mine.ended[0].reason is FinishReason.REVOKED
    assert world.engine.state().mode == "grouped"
    other = world.submit("other", PROMPT, bundles["two"].revision_id)
    world.finish()
    assert other.ended[0].kernel_path != "merged"
    world.assert_idle()


def test_a_tied_embedding_is_not_merged(tmp_path: Path) -> None:
    """It is the output head as well, which the adapter does not touch."""
    base = make_family(tmp_path / "base", "gemma3")
    make_adapter(base, tmp_path / "one", seed=1, r=2, lora_alpha=2, target_modules=["q_proj", "embed_tokens"])
    bundle = read_bundle(base, tmp_path / "one")
    world = World(load_decoder(tmp_path / "base", dtype=torch.float32))
    world.engine._modes._dedicated = True
    world.load(bundle.host())
    before = bits(world)
    done = world.engine.merge(bundle.revision_id)
    world.steps_until(done.done)
    with pytest.raises(Refused, match="output head"):
        done.result()
    assert all(torch.equal(weight, before[path]) for path, weight in bits(world).items())
    assert world.engine.state().mode == "grouped"
    world.submit("x", PROMPT, bundle.revision_id)
    world.finish()
