"""The judge: is the new revision as good as the old one? Pure; may be asked after every request.

Latencies: a confidence sequence of log(new) - log(control), over all steps so far, each step a stratum with a control
of its own time, size and residency. FAIL when all of it lies above the margin; PASS when all of it lies below the
tolerance of the present share; else WAIT. What a share can harm is bounded by the share, so the first steps ask for
less evidence (`LENIENCE`); the step to everybody asks for the tolerance itself. The last step has no control left and
judges latency no more.

Failures: a sequential probability ratio against everything that the old revision answered meanwhile. FAIL above its
upper bound, or when every one of the first few requests of a step fails while the old revision works: what takes an
executor down with it must not be tried ten times. The step to everybody waits for the lower bound; earlier steps wait
only while failures look like more.

Quality: rejected and empty answers as failures, with wider margins, and repetition as a difference; these FAIL or do
not. A length that shifts is no fault by itself, a new revision is meant to differ: it HOLDs until a person has looked.

Every rule has its own error budget; `make bench-rollout` plays what they add up to.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from services.registry.rollout.arms import StepStats
from services.registry.rollout.sequences import (
    MIN_SAMPLES,
    Early,
    Failures,
    Interval,
    difference,
    likelihood_ratio,
    ratio_verdict,
)
from services.registry.rollout.settings import WHOLE, Gates, Settings

Word = Literal["PASS", "WAIT", "FAIL", "HOLD", "INFO"]

# Two-sided, of each latency: whoever is worse by exactly the margin is rolled back in one of ten rollouts at most.
# Identical revisions are the margin away from that, which is worth far more than a small alpha.
ALPHA = 0.2
# Precision at which the sequence is tightest: about that of 2,000 requests in each arm with a spread of 0.6.
V_OPT = 2800.0
# The first token is the noisier one: its lower end spends 0.054 more on what is plain with 400 requests in each arm at
# that spread. Identical revisions, the margin away, get there in one of 390 rollouts at most, however often they are
# looked at. Times per further token are averages and spread half as much, so that the mixture sees as much by then.
EARLY = Early(at=550.0, width=2.1)
ERROR_ALPHA, ERROR_BETA = 0.005, 0.05
# So many failures and not one answer, in one step.
DEAD = 4
# How much wider the tolerance is up to a share, in parts of ten thousand.
LENIENCE = ((100, 5.0), (500, 3.5), (2500, 2.5), (WHOLE, 1.0))
EMPTY_MARGIN, REJECT_MARGIN = 0.05, 0.10
# Repetition is a share of an answer; a length is judged by its logarithm.
REPETITION_MARGIN, LENGTH_MARGIN = 0.10, math.log(1.5)
QUALITY_ALPHA, QUALITY_V_OPT = 0.01, 1000.0
LATENCIES: dict[str, Early | None] = {"first_token_ms": EARLY, "per_token_ms": None}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric. `estimate` and its ends are quotients (times, lengths) or differences of shares."""

    metric: str
    word: Word
    estimate: float
    low: float | None
    high: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about a step, why in one sentence, and what it rests on."""

    word: Word
    sentence: str
    comparisons: tuple[Comparison, ...]


def judge(steps: Sequence[StepStats], *, share: int, settings: Settings, shift_accepted: bool = False) -> Verdict:
    """Judges the last of `steps`, in which `share` parts of ten thousand are new. `steps` are all so far, in order.

    With `shift_accepted` a shift of lengths holds no longer. With a `min_samples` of 0 nothing is waited for.
    """
    present, gates = steps[-1], settings.gates
    # The last step has no control: it adds nothing to what is compared with one.
    latencies = [_latency(name, steps, share=share, gates=gates) for name in LATENCIES]
    comparisons = (*latencies, _errors(steps, share=share, gates=gates), *_quality(steps))
    bad = [item for item in comparisons if item.word == "FAIL"]
    if present.arm("new").nonfinite:
        return Verdict("FAIL", "the new revision gave NaN or infinite logits", comparisons)
    if bad:
        return Verdict("FAIL", "; ".join(map(describe, bad)), comparisons)
    samples = _samples(present, share)
    if samples < settings.min_samples:
        return Verdict("WAIT", f"{samples} of {settings.min_samples} requests of each judged arm", comparisons)
    shifted = [item for item in comparisons if item.word == "HOLD" and not shift_accepted]
    if shifted:
        return Verdict("HOLD", "; ".join(map(describe, shifted)), comparisons)
    waiting = [item for item in comparisons if item.word == "WAIT" and settings.min_samples]
    if waiting:
        return Verdict("WAIT", "not known yet: " + "; ".join(map(describe, waiting)), comparisons)
    return Verdict("PASS", "; ".join(map(describe, comparisons[:3])), comparisons)


def judge_shadow(shadow: StepStats, *, gates: Gates) -> Verdict:
    """Judges copies of requests, whose times mean nothing: only whether they fail."""
    errors = _errors([shadow], share=0, gates=gates)
    if shadow.arm("new").nonfinite:
        return Verdict("FAIL", "the new revision gave NaN or infinite logits", (errors,))
    return Verdict("FAIL" if errors.word == "FAIL" else "PASS", describe(errors), (errors,))


def exhausted(present: StepStats, *, share: int, gates: Gates) -> bool:
    """Says whether a step has had as many requests as it may without a verdict."""
    return _samples(present, share) >= gates.max_samples


def describe(item: Comparison) -> str:
    """Returns a comparison in words."""
    name = item.metric.replace("_", " ").removesuffix(" ms")
    if item.low is None or item.high is None:
        return f"{name} {item.estimate:+.2%} ({item.samples} requests)"
    if not math.isfinite(item.low + item.high):
        return f"{name} has too few requests"
    if item.metric == "repetition":
        return f"{name} {item.estimate:+.2f} ({item.low:+.2f} to {item.high:+.2f})"
    return f"{name} {item.estimate - 1:+.1%} ({item.low - 1:+.1%} to {item.high - 1:+.1%})"


def _samples(present: StepStats, share: int) -> int:
    new = present.arm("new").requests
    return new if share == WHOLE else min(new, present.arm("control").requests)


def _tolerance(share: int, gates: Gates) -> float:
    lenience = next(factor for most, factor in LENIENCE if share <= most)
    return math.log1p(gates.advance_tolerance * lenience)


def _latency(metric: str, steps: Sequence[StepStats], *, share: int, gates: Gates) -> Comparison:
    name = metric.removesuffix("_ms")
    pairs = [(getattr(step.arm("new"), name), getattr(step.arm("control"), name)) for step in steps]
    found = difference(pairs, v_opt=V_OPT, alpha=ALPHA, early=LATENCIES[metric])
    samples = sum(new.count for new, _ in pairs)
    if found.low > math.log1p(gates.rollback_margin):
        word: Word = "FAIL"
    elif share == WHOLE or not _measurable(metric, steps):
        word = "INFO"
    else:
        word = "PASS" if found.high < _tolerance(share, gates) else "WAIT"
    return Comparison(metric, word, *_quotient(found), samples)


def _measurable(metric: str, steps: Sequence[StepStats]) -> bool:
    """Answers of one token have no time per further token; where nearly all are such, there is nothing to wait for."""
    if metric != "per_token_ms":
        return True
    arms = [step.arm(name) for step in steps for name in ("new", "control")]  # type: ignore[arg-type]
    answered = sum(arm.first_token.count for arm in arms)
    return answered < 4 * MIN_SAMPLES or sum(arm.per_token.count for arm in arms) * 20 >= answered


def _errors(steps: Sequence[StepStats], *, share: int, gates: Gates) -> Comparison:
    pairs = _failures("errors", steps)
    ratio = likelihood_ratio(pairs, margin=gates.error_margin)
    says = ratio_verdict(ratio, alpha=ERROR_ALPHA, beta=ERROR_BETA)
    if says == "WORSE" or _dead(*pairs[-1]):
        word: Word = "FAIL"
    elif share > LENIENCE[-2][0] and share != WHOLE:
        word = "PASS" if says == "SAME" else "WAIT"
    else:
        word = "PASS" if ratio <= 0 else "WAIT"
    return _shares("errors", word, steps)


def _dead(new: Failures, old: Failures) -> bool:
    # An old revision that nothing was asked of, as where everybody gets the new one at once, is taken to work.
    return new.failed == new.total >= DEAD and (not old.total or old.failed * 2 < old.total)


def _quality(steps: Sequence[StepStats]) -> Iterable[Comparison]:
    for kind, margin in (("empty", EMPTY_MARGIN), ("rejected", REJECT_MARGIN)):
        pairs = _failures(kind, steps)
        says = ratio_verdict(likelihood_ratio(pairs, margin=margin), alpha=ERROR_ALPHA, beta=ERROR_BETA)
        yield _shares(kind, "FAIL" if says == "WORSE" else "INFO", steps)
    repetition = _moments("repetition", steps)
    word: Word = "FAIL" if repetition.low > REPETITION_MARGIN else "INFO"
    samples = sum(step.arm("new").answered for step in steps)
    yield Comparison("repetition", word, repetition.estimate, repetition.low, repetition.high, samples)
    length = _moments("length", steps)
    shifted = length.low > LENGTH_MARGIN or length.high < -LENGTH_MARGIN
    yield Comparison("output_token_count", "HOLD" if shifted else "INFO", *_quotient(length), samples)


def _failures(kind: str, steps: Sequence[StepStats]) -> list[tuple[Failures, Failures]]:
    """Returns the new arm's failures and the old revision's, step by step; where that one did nothing any more, what
    it did in the step before."""
    pairs: list[tuple[Failures, Failures]] = []
    known = Failures(0, 0)
    for step in steps:
        found = step.baseline(kind)
        known = found if found.total else known
        pairs.append((step.arm("new").failures(kind), known))
    return pairs


def _moments(name: str, steps: Sequence[StepStats]) -> Interval:
    pairs = [(getattr(step.arm("new"), name), getattr(step.arm("control"), name)) for step in steps]
    return difference(pairs, v_opt=QUALITY_V_OPT, alpha=QUALITY_ALPHA)


def _quotient(found: Interval) -> tuple[float, float, float]:
    estimate, low, high = (math.exp(min(value, 700.0)) for value in (found.estimate, found.low, found.high))
    return estimate, low, high


def _shares(kind: str, word: Word, steps: Sequence[StepStats]) -> Comparison:
    """Compares the shares of all steps, which is for people; the ratio is what decides."""
    new = [step.arm("new").failures(kind) for step in steps]
    old = [step.baseline(kind) for step in steps]
    rates = [sum(item.failed for item in arm) / max(1, sum(item.total for item in arm)) for arm in (new, old)]
    return Comparison(kind, word, rates[0] - rates[1], None, None, sum(item.total for item in new))
