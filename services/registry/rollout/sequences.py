"""Tests that may be looked at after every request: confidence sequences and sequential probability ratios. Pure.

**A confidence sequence** holds at all times at once: the probability that the truth ever leaves it is at most alpha, no
matter when and how often somebody looks. For a sum S of differences with intrinsic time v (the sum of their variances)
it is the two-sided normal mixture,

    |S - truth| <= sqrt((v + rho) (ln(1 + v / rho) + 2 ln(1 / alpha))),

tightest near v = v_opt where rho = v_opt / (2 ln(1/alpha) + ln(1 + 2 ln(1/alpha))) (Robbins; Howard and others, 2021).
Here S and v are of *scores*: a stratum whose difference d of means has variance V adds d/V to S and 1/V to v, so the
interval of the difference is (S +- radius)/v. Strata of any sizes add up, and v_opt says how precise an answer is
wanted, whatever the noise. With estimated variances that holds in the limit of many requests; `MIN_SAMPLES` and
`MIN_SPREAD` keep small strata from claiming more. Requests of one conversation resemble each other, so that many of
them tell less than they seem to: they fall into one of `GROUPS` groups, and the spread of the groups' sums says by what
factor the variance of the mean is larger than that of as many strangers (the method of random groups).

**A lower end for what is plain.** The mixture is tight where it must last; what is far off is seen earlier by a bound
that spends its error before. S - v * truth is, in the limit, a Brownian motion W in v. By reflection W reaches c
anywhere up to V with probability 2 P(N > c / sqrt(V)), and because v W(1/v) is a Brownian motion too, W(v) / v reaches
c / V anywhere from V on with the same probability; W(V) >= c is part of both. So with probability 1 - 3 P(N > k) no
estimate is ever more than

    k / sqrt(V) * max(1, V / v)

above the truth (Levy; O'Brien and Fleming, 1979, stop by the first half of it). The interval's lower end is the better
one of both, at the sum of their levels.

**A sequential probability ratio** weighs failures of rate p1 against rate p0: above `ln((1 - beta)/alpha)` it is p1,
below `ln(beta/(1 - alpha))` it is p0, between them nobody knows yet (Wald, 1945).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

# Requests that each arm of a stratum must have to be counted, and the least standard deviation that is believed.
MIN_SAMPLES = 10
MIN_SPREAD = 0.05
GROUPS = 50
# With fewer groups than this, their spread is not worth believing; until then requests of a group are taken to be as
# alike as those of long conversations are.
MIN_GROUPS = 10
LIKENESS = 4.0


@dataclass(slots=True)
class Moments:
    """Count, mean and sum of squared deviations of numbers that are not kept."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Takes a number."""
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)

    def merge(self, other: "Moments") -> None:
        """Takes the numbers that `other` took."""
        count = self.count + other.count
        if count:
            delta = other.mean - self.mean
            self.squares += other.squares + delta * delta * self.count * other.count / count
            self.mean += delta * other.count / count
            self.count = count

    @property
    def variance(self) -> float:
        """The variance, at least that of `MIN_SPREAD`."""
        found = self.squares / (self.count - 1) if self.count > 1 else 0.0
        return max(found, MIN_SPREAD**2)


@dataclass(slots=True)
class Grouped:
    """Moments, and for each group the count and the sum of its numbers."""

    moments: Moments = field(default_factory=Moments)
    counts: list[int] = field(default_factory=lambda: [0] * GROUPS)
    sums: list[float] = field(default_factory=lambda: [0.0] * GROUPS)

    def add(self, value: float, group: int) -> None:
        """Takes a number of a group, any integer."""
        self.moments.add(value)
        self.counts[group % GROUPS] += 1
        self.sums[group % GROUPS] += value

    def merge(self, other: "Grouped") -> None:
        """Takes the numbers that `other` took."""
        self.moments.merge(other.moments)
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]

    @property
    def count(self) -> int:
        """How many numbers."""
        return self.moments.count

    @property
    def mean(self) -> float:
        """Their mean."""
        return self.moments.mean

    @property
    def mean_variance(self) -> float:
        """The variance of the mean, if no two numbers had to do with each other."""
        return self.moments.variance / self.count

    @property
    def likeness(self) -> float:
        """By what factor the variance of the mean is larger than that; 1 where only one group is told of."""
        groups = len(self.counts) - self.counts.count(0)
        if groups < 2:
            return 1.0
        if groups < MIN_GROUPS:
            return min(LIKENESS, self.count / groups)
        mean = self.moments.mean
        # An empty group adds nothing.
        spread = sum([(total - count * mean) ** 2 for count, total in zip(self.counts, self.sums, strict=True)])
        found = spread * groups / (groups - 1) / self.moments.count**2
        return found / self.mean_variance


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a difference is. `information` is 1/variance of the estimate; 0 when there is none."""

    estimate: float
    low: float
    high: float
    information: float


@dataclass(frozen=True, slots=True)
class Early:
    """The lower end for what is plain: best at information `at`, `width` standard errors wide there."""

    at: float
    width: float

    @property
    def alpha(self) -> float:
        """Its level."""
        return 1.5 * math.erfc(self.width / math.sqrt(2))


UNKNOWN = Interval(0.0, -math.inf, math.inf, 0.0)


def mixture_rho(v_opt: float, alpha: float) -> float:
    """Returns the rho whose bound is tightest near `v_opt`."""
    twice = 2 * math.log(1 / alpha)
    return v_opt / (twice + math.log(1 + twice))


def mixture_radius(v: float, *, rho: float, alpha: float) -> float:
    """Returns how far a sum of intrinsic time `v` may be from the truth."""
    return math.sqrt((v + rho) * (math.log1p(v / rho) + 2 * math.log(1 / alpha)))


def early_radius(v: float, early: Early) -> float:
    """Returns how far an estimate of information `v` may be above the truth."""
    return early.width / math.sqrt(early.at) * max(1.0, early.at / v)


def difference(
    strata: Iterable[tuple[Grouped, Grouped]], *, v_opt: float, alpha: float, early: Early | None = None
) -> Interval:
    """Returns the confidence sequence of the mean of the first of each pair minus the second's, over all pairs."""
    pairs = [pair for pair in strata if min(pair[0].count, pair[1].count) >= MIN_SAMPLES]
    if not pairs:
        return UNKNOWN
    # All are of one traffic; together they say most surely how alike its requests are.
    arms = [arm for pair in pairs for arm in pair]
    likeness = max(1.0, sum(arm.likeness * arm.count for arm in arms) / sum(arm.count for arm in arms))
    score = information = 0.0
    for new, control in pairs:
        variance = likeness * (new.mean_variance + control.mean_variance)
        score += (new.mean - control.mean) / variance
        information += 1 / variance
    radius = mixture_radius(information, rho=mixture_rho(v_opt, alpha), alpha=alpha) / information
    below = radius if early is None else min(radius, early_radius(information, early))
    estimate = score / information
    return Interval(estimate, estimate - below, estimate + radius, information)


Ratio = Literal["WORSE", "SAME", "UNKNOWN"]


@dataclass(frozen=True, slots=True)
class Failures:
    """How many of how many failed."""

    failed: int
    total: int


def likelihood_ratio(strata: Iterable[tuple[Failures, Failures]], *, margin: float) -> float:
    """Returns the logarithm of the ratio by which the first of each pair looks worse than the second by `margin`.

    The second's rate is not known either, so p0 is the upper end of where it may be (Wilson, one side, 95 %), and at
    least a quarter of the margin: a single failure after many good requests is no trend.
    """
    total = 0.0
    for new, control in strata:
        if not new.total:
            continue
        p0 = min(max(_upper(control), margin / 4), 0.98)
        p1 = min(p0 + margin, 0.99)
        total += new.failed * math.log(p1 / p0) + (new.total - new.failed) * math.log((1 - p1) / (1 - p0))
    return total


def ratio_verdict(logarithm: float, *, alpha: float, beta: float) -> Ratio:
    """Returns what a likelihood ratio says."""
    if logarithm >= math.log((1 - beta) / alpha):
        return "WORSE"
    return "SAME" if logarithm <= math.log(beta / (1 - alpha)) else "UNKNOWN"


def _upper(seen: Failures) -> float:
    """Returns the upper end of a rate (Wilson's interval at z = 1.645)."""
    n, z = seen.total, 1.645
    if not n:
        return 0.5
    rate = seen.failed / n
    centre = rate + z * z / (2 * n)
    spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return (centre + spread) / (1 + z * z / n)
