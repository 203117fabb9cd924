import math

import pytest

from services.router.validate import Message, Prompt, RequestLimits, Sampling, check_request, fit_context
from services.shared.errors import LoraportError

LIMITS = RequestLimits(vocab_size=100, context_tokens=64, max_prompt_tokens=50, max_tokens=200)


def subjects(prompt: Prompt = Prompt(text="x"), sampling: Sampling = Sampling(), **others) -> set[str]:  # noqa: B008
    arguments = {"session_id": "", "priority": 0, "first_token_timeout_s": None, **others}
    try:
        check_request(prompt, sampling, limits=LIMITS, **arguments)
    except LoraportError as error:
        assert error.reason == "INVALID_REQUEST"  # noqa: PT017
        return {fault.subject for fault in error.faults}
    return set()


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("temperature", [-0.1, 100.1, math.nan, math.inf], [0, 0.7, 100]),
        ("top_p", [0, 1.01, -1, math.nan], [0.01, 1]),
        ("top_k", [-1], [0, 5, 10**6]),
        ("min_p", [-0.1, 1.1, math.nan], [0, 1]),
        ("repetition_penalty", [0, 101, math.nan], [0.5, 100]),
        ("presence_penalty", [-2.1, 2.1, math.nan], [-2, 2]),
        ("frequency_penalty", [-2.1, 2.1, -math.inf], [-2, 0, 2]),
        ("seed", [-1], [0, 2**62]),
        ("n", [0, 17, -1], [1, 16]),
        ("logprobs", [-1, 21], [0, 20]),
        ("max_tokens", [0, -1, 201], [1, 200]),
        ("min_tokens", [-1, 129], [0, 128]),
    ],
)
def test_ranges(field: str, bad: list[float], good: list[float]) -> None:
    for value in bad:
        assert subjects(sampling=Sampling(**{field: value})) == {f"sampling.{field}"}, value
    for value in good:
        assert not subjects(sampling=Sampling(**{field: value})), value


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (Prompt(), {"input"}),
        (Prompt(text=""), {"prompt"}),
        (Prompt(messages=()), {"messages"}),
        (Prompt(messages=(Message("user", "hi"),) * 1025), {"messages"}),
        (Prompt(messages=(Message("robot", "hi"),)), {"messages[0].role"}),
        (Prompt(messages=(Message("user", ""),)), {"messages"}),
        (Prompt(messages=(Message("user", "é" * (1 << 20)),)), {"messages"}),
        (Prompt(token_ids=()), {"prompt_token_ids"}),
        (Prompt(token_ids=(1, 100)), {"prompt_token_ids[1]"}),
        (Prompt(token_ids=(-1,)), {"prompt_token_ids[0]"}),
        (Prompt(token_ids=(0, 99)), set()),
        (Prompt(messages=(Message("system", ""), Message("user", "hi"))), set()),
    ],
)
def test_prompts(prompt: Prompt, found: set[str]) -> None:
    assert subjects(prompt) == found


@pytest.mark.parametrize(
    ("sampling", "found"),
    [
        (Sampling(stop=("",)), {"sampling.stop[0]"}),
        (Sampling(stop=("x" * 257,)), {"sampling.stop[0]"}),
        (Sampling(stop=("x",) * 17), {"sampling.stop"}),
        (Sampling(stop_token_ids=(100,)), {"sampling.stop_token_ids[0]"}),
        (Sampling(stop_token_ids=(1,) * 65), {"sampling.stop_token_ids"}),
        (Sampling(logit_bias={100: 1.0}), {"sampling.logit_bias[0]"}),
        (Sampling(logit_bias={1: 101.0}), {"sampling.logit_bias[1]"}),
        (Sampling(logit_bias={1: math.nan}), {"sampling.logit_bias[1]"}),
        (Sampling(max_tokens=5, min_tokens=6), {"sampling.min_tokens"}),
    ],
)
def test_lists_and_maps(sampling: Sampling, found: set[str]) -> None:
    assert subjects(sampling=sampling) == found


def test_every_fault_is_listed_at_once() -> None:
    found = subjects(
        Prompt(text=""), Sampling(temperature=-1, n=0), session_id="s" * 129, priority=11, first_token_timeout_s=0.0
    )
    assert found == {
        "prompt", "sampling.temperature", "sampling.n", "session_id", "priority", "first_token_timeout",
    }  # fmt: skip


def test_max_tokens_takes_the_default_or_what_the_context_leaves() -> None:
    assert fit_context(Sampling(), 10, limits=LIMITS).max_tokens == 54
    roomy = RequestLimits(100, 1000, 500, 200)
    assert fit_context(Sampling(), 10, limits=roomy).max_tokens == 128
    assert fit_context(Sampling(max_tokens=54), 10, limits=LIMITS).max_tokens == 54


@pytest.mark.parametrize(
    ("sampling", "prompt_tokens", "subject"),
    [
        (Sampling(), 51, "prompt"),
        (Sampling(), 10_000, "prompt"),
        (Sampling(max_tokens=55), 10, "sampling.max_tokens"),
        (Sampling(min_tokens=100), 10, "sampling.min_tokens"),
    ],
)
def test_what_does_not_fit_the_context(sampling: Sampling, prompt_tokens: int, subject: str) -> None:
    with pytest.raises(LoraportError, match="PROMPT_TOO_LONG") as caught:
        fit_context(sampling, prompt_tokens, limits=LIMITS)
    assert caught.value.faults[0].subject == subject


def test_a_prompt_without_a_token_is_refused() -> None:
    with pytest.raises(LoraportError, match="INVALID_REQUEST"):
        fit_context(Sampling(), 0, limits=LIMITS)
