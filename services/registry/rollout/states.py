"""The life of a rollout, as one table.

    PRELOADING   executors bring the new revision beside the old one; waits for the quorum, by digest
    PROBING      golden prompts are computed on the executors and on a reference path, and compared
    SHADOWING    copies of requests go to the new revision, their answers are dropped
    SPLITTING    a share of the conversations is answered by the new revision, step by step
    PAUSED       held in one of the states above, by hand or for want of evidence; the share stays, the gates watch on
    RETAINING    the alias points to the new revision; the old one is still on the devices
    SUCCEEDED    the end: the old revision is not held any longer
    ROLLED_BACK  the end: a gate or a person decided against the new revision; the alias points to the old one
    ABORTED      the end: called off before the alias had moved

The alias moves in two places and nowhere else: FLIP points it to the new revision, and what leads from RETAINING to
ROLLED_BACK points it back. So whoever stops at any step, at any moment, leaves the alias at a revision that serves.
A pair that is not in the table is an error, never a silent no-op. RESUME leads back to where the rollout was held.
"""

from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    """Where a rollout is."""

    PRELOADING = "PRELOADING"
    PROBING = "PROBING"
    SHADOWING = "SHADOWING"
    SPLITTING = "SPLITTING"
    PAUSED = "PAUSED"
    RETAINING = "RETAINING"
    SUCCEEDED = "SUCCEEDED"
    ROLLED_BACK = "ROLLED_BACK"
    ABORTED = "ABORTED"


class Event(StrEnum):
    """What happens to a rollout."""

    PROBE = "PROBE"  # the quorum is there
    SHADOW = "SHADOW"  # what was to be probed has passed
    SPLIT = "SPLIT"  # the first share begins
    STEP = "STEP"  # the next share begins
    FLIP = "FLIP"  # the last share has passed: the alias moves
    FINISH = "FINISH"  # the retention is over
    HOLD = "HOLD"
    RESUME = "RESUME"
    ROLLBACK = "ROLLBACK"  # by a gate or by hand
    ABORT = "ABORT"


INITIAL = State.PRELOADING
ENDED = frozenset({State.SUCCEEDED, State.ROLLED_BACK, State.ABORTED})

_S, _E = State, Event
TABLE = MappingProxyType(
    {
        (_S.PRELOADING, _E.PROBE): _S.PROBING,
        # Without prompts, or after the probe, a shadow may be left out.
        (_S.PRELOADING, _E.SHADOW): _S.SHADOWING,
        (_S.PRELOADING, _E.SPLIT): _S.SPLITTING,
        (_S.PROBING, _E.SHADOW): _S.SHADOWING,
        (_S.PROBING, _E.SPLIT): _S.SPLITTING,
        (_S.SHADOWING, _E.SPLIT): _S.SPLITTING,
        (_S.SPLITTING, _E.STEP): _S.SPLITTING,
        (_S.SPLITTING, _E.FLIP): _S.RETAINING,
        (_S.RETAINING, _E.FINISH): _S.SUCCEEDED,
        **{(state, _E.HOLD): _S.PAUSED for state in (_S.PRELOADING, _S.PROBING, _S.SHADOWING, _S.SPLITTING)},
        **{
            (state, _E.ROLLBACK): _S.ROLLED_BACK
            for state in (_S.PRELOADING, _S.PROBING, _S.SHADOWING, _S.SPLITTING, _S.PAUSED, _S.RETAINING)
        },
        **{
            (state, _E.ABORT): _S.ABORTED
            for state in (_S.PRELOADING, _S.PROBING, _S.SHADOWING, _S.SPLITTING, _S.PAUSED)
        },
    }
)


class IllegalMove(ValueError):
    """An event that the state does not allow."""

    def __init__(self, state: State, event: Event) -> None:
        self.state = state
        self.event = event
        super().__init__(f"a rollout that is {state} cannot take {event}")


def after(state: State, event: Event, *, held: State | None = None) -> State:
    """Returns the state after `event`; `held` is the state in which a PAUSED rollout was held.

    Raises:
        IllegalMove: the table has no such pair.
    """
    if (state, event) == (State.PAUSED, Event.RESUME) and held is not None:
        return held
    try:
        return TABLE[state, event]
    except KeyError:
        raise IllegalMove(state, event) from None
