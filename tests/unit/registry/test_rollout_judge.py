"""The judge's arithmetic against known numbers, and what it says of cases that a person can judge."""

import math
import random
from dataclasses import replace
from statistics import NormalDist, fmean, variance
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.registry.rollout import arms
from services.registry.rollout.arms import ArmStats, StepStats
from services.registry.rollout.judge import Verdict, _quotient, exhausted, judge, judge_shadow
from services.registry.rollout.sequences import (
    MIN_SPREAD,
    Early,
    Failures,
    Grouped,
    Interval,
    Moments,
    difference,
    early_radius,
    likelihood_ratio,
    mixture_radius,
    mixture_rho,
    ratio_verdict,
)
from services.registry.rollout.settings import WHOLE, Gates, Settings
from services.shared.split import Arm, Observation

NUMBERS = st.lists(st.floats(-20, 20), max_size=30)
SETTINGS = Settings()


def moments(values: list[float]) -> Moments:
    result = Moments()
    for value in values:
        result.add(value)
    return result


def test_the_bound_is_the_published_one() -> None:
    """The value that the authors' own library is tested against."""
    assert mixture_radius(100, rho=mixture_rho(100, 0.05), alpha=0.05) == pytest.approx(30.35209, abs=1e-5)


@given(NUMBERS, NUMBERS)
def test_moments_merge_as_if_taken_one_by_one(first: list[float], second: list[float]) -> None:
    merged = moments(first)
    merged.merge(moments(second))
    together = first + second
    assert merged.count == len(together)
    if together:
        assert merged.mean == pytest.approx(fmean(together), abs=1e-9)
    if len(together) > 1:
        assert merged.variance == pytest.approx(max(variance(together), MIN_SPREAD**2), abs=1e-7)


def grouped(values: list[float], size: int = 1) -> Grouped:
    """As moments; so many in a row are of one conversation."""
    result = Grouped()
    for index, value in enumerate(values):
        result.add(value, index // size)
    return result


def test_conversations_count_for_less_than_as_many_strangers() -> None:
    chance = random.Random(5)
    strangers = grouped([chance.gauss(0, 1) for _ in range(4000)])
    assert strangers.likeness == pytest.approx(1, abs=0.5)
    turns = [middle + chance.gauss(0, 0.5) for middle in (chance.gauss(0, 1) for _ in range(500)) for _ in range(8)]
    talks = grouped(turns, 8)
    # Eight turns of which four fifths are shared: 1 + 7 x 0.8.
    assert talks.likeness == pytest.approx(6.6, rel=0.4)
    wide = difference([(talks, talks)], v_opt=2800, alpha=0.2)
    narrow = difference([(grouped(turns), grouped(turns))], v_opt=2800, alpha=0.2)
    assert wide.high > 1.5 * narrow.high
    one = grouped(turns, len(turns))
    assert one.likeness == 1, "a router that tells no buckets is judged as before"


@given(NUMBERS)
def test_sums_survive_the_database(values: list[float]) -> None:
    stats = ArmStats(requests=len(values), errors=1)
    for index, value in enumerate(values):
        stats.first_token.add(value, index)
    assert arms.from_json(arms.to_json(stats)) == stats


def test_strata_add_up_and_unequal_bothare_fair() -> None:
    """Two steps with other means and sizes: the difference is what they have in common."""
    chance = random.Random(1)

    def step(new: int, control: int, middle: float) -> tuple[Grouped, Grouped]:
        return (
            grouped([chance.gauss(middle + 0.2, 0.3) for _ in range(new)]),
            grouped([chance.gauss(middle, 0.3) for _ in range(control)]),
        )

    found = difference([step(400, 300, 5.0), step(900, 1000, 7.0)], v_opt=2800, alpha=0.2)
    assert found.estimate == pytest.approx(0.2, abs=0.03)
    assert found.low < 0.2 < found.high
    assert difference([step(9, 500, 5.0)], v_opt=2800, alpha=0.2).low == -math.inf, "too few to say anything"


def test_a_confidence_sequence_holds_at_all_times_at_once() -> None:
    """Looked at after every ten requests; a plain interval of the same level would be left by far more."""
    left = 0
    for seed in range(200):
        chance = random.Random(seed)
        new, control = Grouped(), Grouped()
        for _ in range(60):
            for group in range(10):
                new.add(chance.gauss(0, 1), group)
                control.add(chance.gauss(0, 1), group)
            found = difference([(new, control)], v_opt=300, alpha=0.2)
            if not found.low <= 0 <= found.high:
                left += 1
                break
    assert left / 200 <= 0.2


def test_the_early_bound_is_left_as_seldom_as_it_says_and_not_much_more_seldom() -> None:
    """A Brownian motion, looked at in small steps far beyond the point at which the bound is best."""
    early, chance, left = Early(at=100.0, width=1.5), random.Random(3), 0
    assert early.alpha == pytest.approx(3 * (1 - NormalDist().cdf(1.5)))
    for _ in range(1000):
        score, v = 0.0, 0.0
        while v < 1000:
            step = 4.0 if v < 200 else 40.0
            v += step
            score += chance.gauss(0, math.sqrt(step))
            if score / v >= early_radius(v, early):
                left += 1
                break
    assert early.alpha / 2 < left / 1000 < early.alpha


@pytest.mark.parametrize(("slower", "word"), [(1.12, "WAIT"), (1.17, "FAIL")])
def test_what_is_plain_after_400_requests_goes_back_then(slower: float, word: str) -> None:
    """The mixture alone wants 18 % by then; both times are as spread as first tokens are."""
    times = [0.6 * NormalDist().inv_cdf((index + 0.5) / 400) for index in range(400)]
    random.Random(1).shuffle(times)
    both = {"new": ArmStats(requests=400), "control": ArmStats(requests=400)}
    for index, time in enumerate(times):
        both["new"].first_token.add(time + math.log(slower), index)
        both["control"].first_token.add(time, index)
    assert verdict(StepStats(both)).word == word  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("new", "old", "says"),
    [
        ((0, 2000), (10, 1000), "SAME"),
        ((80, 1000), (10, 1000), "WORSE"),
        ((10, 10), (0, 100), "WORSE"),
        ((1, 20), (0, 1000), "UNKNOWN"),
        ((1, 1), (0, 100_000), "UNKNOWN"),
    ],
)
def test_failures(new: tuple[int, int], old: tuple[int, int], says: str) -> None:
    ratio = likelihood_ratio([(Failures(*new), Failures(*old))], margin=0.02)
    assert ratio_verdict(ratio, alpha=0.005, beta=0.05) == says


def step(new: dict[str, Any], control: dict[str, Any] | None = None, count: int = 2000) -> StepStats:
    """A step of so many requests of each judged arm, alike but for what is given."""
    result: dict[Arm, ArmStats] = {}
    for arm, changes in (("new", new), ("control", control or {})):
        chance, stats = random.Random(count), ArmStats()
        values = {"ms": 200.0, "errors": 0, "empty": 0, "repetition": 0.1, "tokens": 40, "cold": False, **changes}
        for index in range(count):
            ok = index >= values["errors"]
            stats.take(
                Observation(
                    arm="new",
                    first_token_ms=values["ms"] * chance.lognormvariate(0, 0.3),
                    per_token_ms=values["ms"] / 10 * chance.lognormvariate(0, 0.3),
                    ok=ok,
                    output_tokens=0 if index < values["empty"] else values["tokens"] + chance.randrange(10),
                    repetition=values["repetition"],
                    cold=values["cold"],
                )
            )
        result[arm] = stats  # type: ignore[index]
    return StepStats(result)


def verdict(*steps: StepStats, share: int = 5000, settings: Settings = SETTINGS, **options: Any) -> Verdict:
    return judge(list(steps), share=share, settings=settings, **options)


@pytest.mark.parametrize(
    ("new", "word", "says"),
    [
        ({}, "PASS", "first token +0.0%"),
        ({"ms": 260.0}, "FAIL", "first token"),
        ({"ms": 150.0}, "PASS", ""),
        ({"errors": 140}, "FAIL", "errors"),
        ({"empty": 400}, "FAIL", "empty"),
        ({"repetition": 0.4}, "FAIL", "repetition"),
        ({"tokens": 90}, "HOLD", "output token count"),
        ({"tokens": 10}, "HOLD", "output token count"),
    ],
)
def test_what_a_person_would_say(new: dict[str, Any], word: str, says: str) -> None:
    found = verdict(step(new))
    assert found.word == word, found.sentence
    assert says in found.sentence


def test_too_few_requests_wait_whatever_they_look_like() -> None:
    assert verdict(step({}, count=100)).sentence.startswith("100 of 200")
    assert verdict(step({}, count=100), settings=replace(SETTINGS, min_samples=50)).word == "WAIT"
    assert verdict(step({"ms": 800.0}, count=60)).word == "FAIL", "what is plain is not waited for"


def test_small_shares_need_less_evidence_than_the_step_to_everybody() -> None:
    some, quick = step({}, count=60), replace(SETTINGS, min_samples=50)
    assert verdict(some, share=100, settings=quick).word == "PASS"
    assert verdict(some, share=5000, settings=quick).word == "WAIT"
    # Evidence adds up over the steps.
    assert verdict(step({}), some, share=5000, settings=quick).word == "PASS"


def test_what_fails_every_time_is_not_tried_for_long() -> None:
    def seen(new: int, old_errors: int) -> StepStats:
        return StepStats(
            {"new": ArmStats(requests=new, errors=new), "control": ArmStats(requests=100, errors=old_errors)}
        )

    assert verdict(seen(3, 0)).word == "WAIT"
    assert verdict(seen(4, 0)).word == "FAIL"
    assert verdict(seen(4, 60)).word == "WAIT", "everything fails"
    alone = StepStats({"new": ArmStats(requests=4, errors=4)})
    assert verdict(alone, share=WHOLE).word == "FAIL", "nobody asks the old one, which is no excuse"


def test_a_shift_that_a_person_has_seen_holds_no_longer() -> None:
    assert verdict(step({"tokens": 90}), shift_accepted=True).word == "PASS"


def test_cold_requests_say_nothing_about_speed() -> None:
    found = verdict(step({"ms": 2000.0, "cold": True}))
    assert found.word == "WAIT"


def test_the_last_step_has_no_control_and_judges_failures_by_the_step_before() -> None:
    before, last = step({}), StepStats({"new": step({"ms": 900.0}).arm("new")})
    assert verdict(before, last, share=WHOLE).word == "PASS"
    failing = StepStats({"new": step({"errors": 200}).arm("new")})
    assert verdict(before, failing, share=WHOLE).word == "FAIL"


def test_with_no_least_sample_nothing_is_waited_for() -> None:
    assert verdict(StepStats(), settings=replace(SETTINGS, min_samples=0)).word == "PASS"


def test_a_step_is_exhausted_by_its_smaller_arm() -> None:
    gates = Gates(max_samples=100)
    seen = StepStats({"new": ArmStats(requests=500), "control": ArmStats(requests=99)})
    assert not exhausted(seen, share=100, gates=gates)
    assert exhausted(seen, share=WHOLE, gates=gates)


def test_logits_that_are_no_numbers_fail_at_once_also_in_a_shadow() -> None:
    bad = StepStats({"new": ArmStats(requests=1, errors=1, nonfinite=1)})
    assert verdict(bad).word == "FAIL"
    assert judge_shadow(bad, gates=Gates()).word == "FAIL"
    assert judge_shadow(step({}), gates=Gates()).word == "PASS"


def test_times_beyond_all_measure_are_judged_too() -> None:
    stats = step({})
    for arm, ms in (("new", 1e9), ("control", 1e-3)):
        for _ in range(5000):
            stats.arm(arm).take(Observation(arm=arm, first_token_ms=ms, per_token_ms=ms, ok=True, output_tokens=9))
    assert verdict(stats).word == "FAIL"
    assert all(math.isfinite(value) for value in _quotient(Interval(800.0, 790.0, 900.0, 1.0)))
