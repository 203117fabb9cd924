"""Laws of a revision's life, under every sequence of events."""

from hypothesis import given
from hypothesis import strategies as st

from services.registry.lifecycle import INITIAL, TABLE, Event, IllegalMove, State, after

EVENTS = st.lists(st.sampled_from(Event), max_size=12)


def walk(events: list[Event]) -> list[State]:
    """The states that a sequence of events leads through; illegal events are refused and change nothing."""
    states = [INITIAL]
    for event in events:
        try:
            states.append(after(states[-1], event))
        except IllegalMove:
            states.append(states[-1])
    return states


@given(EVENTS)
def test_revoked_is_final(events: list[Event]) -> None:
    states = walk(events)
    if State.REVOKED in states:
        assert set(states[states.index(State.REVOKED) :]) == {State.REVOKED}


@given(EVENTS)
def test_nothing_serves_that_was_not_verified_and_then_approved(events: list[Event]) -> None:
    states = walk(events)
    if State.ACTIVE in states:
        first = states.index(State.ACTIVE)
        assert states[first - 1] == State.VERIFIED
        assert events[first - 1] == Event.APPROVE
        assert Event.VERIFY in events[: first - 1]


@given(EVENTS)
def test_quarantine_leads_to_revocation_only(events: list[Event]) -> None:
    states = walk(events)
    if State.QUARANTINED in states:
        assert set(states[states.index(State.QUARANTINED) :]) <= {State.QUARANTINED, State.REVOKED}


@given(EVENTS, st.sampled_from((Event.REFUSE, Event.SUPERSEDE)))
def test_what_was_verified_is_taken_down_by_revocation_alone(events: list[Event], event: Event) -> None:
    state = walk(events)[-1]
    if state in (State.VERIFIED, State.ACTIVE):
        assert (state, event) not in TABLE


@given(EVENTS)
def test_revocation_is_always_possible(events: list[Event]) -> None:
    assert after(walk(events)[-1], Event.REVOKE) == State.REVOKED


@given(EVENTS, st.sampled_from(Event))
def test_an_event_repeated_at_once_changes_nothing_more(events: list[Event], event: Event) -> None:
    states = walk([*events, event, event])
    if event is not Event.SUPERSEDE:
        assert states[-1] == states[-2]


def test_every_state_can_be_reached() -> None:
    reached = {INITIAL}
    for _ in State:
        reached |= {to for (state, _), to in TABLE.items() if state in reached}
    assert reached == set(State)
