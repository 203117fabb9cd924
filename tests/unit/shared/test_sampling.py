"""One table of ranges: the door and the engine agree on every value, also on the strange ones."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.request import Refused
from services.executor.request import Sampling as EngineSampling
from services.router.validate import RequestLimits, check_sampling
from services.router.validate import Sampling as DoorSampling
from services.shared.errors import FaultList, LoraportError
from services.shared.sampling import RANGES, Range

LIMITS = RequestLimits(vocab_size=100, context_tokens=200, max_prompt_tokens=100, max_tokens=100)
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def door_takes(**values: object) -> bool:
    faults = FaultList()
    check_sampling(DoorSampling(**values), faults, limits=LIMITS)
    try:
        faults.raise_if_any()
    except LoraportError:
        return False
    return True


def engine_takes(**values: object) -> bool:
    try:
        EngineSampling(**values).check(vocab_size=100)
    except Refused:
        return False
    return True


@given(st.sampled_from(FLOATS), st.floats() | st.sampled_from([0.0, -0.0, 1.0, 100.0, 2.0, -2.0, math.nan, math.inf]))
def test_door_and_engine_agree_on_numbers(name: str, value: float) -> None:
    assert door_takes(**{name: value}) == engine_takes(**{name: value}) == (value in RANGES[name])


@given(st.sampled_from(["top_k", "seed", "logprobs"]), st.integers(-3, 2**63 - 1) | st.integers(0, 30))
def test_door_and_engine_agree_on_counts(name: str, value: int) -> None:
    assert door_takes(**{name: value}) == engine_takes(**{name: value})


@given(st.dictionaries(st.integers(-1, 100), st.floats(), max_size=3))
def test_door_and_engine_agree_on_biases(bias: dict[int, float]) -> None:
    assert door_takes(logit_bias=bias) == engine_takes(logit_bias=tuple(bias.items()))


def test_too_many_biases_are_too_many_for_both() -> None:
    limits = range(301)
    door = RequestLimits(vocab_size=1000, context_tokens=200, max_prompt_tokens=100, max_tokens=100)
    faults = FaultList()
    check_sampling(DoorSampling(logit_bias=dict.fromkeys(limits, 1.0)), faults, limits=door)
    with pytest.raises(LoraportError, match="300"):
        faults.raise_if_any()
    with pytest.raises(Refused, match="300"):
        EngineSampling(logit_bias=tuple(dict.fromkeys(limits, 1.0).items())).check(vocab_size=1000)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [("in [0, 1]", Range(0, 1)), ("in (0, 1]", Range(0, 1, closed=False)), ("at least 1", Range(1, math.inf))],
)
def test_ranges_speak(text: str, allowed: Range) -> None:
    assert str(allowed) == text
    assert math.nan not in allowed
