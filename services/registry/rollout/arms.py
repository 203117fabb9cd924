"""What is kept of the requests of a rollout: sums for each step and arm, no request by itself. Pure."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from services.registry.rollout.sequences import Failures, Grouped, Moments
from services.shared.split import Arm, Observation

NON_FINITE = "NON_FINITE_LOGITS"


@dataclass(slots=True)
class ArmStats:
    """Sums over the requests of an arm. Times are logarithms of milliseconds, lengths of 1 + tokens."""

    requests: int = 0
    errors: int = 0
    nonfinite: int = 0
    empty: int = 0
    accepted: int = 0
    rejected: int = 0
    tokens: int = 0
    first_token: Grouped = field(default_factory=Grouped)
    per_token: Grouped = field(default_factory=Grouped)
    length: Grouped = field(default_factory=Grouped)
    repetition: Grouped = field(default_factory=Grouped)

    def take(self, seen: Observation) -> None:
        """Takes a request. The first ones after a load say nothing about how fast the revision is."""
        self.requests += 1
        if not seen.ok:
            self.errors += 1
            self.nonfinite += seen.error_reason == NON_FINITE
            return
        self.empty += seen.output_tokens == 0
        self.tokens += seen.output_tokens
        self.length.add(math.log1p(seen.output_tokens), seen.bucket)
        self.repetition.add(seen.repetition, seen.bucket)
        if not seen.cold and seen.first_token_ms > 0:
            self.first_token.add(math.log(seen.first_token_ms), seen.bucket)
        if not seen.cold and seen.per_token_ms > 0:
            self.per_token.add(math.log(seen.per_token_ms), seen.bucket)

    @property
    def answered(self) -> int:
        """Requests that ended well."""
        return self.requests - self.errors

    def failures(self, kind: str) -> Failures:
        """Returns how many failed in the way of `kind`: `errors`, `empty` or `rejected`."""
        if kind == "errors":
            return Failures(self.errors, self.requests)
        if kind == "empty":
            return Failures(self.empty, self.answered)
        return Failures(self.rejected, self.accepted + self.rejected)

    def merged(self, other: "ArmStats") -> "ArmStats":
        """Returns the sums of both."""
        result = ArmStats()
        for item in fields(ArmStats):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Grouped):
                into = getattr(result, item.name)
                into.merge(mine)
                into.merge(theirs)
            else:
                setattr(result, item.name, mine + theirs)
        return result


NOTHING = ArmStats()


@dataclass(frozen=True, slots=True)
class StepStats:
    """What was seen in one step; nobody changes it."""

    arms: dict[Arm, ArmStats] = field(default_factory=dict)

    def arm(self, name: Arm) -> ArmStats:
        """Returns an arm; one that nothing was seen of is empty."""
        return self.arms.get(name, NOTHING)

    def baseline(self, kind: str) -> Failures:
        """Returns the failures of everything that the old revision answered meanwhile, warm or not."""
        control, old = self.arm("control").failures(kind), self.arm("old").failures(kind)
        return Failures(control.failed + old.failed, control.total + old.total)


def to_json(stats: ArmStats) -> dict[str, Any]:
    """Returns the sums as JSON values."""
    return {item.name: _value_json(getattr(stats, item.name)) for item in fields(ArmStats)}


def _value_json(value: Any) -> Any:
    if not isinstance(value, Grouped):
        return value
    moments = value.moments
    return [[moments.count, moments.mean, moments.squares], value.counts, value.sums]


def from_json(values: dict[str, Any]) -> ArmStats:
    """Returns what `to_json` wrote."""
    stats = ArmStats()
    for name, value in values.items():
        setattr(stats, name, Grouped(Moments(*value[0]), *value[1:]) if isinstance(value, list) else value)
    return stats
