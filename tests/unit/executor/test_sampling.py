from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.executor.engine import sampling as engine_sampling
from services.executor.engine.sampling import sample, uniform
from services.executor.plan import Row
from services.executor.request import FinishReason, Sampling

LOGITS = torch.tensor([0.0, 1.0, 3.0, 2.0, -1.0, 2.5])
EOS = frozenset({2})


def row(sampling: Sampling, *, generated: int = 0, prompt: tuple[int, ...] = (0,), output: tuple[int, ...] = ()) -> Row:
    return Row(
        request_id="r",
        revision_id=None,
        start=0,
        tokens=(0,),
        blocks=(1,),
        sample=True,
        sampling=sampling,
        generated=generated,
        history=(prompt, output) if sampling.has_penalties else None,
    )


def one(sampling: Sampling, **kwargs: object) -> int | None:
    return sample(LOGITS[None].clone(), [row(sampling, **kwargs)], eos_ids=EOS)[0].token


def frequencies(sampling: Sampling, count: int = 3000) -> torch.Tensor:
    rows = [row(sampling, generated=i) for i in range(count)]
    tokens = [r.token for r in sample(LOGITS.repeat(count, 1), rows, eos_ids=EOS)]
    return torch.bincount(torch.tensor(tokens), minlength=6) / count


def test_greedy() -> None:
    assert one(Sampling()) == 2


def test_temperature_draws_from_the_distribution() -> None:
    for temperature in (0.5, 1.0, 2.0):
        wanted = (LOGITS / temperature).softmax(-1)
        assert (frequencies(Sampling(temperature=temperature, seed=5)) - wanted).abs().max() < 0.03


def test_top_k_top_p_and_min_p_cut_the_tail() -> None:
    assert frequencies(Sampling(temperature=1.0, top_k=2)).nonzero().view(-1).tolist() == [2, 5]
    p = LOGITS.softmax(-1)
    assert frequencies(Sampling(temperature=1.0, top_p=float(p[2]) - 0.01)).nonzero().view(-1).tolist() == [2]
    assert frequencies(Sampling(temperature=1.0, top_p=float(p[2]) + 0.01)).nonzero().view(-1).tolist() == [2, 5]
    threshold = float(p[3] / p[2]) - 0.01
    assert frequencies(Sampling(temperature=1.0, min_p=threshold)).nonzero().view(-1).tolist() == [2, 3, 5]
    assert frequencies(Sampling(temperature=1.0, top_k=3, top_p=0.5)).nonzero().view(-1).tolist() == [2]


def test_top_p_over_more_candidates_than_the_first_guess() -> None:
    flat = torch.zeros(1, 1000)
    tokens = {
        sample(flat.clone(), [row(Sampling(temperature=1.0, top_p=0.9), generated=i)], eos_ids=EOS)[0].token
        for i in range(200)
    }
    assert max(tokens) > 256
    assert max(tokens) < 901


def test_seed_and_step_alone_fix_the_draw() -> None:
    sampling = Sampling(temperature=1.0, seed=11)
    alone = [one(sampling, generated=i) for i in range(50)]
    rows = [row(Sampling(temperature=0.3, seed=3), generated=7), *[row(sampling, generated=i) for i in range(50)]]
    assert [r.token for r in sample(LOGITS.repeat(51, 1), rows, eos_ids=EOS)][1:] == alone
    assert alone != [one(Sampling(temperature=1.0, seed=12), generated=i) for i in range(50)]
    draws = [uniform(-3, i) for i in range(1000)]
    assert 0 <= min(draws) < 0.01
    assert 0.99 < max(draws) < 1


def test_penalties_and_bias() -> None:
    assert one(Sampling(repetition_penalty=2.0), prompt=(2,)) == 5
    assert one(Sampling(repetition_penalty=2.0), output=(2,)) == 5
    assert one(Sampling(presence_penalty=0.6), prompt=(2,)) == 2
    assert one(Sampling(presence_penalty=0.6), output=(2,)) == 5
    assert one(Sampling(frequency_penalty=0.3), output=(2,)) == 2
    assert one(Sampling(frequency_penalty=0.3), output=(2, 2)) == 5
    assert one(Sampling(logit_bias=((4, 9.0),))) == 4
    assert one(Sampling(repetition_penalty=0.5), prompt=(4,)) == 2


def test_min_tokens_keeps_stopping_tokens_out() -> None:
    early = Sampling(min_tokens=2, max_tokens=9, stop_token_ids=(5,))
    assert one(early, generated=1) == 3
    assert one(early, generated=2) == 2
    assert one(Sampling(min_tokens=2, max_tokens=9, ignore_eos=True), generated=0) == 2


def test_logprobs_are_of_the_raw_distribution() -> None:
    raw = LOGITS.log_softmax(-1)
    sampling = Sampling(logprobs=2, logit_bias=((4, 9.0),))
    result = sample(LOGITS[None].clone(), [row(sampling)], eos_ids=EOS)[0]
    assert result.logprob is not None
    assert abs(result.logprob.chosen - float(raw[4])) < 1e-6
    assert [t for t, _ in result.logprob.top] == [2, 5]
    bare = sample(LOGITS[None].clone(), [row(Sampling(logprobs=0))], eos_ids=EOS)[0].logprob
    assert bare is not None
    assert bare.top == ()


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = LOGITS.repeat(5, 1)
    logits[1, 3], logits[2, 0], logits[3, 1] = float("nan"), float("inf"), float("-inf")
    results = sample(logits, [row(Sampling())] * 5, eos_ids=EOS)
    assert [r.token for r in results] == [2, None, None, None, 2]
    assert {r.failure for r in results[1:4]} == {FinishReason.NON_FINITE_LOGITS}
    huge = torch.full((1, 1000), 3e38)
    assert sample(huge, [row(Sampling())], eos_ids=EOS)[0].token == 0


def drawn_alone(logits: torch.Tensor, row: Row) -> int:
    """The slow twin of a draw: one row, one step after the other, asking for each number."""
    sampling = row.sampling
    weights = (logits.double() / sampling.temperature).softmax(dim=-1)
    if sampling.min_p > 0:
        weights = torch.where(weights >= sampling.min_p * weights.max(), weights, 0.0)
    order = weights.sort(descending=True, stable=True).indices
    if sampling.top_k == 0 and sampling.top_p == 1:
        order = torch.arange(len(weights))
    kept = order[: sampling.top_k or len(order)]
    if sampling.top_p < 1:
        goal, mass = sampling.top_p * float(weights[kept].sum()), 0.0
        for count, token in enumerate(kept.tolist(), start=1):
            mass += float(weights[token])
            if mass >= goal:
                kept = kept[:count]
                break
    target = uniform(sampling.seed, row.generated) * float(weights[kept].sum())
    mass = 0.0
    for token in kept.tolist():
        mass += float(weights[token])
        if mass > target:
            return token
    return int(kept[-1])


def many_rows(count: int, size: int, *, seed: int) -> tuple[torch.Tensor, list[Row]]:
    """Return peaked and flat logits, and rows that are cut in every way."""
    random = Random(seed)
    logits = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) * 3
    logits[::5] /= 20  # a nucleus beyond the first guess
    rows = [
        row(
            Sampling(
                temperature=random.choice([0.3, 1.0, 1.7]), top_k=random.choice([0, 0, 5, 40]),
                top_p=random.choice([1.0, 0.9, 0.99]), min_p=random.choice([0.0, 0.0, 0.05]), seed=random.randrange(2**40),
            ),
            generated=random.randrange(500),
        )
        for _ in range(count)
    ]  # fmt: skip
    return logits, rows


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw rows together, as on a GPU."""
    monkeypatch.setattr(engine_sampling, "_answers_at_once", lambda device: False)
    monkeypatch.setattr(engine_sampling, "_MOST_NUMBERS", 16 * 600)


@pytest.mark.usefixtures("together")
def test_rows_that_are_drawn_together_get_what_each_gets_alone() -> None:
    logits, rows = many_rows(120, 600, seed=3)
    together = [r.token for r in sample(logits.clone(), rows, eos_ids=EOS)]
    assert together == [drawn_alone(own, one) for own, one in zip(logits, rows, strict=True)]
    assert together == [sample(own[None], [one], eos_ids=EOS)[0].token for own, one in zip(logits, rows, strict=True)]


@pytest.mark.usefixtures("together")
def test_rows_that_want_other_things_do_not_disturb_each_other() -> None:
    """Bit by bit, among rows with ties, penalties, biases and log-probabilities."""
    logits, rows = many_rows(60, 300, seed=4)
    logits = logits.bfloat16()
    for i in range(0, 60, 3):
        some = replace(rows[i].sampling, logprobs=i % 4, repetition_penalty=1.3, frequency_penalty=0.2,
                       logit_bias=((i, 3.0),), temperature=rows[i].sampling.temperature * (i % 2))  # fmt: skip
        rows[i] = row(some, generated=9, prompt=(1, 2, 3), output=(3, 4, 4, i))
    together = sample(logits.clone(), rows, eos_ids=EOS)
    assert together == [sample(own[None], [one], eos_ids=EOS)[0] for own, one in zip(logits, rows, strict=True)]


@pytest.mark.usefixtures("together")
def test_no_draw_is_of_more_numbers_than_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no nucleus is among the likely candidates: then whole rows are sorted."""
    draw, seen = engine_sampling._draw, []

    def watched(logits: torch.Tensor, rows: list[Row], *, guess: bool) -> torch.Tensor:
        seen.append((guess, logits.numel()))
        return draw(logits, rows, guess=guess)

    monkeypatch.setattr(engine_sampling, "_draw", watched)
    rows = [row(Sampling(temperature=1.0, top_p=0.99, seed=i)) for i in range(50)]
    logits = torch.randn(50, 600, generator=torch.Generator().manual_seed(6)) / 20
    tokens = [r.token for r in sample(logits.clone(), rows, eos_ids=EOS)]
    assert tokens == [drawn_alone(own, one) for own, one in zip(logits, rows, strict=True)]
    assert {guess for guess, _ in seen} == {True, False}, "both draws"
    assert max(count for _, count in seen) <= engine_sampling._MOST_NUMBERS


class _Asked(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.values += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("together")
def test_no_row_asks_the_device_for_a_number_of_its_own() -> None:
    logits, rows = many_rows(40, 600, seed=5)
    rows[0] = row(Sampling(logprobs=3, presence_penalty=1.0, temperature=1.0), output=(4, 5))
    with _Asked() as counted:
        sample(logits, rows, eos_ids=EOS)
    assert counted.values == 0
    with _Asked() as counted:
        drawn_alone(logits[1], rows[1])
    assert counted.values > 0, "what this counts"
