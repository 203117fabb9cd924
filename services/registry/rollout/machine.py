"""What a rollout does next. Pure: position, settings, evidence and the time go in, at most one move comes out.

Every move is written by itself, in one transaction with its leaf of the log, its audit event and its line of the story.
Whoever asks again after a crash gets the same answer from what was written, so there is nothing to resume.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from services.registry.rollout.arms import StepStats
from services.registry.rollout.judge import Verdict, exhausted, judge, judge_shadow
from services.registry.rollout.settings import WHOLE, Settings
from services.registry.rollout.states import ENDED, TABLE, Event, State, after
from services.shared.errors import REASONS, Code
from services.shared.split import SHADOW_STEP

Pointing = Literal["", "old", "new"]

_PASSING = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.ABORTED})
# What holds for want of evidence goes on by itself once the evidence is there.
_WAITING = frozenset({"QUORUM_MISSING", "PROBE_MISSING", "PIN_BUDGET"})
# An executor that goes away says who was on board, not who it was: once is an accident, twice is a revision.
MAX_LOSSES = 2
LOST = "EXECUTOR_LOST"
NOBODY_WAITS = "nobody waits any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rollout is. `held` and `hold_reason` are of a PAUSED one; `entered_us` is when state or step began."""

    state: State
    step: int = 0
    held: State | None = None
    hold_reason: str = ""
    waived: frozenset[str] = frozenset()
    entered_us: int

    @property
    def ended(self) -> bool:
        """Whether nothing follows."""
        return self.state in ENDED

    @property
    def at(self) -> State:
        """The state, or the one in which it is held."""
        return self.held if self.state is State.PAUSED and self.held is not None else self.state

    def share(self, settings: Settings) -> int:
        """Returns the new revision's share in parts of ten thousand; nothing while it is suspected of having taken an
        executor down."""
        if self.hold_reason == LOST:
            return 0
        if self.at is State.SPLITTING:
            return settings.steps[self.step]
        return WHOLE if self.at is State.RETAINING else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The newest result of probing an executor; with a `failure` the numbers mean nothing."""

    mean_difference: float = 0.0
    max_difference: float = 0.0
    nonfinite: bool = False
    perplexity_ratio: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """The newest word on an executor."""

    name: str
    ready: bool = False
    failure: str = ""
    probe: Probe | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What routers reported. `steps` maps a step's index to what was seen in it; `serving` is the newest fleet; `lost`
    names executors that went away while they had work of the new revision, once for each time."""

    executors: tuple[Executor, ...] = ()
    serving: frozenset[str] = frozenset()
    steps: Mapping[int, StepStats] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    def so_far(self, step: int) -> Sequence[StepStats]:
        """Returns the steps up to one, in order."""
        return [self.steps.get(index, StepStats()) for index in range(step + 1)]

    def needed(self, settings: Settings) -> int:
        """Returns how many executors make the quorum; at least one."""
        return settings.quorum or max(1, len(self.serving))

    @property
    def ready(self) -> tuple[Executor, ...]:
        """Executors that serve and have the new revision."""
        return tuple(item for item in self.present if item.ready)

    @property
    def present(self) -> tuple[Executor, ...]:
        """Executors that serve; what is known of the others says nothing about the fleet as it is."""
        return tuple(item for item in self.executors if item.name in self.serving)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What to write: the new position and why. `pointing` says where the alias goes, `forget` that what was seen in the
    present step no longer counts."""

    event: Event
    position: Position
    sentence: str
    pointing: Pointing = ""
    forget: bool = False


def verdict_on(position: Position, settings: Settings, evidence: Evidence) -> Verdict | None:
    """Returns what the judge says of where a rollout is; None where there is nothing to judge."""
    if position.at is State.SHADOWING:
        return judge_shadow(evidence.steps.get(SHADOW_STEP, StepStats()), gates=settings.gates)
    if position.at in (State.SPLITTING, State.RETAINING):
        return judge(
            evidence.so_far(position.step),
            share=position.share(settings),
            settings=settings,
            shift_accepted="LENGTH_SHIFT" in position.waived,
        )
    return None


def decide(position: Position, settings: Settings, evidence: Evidence, *, now_us: int) -> Move | None:
    """Returns the next move that follows from evidence and time, None when there is none yet."""
    if position.ended:
        return None
    if 0 < settings.until_us <= now_us and position.at is not State.RETAINING:
        # Whoever waited may have gone with the process that waited for it: what is known now comes too late.
        return abort(position, NOBODY_WAITS, now_us=now_us)
    verdict = verdict_on(position, settings, evidence)
    if verdict is not None and verdict.word == "FAIL":
        return roll_back(position, verdict.sentence, now_us=now_us)
    if len(evidence.lost) >= MAX_LOSSES:
        return roll_back(position, _lost_sentence(evidence), now_us=now_us)
    if evidence.lost and LOST not in position.waived and (position.state, Event.HOLD) in TABLE:
        # What is tried again begins with the first share: as few as possible meet it.
        return hold(replace(position, step=0), LOST, _lost_sentence(evidence), now_us=now_us)
    if position.state is State.PAUSED:
        return _unhold(position, settings, evidence, now_us=now_us)
    waited_s = (now_us - position.entered_us) / 1e6
    match position.state:
        case State.PRELOADING:
            return _preloading(position, settings, evidence, waited_s, now_us)
        case State.PROBING:
            return _probing(position, settings, evidence, waited_s, now_us)
        case State.SHADOWING if waited_s >= settings.gates.shadow_s:
            copies = evidence.steps.get(SHADOW_STEP, StepStats()).arm("new").requests
            return forward(position, settings, f"the shadow saw nothing wrong in {copies} copies", now_us=now_us)
        case State.SPLITTING if verdict is not None:
            return _splitting(position, settings, evidence, verdict, waited_s, now_us)
        case State.RETAINING if waited_s >= settings.retention_s:
            return forward(position, settings, "the retention is over; the old revision is released", now_us=now_us)
    return None


def forward(position: Position, settings: Settings, why: str, *, now_us: int) -> Move:
    """Returns the step ahead from where a rollout is, or is held."""
    state, step = position.at, position.step
    if state is State.PRELOADING and settings.probes:
        event = Event.PROBE
    elif state in (State.PRELOADING, State.PROBING) and settings.shadow:
        event = Event.SHADOW
    elif state in (State.PRELOADING, State.PROBING, State.SHADOWING):
        event = Event.SPLIT
    elif state is State.SPLITTING:
        event = Event.FLIP if step + 1 == len(settings.steps) else Event.STEP
    else:
        event = Event.FINISH
    to = replace(_cleared(position), state=after(state, event), entered_us=now_us)
    if event is Event.STEP:
        to = replace(to, step=step + 1)
    pointing: Pointing = "new" if event is Event.FLIP else ""
    return Move(event=event, position=to, sentence=f"{_headline(to, settings)}: {why}", pointing=pointing)


def hold(position: Position, reason: str, why: str, *, now_us: int) -> Move:
    """Returns the move to PAUSED. Raises IllegalMove where a rollout cannot be held."""
    to = after(position.state, Event.HOLD)
    held = replace(position, state=to, held=position.state, hold_reason=reason, entered_us=now_us)
    return Move(event=Event.HOLD, position=held, sentence=f"held ({reason}): {why}")


def resume(position: Position, why: str, *, now_us: int) -> Move:
    """Returns the move out of PAUSED; what was too little to decide by is not counted again, what a person has looked
    at is not asked again. Raises IllegalMove."""
    state = after(position.state, Event.RESUME, held=position.held)
    known = _cleared(position)
    waived = known.waived | ({"LENGTH_SHIFT"} if position.hold_reason == "LENGTH_SHIFT" else set())
    to = replace(known, state=state, waived=waived, entered_us=now_us)
    forget = position.hold_reason == "INCONCLUSIVE"
    return Move(event=Event.RESUME, position=to, sentence=f"goes on: {why}", forget=forget)


def roll_back(position: Position, why: str, *, now_us: int) -> Move:
    """Returns the move back to the old revision. Raises IllegalMove."""
    to = replace(_cleared(position), state=after(position.state, Event.ROLLBACK), entered_us=now_us)
    # Before the alias has moved there is nothing to point back; the share goes to zero with the state.
    pointing: Pointing = "old" if position.at is State.RETAINING else ""
    return Move(event=Event.ROLLBACK, position=to, sentence=f"rolled back: {why}", pointing=pointing)


def abort(position: Position, why: str, *, now_us: int) -> Move:
    """Returns the move that calls a rollout off. Raises IllegalMove."""
    to = replace(_cleared(position), state=after(position.state, Event.ABORT), entered_us=now_us)
    return Move(event=Event.ABORT, position=to, sentence=f"called off: {why}")


def lose(position: Position, which: Pointing, why: str, *, now_us: int) -> Move:
    """Returns the move when a revision goes out of service at once: the rollout ends first."""
    if which == "new":
        return roll_back(position, why, now_us=now_us)
    if position.at is State.RETAINING:
        to = replace(_cleared(position), state=after(position.state, Event.FINISH), entered_us=now_us)
        return Move(event=Event.FINISH, position=to, sentence=f"there is nothing to go back to: {why}")
    return abort(position, why, now_us=now_us)


def quorum_sentence(settings: Settings, evidence: Evidence) -> str:
    """Returns how far the quorum is."""
    return f"{len(evidence.ready)} of {evidence.needed(settings)} executors have the new revision READY"


def has_quorum(settings: Settings, evidence: Evidence) -> bool:
    """Says whether enough executors have the new revision."""
    return len(evidence.ready) >= evidence.needed(settings)


def _preloading(
    position: Position, settings: Settings, evidence: Evidence, waited_s: float, now_us: int
) -> Move | None:
    if has_quorum(settings, evidence):
        return forward(position, settings, quorum_sentence(settings, evidence), now_us=now_us)
    failures = [item for item in evidence.present if item.failure and not item.ready]
    no_room = [item for item in failures if _code(item.failure) is Code.RESOURCE_EXHAUSTED]
    broken = [item for item in failures if item not in no_room and _code(item.failure) not in _PASSING]
    if len(broken) >= min(2, max(1, len(evidence.serving))):
        why = ", ".join(f"{item.failure} on {item.name}" for item in broken)
        return roll_back(position, f"the new revision cannot be loaded: {why}", now_us=now_us)
    if no_room:
        why = ", ".join(f"{item.failure} on {item.name}" for item in no_room)
        return hold(position, "PIN_BUDGET", f"no room beside the old revision: {why}", now_us=now_us)
    if waited_s >= settings.gates.preload_timeout_s:
        return hold(position, "QUORUM_MISSING", quorum_sentence(settings, evidence), now_us=now_us)
    return None


def _probing(position: Position, settings: Settings, evidence: Evidence, waited_s: float, now_us: int) -> Move | None:
    passed: list[Probe] = []
    for item in evidence.executors:
        if item.probe is None:
            continue
        fault = probe_fault(item.probe, settings)
        if fault:
            return roll_back(position, f"the probe failed on {item.name}: {fault}", now_us=now_us)
        # A bad number is the revision's fault wherever it was seen; a good one is of the executor alone.
        if not item.probe.failure and item.name in evidence.serving:
            passed.append(item.probe)
    needed = evidence.needed(settings)
    if len(passed) >= needed:
        why = f"the probe passed on {len(passed)} executors"
        if settings.golden:
            mean, most = max(item.mean_difference for item in passed), max(item.max_difference for item in passed)
            why += f", log-probabilities within {mean:.2g} on average and {most:.2g} at most"
        if settings.evals:
            why += f", perplexity times {max(item.perplexity_ratio or 0.0 for item in passed):.3f}"
        return forward(position, settings, why, now_us=now_us)
    if waited_s >= settings.gates.preload_timeout_s:
        return hold(position, "PROBE_MISSING", f"{len(passed)} of {needed} executors were probed", now_us=now_us)
    return None


def probe_fault(probe: Probe, settings: Settings) -> str:
    """Returns what is wrong with a probe, empty when nothing is, or when it could not be made for now."""
    gates = settings.gates
    if probe.failure:
        passing = _code(probe.failure) in _PASSING or _code(probe.failure) is Code.RESOURCE_EXHAUSTED
        return "" if passing else probe.failure
    numbers = (probe.mean_difference, probe.max_difference, probe.perplexity_ratio or 0.0)
    if probe.nonfinite or not all(map(math.isfinite, numbers)):
        return "NaN or infinite log-probabilities"
    for value, most, what in (
        (probe.mean_difference, gates.max_mean_difference, "mean difference of log-probabilities"),
        (probe.max_difference, gates.max_difference, "largest difference of log-probabilities"),
        (probe.perplexity_ratio or 0.0, gates.max_perplexity_ratio, "perplexity by the old revision's"),
    ):
        if value > most:
            return f"{what} {value:.3g} is above {most:g}"
    return ""


def _splitting(
    position: Position, settings: Settings, evidence: Evidence, verdict: Verdict, waited_s: float, now_us: int
) -> Move | None:
    if waited_s < settings.min_step_s:
        return None
    if verdict.word == "PASS":
        return forward(position, settings, verdict.sentence, now_us=now_us)
    if verdict.word == "HOLD":
        return hold(position, "LENGTH_SHIFT", verdict.sentence, now_us=now_us)
    present = evidence.steps.get(position.step, StepStats())
    if exhausted(present, share=position.share(settings), gates=settings.gates):
        return hold(position, "INCONCLUSIVE", verdict.sentence, now_us=now_us)
    return None


def _unhold(position: Position, settings: Settings, evidence: Evidence, *, now_us: int) -> Move | None:
    if position.hold_reason == LOST:
        return _try_again(position, settings, evidence, now_us=now_us)
    if position.hold_reason not in _WAITING:
        return None
    waived = position.waived | {LOST}  # what was lost meanwhile is asked about once it goes on
    going = replace(_cleared(position), state=position.at, waived=waived)
    there = decide(going, settings, evidence, now_us=position.entered_us)
    if there is None or there.event is Event.HOLD:
        return None
    if there.event is Event.ROLLBACK:
        return roll_back(position, there.sentence.removeprefix("rolled back: "), now_us=now_us)
    return resume(position, there.sentence, now_us=now_us)


def _try_again(position: Position, settings: Settings, evidence: Evidence, *, now_us: int) -> Move | None:
    """What was lost must be back with the new revision, or not come back for as long as a quorum is waited for."""
    waited_s = (now_us - position.entered_us) / 1e6
    back = set(evidence.lost) <= {item.name for item in evidence.ready}
    if waited_s < settings.min_step_s or not has_quorum(settings, evidence):
        return None
    if not back and waited_s < settings.gates.preload_timeout_s:
        return None
    return resume(position, "once is an accident; tried again with the first share", now_us=now_us)


def _lost_sentence(evidence: Evidence) -> str:
    count = len(evidence.lost)
    names = ", ".join(sorted(evidence.lost))
    return f"{f'{count} times an' if count > 1 else 'an'} executor went away with work of the new revision: {names}"


def _cleared(position: Position) -> Position:
    waived = position.waived | ({LOST} if position.hold_reason == LOST else set())
    return replace(position, held=None, hold_reason="", waived=waived)


def _headline(to: Position, settings: Settings) -> str:
    match to.state:
        case State.PROBING:
            return "the golden prompts are probed"
        case State.SHADOWING:
            return f"{settings.shadow / 100:g} % of the requests are shadowed"
        case State.SPLITTING:
            return f"{settings.steps[to.step] / 100:g} % of the conversations get the new revision"
        case State.RETAINING:
            return "the alias points to the new revision"
        case _:
            return "done"


def _code(reason: str) -> Code | None:
    return REASONS[reason][0] if reason in REASONS else None
