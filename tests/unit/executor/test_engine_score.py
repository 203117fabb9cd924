"""Log-probabilities of given tokens equal those of transformers and PEFT, however the prompt is cut into steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.executor.engine import scoring
from services.executor.request import FinishReason, RefusalReason, Refused, Sampling, Score
from tests.support.harness import SMALL, World, open_world
from tests.support.tiny import ALL, make_adapter, make_base, prompt_of, read_bundle, with_adapter

# float32 on both sides; only the order of sums differs.
TOLERANCE = 2e-4
TOKENS = prompt_of(150)
P = 30


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("score")
    base = make_base(root / "base")
    make_adapter(base, root / "one", seed=1, r=5, lora_alpha=9, target_modules=[*ALL, "lm_head"])
    return root, base, read_bundle(base, root / "one")


@torch.no_grad()
def reference(model, tokens: tuple[int, ...], start: int) -> torch.Tensor:
    """Log-softmax at the positions before tokens[start:], [len, vocab]."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits[start - 1 : -1].float().log_softmax(dim=-1)


def ask(world: World, request_id: str, revision: str | None = None, *, start: int = P, top: int = 0, **options):
    return world.submit(request_id, TOKENS[:start], revision, score=Score(TOKENS[start:], top), **options)


def assert_scores(transcript, wanted: torch.Tensor, start: int = P) -> None:
    assert transcript.tokens == list(TOKENS[start:])
    assert [e.reason for e in transcript.ended] == [FinishReason.SCORED]
    chosen = torch.tensor([value.chosen for value in transcript.logprobs])
    assert len(chosen) == len(TOKENS) - start
    expected = wanted.gather(1, torch.tensor(TOKENS[start:])[:, None])[:, 0]
    assert (chosen - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_scores_equal_transformers_and_peft_in_one_mixed_batch(family, monkeypatch, chunk: int) -> None:
    """`chunk` numbers of logits at a time: 1 and 7 give a position at a time, 1 << 22 all of a step's together."""
    root, base, bundle = family
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", chunk * 256 if chunk == 7 else chunk)
    world = open_world(root / "base")
    world.load(bundle.host())
    own = ask(world, "base", top=4)
    adapted = ask(world, "one", bundle.revision_id, top=2)
    first = ask(world, "from the second token on", bundle.revision_id, start=1)
    other = world.submit("neighbour", prompt_of(20), bundle.revision_id, sampling=Sampling(max_tokens=8, logprobs=1))
    world.finish()
    with_one = with_adapter(base, root / "one")
    assert_scores(own, reference(base, TOKENS, P))
    assert_scores(adapted, reference(with_one, TOKENS, P))
    assert_scores(first, reference(with_one, TOKENS, 1), start=1)
    best = reference(base, TOKENS, P).topk(4)
    assert [[t for t, _ in value.top] for value in own.logprobs] == best.indices.tolist()
    assert all(len(value.top) == 2 for value in adapted.logprobs)
    assert own.ended[0].usage.output_tokens == 0
    assert len(other.logprobs) == len(other.tokens)
    world.assert_idle()


def test_no_chunk_of_logits_is_larger_than_the_bound(family, monkeypatch) -> None:
    root, base, _ = family
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", 4 * 256)
    world = open_world(root / "base", replace(SMALL, max_step_tokens=256))
    sizes, logits = [], world.decoder.logits
    monkeypatch.setattr(
        type(world.decoder), "logits", lambda self, hidden, lora: (sizes.append(len(hidden)), logits(hidden, lora))[1]
    )
    assert_scores_of = ask(world, "x")
    world.finish()
    assert_scores(assert_scores_of, reference(base, TOKENS, P))
    assert max(sizes) == 4


def test_cached_prompt_is_reused_but_never_what_is_scored(family) -> None:
    root, base, _ = family
    world = open_world(root / "base")
    ask(world, "first")
    world.finish()
    again = ask(world, "again")
    world.finish()
    assert_scores(again, reference(base, TOKENS, P))
    assert again.ended[0].usage.prefix_hit_tokens == 16, "the prompt's one full block, not the scored tokens'"


def test_preemption_scores_every_target_once(family) -> None:
    root, base, bundle = family
    block = 2 * 2 * 16 * 2 * 16 * 4
    # Thirteen usable blocks: the scored request takes ten, and the row before it grows into them, token by token.
    world = open_world(root / "base", replace(SMALL, kv_bytes=14 * block, max_rows=4, max_step_tokens=4))
    world.load(bundle.host())
    rival = world.submit("rival", prompt_of(15), priority=5, sampling=Sampling(max_tokens=120, ignore_eos=True))
    world.step(5)
    low = ask(world, "low", bundle.revision_id)
    world.finish()
    assert low.ended[0].usage.preemptions >= 1
    assert_scores(low, reference(with_adapter(base, root / "one"), TOKENS, P))
    assert len(rival.tokens) == 120
    world.assert_idle()


def test_a_score_that_is_not_finite_fails_alone(family) -> None:
    root, base, bundle = family
    wild = replace(bundle, modules=tuple(replace(m, scaling=1e38) for m in bundle.modules), revision_id="sha256:wild")
    world = open_world(root / "base")
    world.load(wild.host())
    bad, good = ask(world, "bad", wild.revision_id), ask(world, "good")
    world.finish()
    assert bad.ended[0].reason is FinishReason.NON_FINITE_LOGITS
    assert bad.logprobs == []
    assert_scores(good, reference(base, TOKENS, P))
    world.assert_idle()


def test_what_cannot_be_scored_is_refused(family) -> None:
    world = open_world(family[0] / "base")
    cases = [
        (prompt_of(3), Score(()), RefusalReason.EMPTY_PROMPT),
        (prompt_of(3), Score((999,)), RefusalReason.BAD_TOKEN),
        (prompt_of(3), Score((5,), 21), RefusalReason.BAD_SAMPLING),
        (prompt_of(250), Score(prompt_of(7)), RefusalReason.PROMPT_TOO_LONG),
        ((), Score((5,)), RefusalReason.EMPTY_PROMPT),
    ]
    for prompt, score, reason in cases:
        with pytest.raises(Refused) as refused:
            world.submit("x", prompt, score=score)
        assert refused.value.reason is reason
    world.submit("x", prompt_of(250), score=Score(prompt_of(6)))
    world.finish()
