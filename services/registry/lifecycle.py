"""The life of a revision, as one table.

    PENDING      announced by a signed manifest; the bytes are awaited
    VERIFIED     the loader proved that the stored bytes are the manifest's and obey every rule
    ACTIVE       an admin approved it and the registry signed its record: it may serve
    QUARANTINED  a check failed, a key behind it is believed no longer, or the announcement was overtaken by a newer one
                 of the same content
    REVOKED      out of service for ever

Events move it. VERIFY and REFUSE come from the loader, APPROVE and REVOKE from an admin, SUPERSEDE from a publisher
who announces the same content again under a higher version. DISTRUST and WITHDRAW follow from a key that is revoked
since some place in the log: of a publisher or loader, so that the announcement or verification is worth nothing; or of
the registry itself, so that only its record is, and an approval makes a new one. A pair that is not in the table is an
error, never a silent no-op; that a repeated event is harmless is said by an entry that stays in its state, so it is
said on purpose.

Two absences carry weight. VERIFIED and ACTIVE have no REFUSE: a session holder who uploads other bytes after the
right ones were verified cannot take a revision down. REVOKED leads nowhere but to itself.
"""

from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    """Where a revision is in its life."""

    PENDING = "PENDING"
    VERIFIED = "VERIFIED"
    ACTIVE = "ACTIVE"
    QUARANTINED = "QUARANTINED"
    REVOKED = "REVOKED"


class Event(StrEnum):
    """What happens to a revision."""

    VERIFY = "VERIFY"
    REFUSE = "REFUSE"
    APPROVE = "APPROVE"
    REVOKE = "REVOKE"
    SUPERSEDE = "SUPERSEDE"
    DISTRUST = "DISTRUST"
    WITHDRAW = "WITHDRAW"


INITIAL = State.PENDING

TABLE = MappingProxyType(
    {
        (State.PENDING, Event.VERIFY): State.VERIFIED,
        (State.PENDING, Event.REFUSE): State.QUARANTINED,
        (State.PENDING, Event.SUPERSEDE): State.QUARANTINED,
        (State.PENDING, Event.REVOKE): State.REVOKED,
        (State.VERIFIED, Event.VERIFY): State.VERIFIED,
        (State.VERIFIED, Event.APPROVE): State.ACTIVE,
        (State.VERIFIED, Event.REVOKE): State.REVOKED,
        # The loader may repeat its word after an approval that it did not hear of.
        (State.ACTIVE, Event.VERIFY): State.ACTIVE,
        (State.ACTIVE, Event.APPROVE): State.ACTIVE,
        (State.ACTIVE, Event.REVOKE): State.REVOKED,
        (State.QUARANTINED, Event.REFUSE): State.QUARANTINED,
        (State.QUARANTINED, Event.SUPERSEDE): State.QUARANTINED,
        (State.QUARANTINED, Event.REVOKE): State.REVOKED,
        (State.REVOKED, Event.REVOKE): State.REVOKED,
        (State.PENDING, Event.DISTRUST): State.QUARANTINED,
        (State.VERIFIED, Event.DISTRUST): State.QUARANTINED,
        (State.ACTIVE, Event.DISTRUST): State.QUARANTINED,
        (State.QUARANTINED, Event.DISTRUST): State.QUARANTINED,
        (State.ACTIVE, Event.WITHDRAW): State.VERIFIED,
    }
)


class IllegalMove(ValueError):
    """An event that the state does not allow."""

    def __init__(self, state: State, event: Event) -> None:
        self.state = state
        self.event = event
        super().__init__(f"a {state} revision cannot take {event}")


def after(state: State, event: Event) -> State:
    """Returns the state after `event`.

    Raises:
        IllegalMove: the table has no such pair.
    """
    try:
        return TABLE[state, event]
    except KeyError:
        raise IllegalMove(state, event) from None
