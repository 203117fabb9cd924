"""The chain of audit events notices every change."""

from dataclasses import replace

import pytest

from loraport.log.events import FIRST, Chain, Event, event_hash, verify_chain


def chain(count: int) -> list[tuple[Event, bytes]]:
    events, last = [], FIRST
    for sequence in range(1, count + 1):
        event = Event(
            sequence=sequence, time_us=sequence * 10, principal="p", method="/m", resource="tenants/acme",
            decision="allowed", reason="", request_id=f"r{sequence}",
        )  # fmt: skip
        last = event_hash(last, event)
        events.append((event, last))
    return events


def test_a_whole_chain_is_good() -> None:
    events = chain(5)
    assert verify_chain(events) == Chain(5, events[-1][1])
    assert verify_chain([]) == Chain(0, FIRST)
    assert not verify_chain(events, seen=(3, events[2][1])).fault


@pytest.mark.parametrize(
    "changes",
    [
        {"time_us": 1}, {"principal": "q"}, {"method": ""}, {"resource": ""}, {"decision": "refused"},
        {"reason": "x"}, {"request_id": ""},
    ],
)  # fmt: skip
def test_every_field_is_covered(changes: dict) -> None:
    events = chain(5)
    events[2] = (replace(events[2][0], **changes), events[2][1])
    assert verify_chain(events) == Chain(2, events[1][1], "event 3 or its hash was changed")


def test_dropped_moved_rewritten_and_cut_events_are_noticed() -> None:
    events = chain(5)
    assert "event 3 is missing" in verify_chain(events[:2] + events[3:]).fault
    assert "event 1 is missing" in verify_chain(events[1:]).fault
    assert verify_chain([events[1], events[0], *events[2:]]).fault
    assert verify_chain([*events[:3], (events[3][0], b"\0" * 32), events[4]]).count == 3
    # A chain that was made anew is good by itself, and not what was seen before.
    anew, last = [], FIRST
    for event, _ in events:
        last = event_hash(last, replace(event, principal="q"))
        anew.append((replace(event, principal="q"), last))
    assert not verify_chain(anew).fault
    assert "accepted before" in verify_chain(anew, seen=(4, events[3][1])).fault
    assert verify_chain(events[:3], seen=(5, events[4][1])).fault == "there were 5 events and there are 3"
    # The same for what the log names.
    assert not verify_chain(events, anchors={2: events[1][1], 5: events[4][1]}).fault
    assert verify_chain(anew, anchors={4: events[3][1]}).fault == "event 4 is not the one that the log names"
    assert verify_chain(events[:3], anchors={2: events[1][1], 4: events[3][1]}).fault == (
        "the log names event 4 and there are 3"
    )
