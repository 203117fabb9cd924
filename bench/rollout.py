"""What the judge of rollouts is worth: `make bench-rollout`.

Plays whole rollouts on a simulated clock with the registry's own machine and judge (services/registry/rollout):
requests come, are looked at every few, and the machine says whether to go on, to hold or to go back. Times to the first
token are log-normal with a spread of 0.6, times per token with 0.3; one request in a hundred fails and one answer in
fifty is rejected. A slowdown is of the first token alone, the noisier of the two, so that nothing else gives it away.
"Requests" are those of the new arm; its control has as many.

The baseline of false rollbacks is a plain two-sample test at 5 % that is looked at just as often. The baseline of what
is caught within 400 requests is the most that any rule can catch in them: the power of the one-sided test that knows
the variance, looks once, at 400, and rolls 1 % of identical revisions back (Neyman and Pearson). Prints a line per
figure and writes bench/results/rollout.json. No constant of the judge was chosen on the seed that is the default here.
"""

import argparse
import math
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist

import numpy as np

from bench.figures import RESULTS, Figure, report
from services.registry.rollout import judge
from services.registry.rollout.arms import ArmStats, StepStats
from services.registry.rollout.machine import Evidence, Move, Position, decide
from services.registry.rollout.sequences import GROUPS, Grouped, Moments
from services.registry.rollout.settings import Settings
from services.registry.rollout.states import State
from services.shared.split import Arm

LOOK = 40
MOST = 4000
PART = 25  # rollouts that a process plays at a time
# Requests of each judged arm in a second: so few that a step waits for evidence and not for its 60 seconds.
RATE = 4.0
PEEK_Z = 1.645


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What requests are like. `slow` multiplies the new arm's first-token times, `errors` are its failures.

    With `session` > 1 so many requests share a part of their chance, as those of one conversation do: `alike` of the
    variance; and they are of one bucket.
    """

    slow: float = 1.0
    errors: float = 0.01
    base_errors: float = 0.01
    first_spread: float = 0.6
    token_spread: float = 0.3
    session: int = 1
    alike: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout ended, after how many requests of the new arm, and whether a plain test would have gone back."""

    state: State
    requests: int
    naive: bool


def play(chance: np.random.Generator, traffic: Traffic, settings: Settings, *, most: int | None = None) -> Outcome:
    """Plays a rollout from its first share to its end, to a hold, or to `most` requests of the new arm."""
    position = Position(state=State.SPLITTING, entered_us=0)
    steps: dict[int, StepStats] = {0: _step()}
    new, control = Moments(), Moments()
    seen, now_us, naive = 0, 0, False
    while True:
        step = steps.setdefault(position.step, _step())
        whole = position.share(settings) == settings.steps[-1]
        for arm in ("new",) if whole else ("new", "control"):
            times = _add(step.arms[arm], chance, traffic, new=arm == "new")  # type: ignore[index]
            (new if arm == "new" else control).merge(times)
        seen += LOOK
        now_us += round(LOOK / RATE * 1e6)
        naive = naive or _naive(new, control)
        move: Move | None = decide(position, settings, Evidence(steps=steps), now_us=now_us)
        if move is not None:
            position = move.position
        if position.ended or position.state in (State.PAUSED, State.RETAINING) or (most is not None and seen >= most):
            return Outcome(position.state, seen, naive)


def _step() -> StepStats:
    arms: dict[Arm, ArmStats] = {"new": ArmStats(), "control": ArmStats()}
    return StepStats(arms)


def _add(stats: ArmStats, chance: np.random.Generator, traffic: Traffic, *, new: bool) -> Moments:
    """Adds one look's worth of requests; returns what was added to the first-token times."""
    failed = int(chance.binomial(LOOK, traffic.errors if new else traffic.base_errors))
    good = LOOK - failed
    middle = math.log(200.0 * (traffic.slow if new else 1.0))
    groups = np.repeat(chance.integers(0, GROUPS, -(-good // traffic.session)), traffic.session)[:good]
    first = _grouped(middle + traffic.first_spread * _deviates(chance, traffic, good), groups)
    stats.requests += LOOK
    stats.errors += failed
    stats.tokens += 50 * good
    stats.first_token.merge(first)
    stats.per_token.merge(_grouped(math.log(30.0) + traffic.token_spread * _deviates(chance, traffic, good), groups))
    stats.length.merge(_grouped(chance.normal(4.0, 0.8, good), groups))
    stats.repetition.merge(_grouped(chance.beta(1.0, 20.0, good), groups))
    judged = good // 10
    rejected = int(chance.binomial(judged, 0.02))
    stats.rejected += rejected
    stats.accepted += judged - rejected
    stats.empty += int(chance.binomial(good, 0.005))
    return first.moments


def _deviates(chance: np.random.Generator, traffic: Traffic, count: int) -> np.ndarray:
    own = chance.standard_normal(count)
    if traffic.session == 1:
        return own
    shared = np.repeat(chance.standard_normal(-(-count // traffic.session)), traffic.session)[:count]
    return math.sqrt(traffic.alike) * shared + math.sqrt(1 - traffic.alike) * own


def _grouped(values: np.ndarray, groups: np.ndarray) -> Grouped:
    mean = float(values.mean())
    counts = np.bincount(groups, minlength=GROUPS).tolist()
    sums = np.bincount(groups, weights=values, minlength=GROUPS).tolist()
    return Grouped(Moments(len(values), mean, float(((values - mean) ** 2).sum())), counts, sums)


def _naive(new: Moments, control: Moments) -> bool:
    if min(new.count, control.count) < LOOK // 2:
        return False
    error = math.sqrt(new.variance / new.count + control.variance / control.count)
    return (new.mean - control.mean) / error > PEEK_Z


def many(
    count: int, seed: int, traffic: Traffic, *, most: int | None = None, pool: Executor | None = None
) -> list[Outcome]:
    """Plays so many rollouts of one kind, in a pool of processes if there is one; the outcomes are the same."""
    streams = np.random.SeedSequence(seed).spawn(count)
    parts = [streams[index : index + PART] for index in range(0, count, PART)]
    played = (pool.map if pool is not None else map)(partial(_play_part, traffic=traffic, most=most), parts)
    return [outcome for part in played for outcome in part]


def _play_part(streams: list[np.random.SeedSequence], *, traffic: Traffic, most: int | None) -> list[Outcome]:
    return [play(np.random.default_rng(stream), traffic, Settings(), most=most) for stream in streams]


def share(outcomes: list[Outcome], *, within: int | None = None, state: State = State.ROLLED_BACK) -> float:
    """Returns the percentage that ended in a state, in at most so many requests."""
    hits = [item for item in outcomes if item.state is state and (within is None or item.requests <= within)]
    return 100.0 * len(hits) / len(outcomes)


def median(outcomes: list[Outcome], state: State = State.ROLLED_BACK) -> float:
    """Returns the median number of requests of those that ended in a state; infinite when fewer than half did."""
    counts = sorted(item.requests if item.state is state else math.inf for item in outcomes)
    return float(counts[len(counts) // 2])


def ceiling(traffic: Traffic, requests: int, *, alpha: float) -> float:
    """Returns the percentage of slower revisions that a test with nothing left to learn finds in so many requests."""
    normal = NormalDist()
    answered = requests * (1 - traffic.errors)
    error = traffic.first_spread * math.sqrt(2 / answered)
    return 100.0 * normal.cdf(math.log(traffic.slow) / error - normal.inv_cdf(1 - alpha))


def figures(count: int, seed: int, pool: Executor) -> Iterator[Figure]:
    """Plays everything; `count` rollouts of identical revisions of each traffic, fewer of every other kind."""
    played = partial(many, pool=pool)
    same = played(count, seed, Traffic())
    peeking = 100.0 * sum(item.naive for item in same) / len(same)
    yield _at_most("identical, rolled back", share(same), peeking, 1.0, "%")
    yield _at_least("identical, promoted", share(same, state=State.RETAINING), 100.0, 95.0, "%")
    yield _at_most("identical, to the flip", median(same, State.RETAINING), 4 * 200.0, MOST, "req")
    alike = played(count, seed + 1, Traffic(session=8, alike=0.3))
    yield _at_most("same, conversations of 8", share(alike), peeking, 1.0, "%")
    broken = played(count // 4, seed + 2, Traffic(base_errors=0.05, errors=0.05))
    yield _at_most("same, 5 % of all fail", share(broken), peeking, 1.0, "%")
    quarter = Traffic(slow=1.25)
    slow = played(count // 2, seed + 3, quarter, most=MOST)
    yield _at_most("25 % slower, caught after", median(slow), 200.0, 400.0, "req")
    possible = ceiling(quarter, 400, alpha=0.01)
    yield _at_least("25 % slower, within 400", share(slow, within=400), possible, 95.0, "%")
    yield _at_least("25 % slower, ever", share(slow), 100.0, 100.0, "%")
    tenth = played(count // 4, seed + 4, Traffic(slow=1.10), most=MOST)
    yield _at_least("10 % slower, within 4,000", share(tenth, within=MOST), 85.0, 80.0, "%")
    yield _at_most("10 % slower, promoted", share(tenth, state=State.RETAINING), 0.0, 5.0, "%")
    margin = played(count // 4, seed + 6, Traffic(slow=1.05), most=MOST)
    level = 100.0 * (judge.ALPHA / 2 + judge.EARLY.alpha)
    yield _at_most("at the margin, rolled back", share(margin), level, level, "%")
    failing = played(count // 4, seed + 5, Traffic(errors=0.06), most=MOST)
    yield _at_most("5 points more errors, after", median(failing), 100.0, 400.0, "req")
    yield _at_least("5 points more, within 1,000", share(failing, within=1000), 100.0, 95.0, "%")


def _at_most(name: str, value: float, baseline: float, target: float, unit: str) -> Figure:
    return Figure(name=name, value=value, baseline=baseline, target=target, unit=unit)


def _at_least(name: str, value: float, baseline: float, target: float, unit: str) -> Figure:
    return Figure(name=name, value=value, baseline=baseline, target=target, unit=unit, at_most=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the judge of rollouts on a simulated clock.")
    parser.add_argument("--rollouts", type=int, default=1000, help="rollouts of identical revisions")
    parser.add_argument("--seed", type=int, default=2027, help="seed of all chance")
    parser.add_argument("--out", type=Path, default=RESULTS / "rollout.json", help="where the JSON goes")
    options = parser.parse_args()
    started = time.monotonic()
    with ProcessPoolExecutor() as pool:
        found = list(figures(options.rollouts, options.seed, pool))
    facts = {
        "rollouts": options.rollouts,
        "seed": options.seed,
        "a look every": f"{LOOK} requests of each arm",
        "wall_s": round(time.monotonic() - started),
    }
    report(options.out, found, facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
