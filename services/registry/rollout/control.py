"""What a person may do to a rollout. Pure."""

from enum import StrEnum

from services.registry.rollout import machine
from services.registry.rollout.machine import Evidence, Move, Position
from services.registry.rollout.settings import Settings
from services.registry.rollout.states import IllegalMove, State
from services.shared.errors import LoraportError

MAX_REASON = 512


class Action(StrEnum):
    """What may be asked for."""

    PAUSE = "PAUSE"
    RESUME = "RESUME"
    ADVANCE = "ADVANCE"
    ROLLBACK = "ROLLBACK"
    ABORT = "ABORT"


# What skips or ends something needs to say why.
_NEEDS_REASON = frozenset({Action.ADVANCE, Action.ROLLBACK, Action.ABORT})
_DONE = {Action.PAUSE: State.PAUSED, Action.ROLLBACK: State.ROLLED_BACK, Action.ABORT: State.ABORTED}


def control(
    position: Position, settings: Settings, evidence: Evidence, action: Action, *, reason: str, now_us: int
) -> Move | None:
    """Returns the move that was asked for, None when the rollout is there already.

    Raises:
        LoraportError: INVALID_REQUEST without a reason where one is needed, INVALID_STATE, or QUORUM_MISSING: to go on
            without the new revision being there would make the first conversations wait for it.
    """
    fewest = 1 if action in _NEEDS_REASON else 0
    if not fewest <= len(reason) <= MAX_REASON:
        raise LoraportError(
            "INVALID_REQUEST", f"reason must have {fewest} to {MAX_REASON} characters", subject="reason"
        )
    if position.state is _DONE.get(action):
        return None
    if action is Action.RESUME and position.state is not State.PAUSED and not position.ended:
        return None
    why = printable(reason) or "by hand"
    try:
        match action:
            case Action.PAUSE:
                return machine.hold(position, "BY_HAND", why, now_us=now_us)
            case Action.RESUME:
                return machine.resume(position, why, now_us=now_us)
            case Action.ADVANCE:
                return _advance(position, settings, evidence, why, now_us=now_us)
            case Action.ROLLBACK:
                return machine.roll_back(position, why, now_us=now_us)
            case Action.ABORT:
                return machine.abort(position, why, now_us=now_us)
    except IllegalMove as error:
        raise LoraportError("INVALID_STATE", str(error), metadata={"state": position.state}) from None


def printable(text: str) -> str:
    """Returns text for a story: one line, nothing in it that a terminal or a database would stumble over."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _advance(position: Position, settings: Settings, evidence: Evidence, why: str, *, now_us: int) -> Move:
    if position.at is State.PRELOADING and not machine.has_quorum(settings, evidence):
        raise LoraportError("QUORUM_MISSING", machine.quorum_sentence(settings, evidence))
    return machine.forward(position, settings, f"advanced by hand: {why}", now_us=now_us)
