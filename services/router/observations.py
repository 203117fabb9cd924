"""What is told to the registry about the requests of rollouts: collected, cut into batches, kept until taken. Pure.

    ended requests, clients' verdicts ──> Outbox of a rollout ──> batch 1, 2, 3 … ──> reported; dropped once taken

Bounded: an outbox that is full drops the newest and counts them. A rollout that has ended has no outbox.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.router.rollout_split import Side
from services.shared.split import Arm, Observation

# Of one rollout, at one time; a report holds at most 10,000.
MAX_KEPT, MAX_BATCH = 20_000, 5_000
GRAM, LEAST_GRAMS_OF = 4, 8
# Answers that a client may still say something about: so many, so long.
MAX_ANSWERS, ANSWER_LIFE_S = 50_000, 3600.0


@dataclass(frozen=True, slots=True)
class Batch:
    """A report that has been numbered. `outcomes` counts (arm, accepted)."""

    sequence: int
    step: int
    observations: tuple[Observation, ...]
    outcomes: dict[tuple[Arm, bool], int]


@dataclass(slots=True)
class _Open:
    observations: list[Observation] = field(default_factory=list)
    outcomes: Counter[tuple[Arm, bool]] = field(default_factory=Counter)


class Outbox:
    """What is to be told about one rollout."""

    def __init__(self) -> None:
        self.dropped = 0
        self._kept = 0
        self._open: dict[int, _Open] = {}
        self._batches: deque[Batch] = deque()
        self._sequence = 0

    def add(self, step: int, observation: Observation) -> None:
        """Takes an ended request."""
        if self._kept >= MAX_KEPT:
            self.dropped += 1
            return
        self._kept += 1
        self._open.setdefault(step, _Open()).observations.append(observation)

    def outcome(self, step: int, arm: Arm, *, accepted: bool) -> None:
        """Takes a client's verdict."""
        self._open.setdefault(step, _Open()).outcomes[arm, accepted] += 1

    def next(self) -> Batch | None:
        """Returns what is to be reported next, the same until it was taken; None when there is nothing."""
        if not self._batches and self._open:
            step = min(self._open)
            part = self._open[step]
            now, part.observations = part.observations[:MAX_BATCH], part.observations[MAX_BATCH:]
            if not part.observations:
                del self._open[step]
            outcomes, part.outcomes = dict(part.outcomes), Counter()
            self._sequence += 1
            self._batches.append(Batch(self._sequence, step, tuple(now), outcomes))
        return self._batches[0] if self._batches else None

    def taken(self, sequence: int) -> None:
        """Drops what the registry has taken."""
        while self._batches and self._batches[0].sequence <= sequence:
            self._kept -= len(self._batches.popleft().observations)


class Outboxes:
    """The outboxes of the rollouts that run."""

    def __init__(self) -> None:
        self._outboxes: dict[str, Outbox] = {}

    def of(self, rollout: str) -> Outbox:
        """Returns a rollout's outbox."""
        return self._outboxes.setdefault(rollout, Outbox())

    def running(self, rollouts: Iterable[str]) -> dict[str, Outbox]:
        """Drops those of rollouts that do not run, and returns the others as they are now: while they are told, a
        request of another rollout may end."""
        names = set(rollouts)
        self._outboxes = {name: box for name, box in self._outboxes.items() if name in names}
        return dict(self._outboxes)


class AnswersGiven:
    """The answers of late, by tenant and request id, and which side of a rollout made them; None for no rollout."""

    def __init__(self, *, most: int = MAX_ANSWERS, life_s: float = ANSWER_LIFE_S) -> None:
        self._most = most
        self._life_s = life_s
        self._answers: OrderedDict[tuple[str, str], tuple[float, Side | None, bool]] = OrderedDict()

    def given(self, tenant: str, request_id: str, side: Side | None, *, now: float) -> None:
        """Remembers an answer. Of two under one id, the later counts."""
        self._answers.pop((tenant, request_id), None)
        self._answers[tenant, request_id] = (now, side, False)
        while len(self._answers) > self._most or next(iter(self._answers.values()))[0] < now - self._life_s:
            self._answers.popitem(last=False)

    def judged(self, tenant: str, request_id: str, *, now: float) -> tuple[bool, Side | None]:
        """Returns whether there is such an answer, and its side if this is the first word on it."""
        found = self._answers.get((tenant, request_id))
        if found is None or found[0] < now - self._life_s:
            return False, None
        at, side, said = found
        self._answers[tenant, request_id] = (at, side, True)
        return True, None if said else side


def repetition(token_ids: Sequence[int]) -> float:
    """Returns the share of an answer's four-token sequences that occurred before in it; 0 for a short one."""
    if len(token_ids) < LEAST_GRAMS_OF:
        return 0.0
    grams = [tuple(token_ids[i : i + GRAM]) for i in range(len(token_ids) - GRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams)
