"""The chain of audit events: every hash covers the one before, so no event can be changed, dropped or moved. Pure.

    hash(n) = SHA-256(hash(n - 1) || canonical JSON of event n), 32 zero bytes before the first one

The chain alone does not notice that its newest events were cut off. So whoever verifies keeps the last hash it has
seen, and the registry's log names an event now and then (`anchor_of`).
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from loraport.bundle.canonical import canonical
from loraport.bundle.digest import parse_digest
from loraport.log.leaf import Kind, Leaf

SCHEMA = "loraport.audit-event.v1"
FIRST = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What an event says. `time_us` is microseconds since the Unix epoch; sequences are 1, 2, 3, …"""

    sequence: int
    time_us: int
    principal: str
    method: str
    resource: str
    decision: str
    reason: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Chain:
    """What is left of a chain: the number of good events, the last good hash, and what is wrong with the next one."""

    count: int
    last: bytes
    fault: str = ""


def event_hash(previous: bytes, event: Event) -> bytes:
    """Returns the hash of an event; `previous` is that of the event before."""
    return hashlib.sha256(previous + canonical({"schema": SCHEMA, **asdict(event)})).digest()


def anchor_name(sequence: int) -> str:
    """Returns the resource of a leaf of the log that names an event."""
    return f"auditEvents/{sequence}"


def anchor_of(leaf: Leaf) -> tuple[int, bytes] | None:
    """Returns the (sequence, hash) of the event that a leaf names; None for a leaf about something else."""
    if leaf.kind != Kind.AUDITED:
        return None
    return int(leaf.resource.removeprefix(anchor_name(0)[:-1])), bytes.fromhex(parse_digest(leaf.digest))


def verify_chain(
    events: Iterable[tuple[Event, bytes]],
    *,
    seen: tuple[int, bytes] | None = None,
    anchors: Mapping[int, bytes] | None = None,
) -> Chain:
    """Follows (event, hash) pairs, oldest first.

    `seen` is a (sequence, hash) that an earlier check accepted, `anchors` are those that the log names.
    """
    named = anchors or {}
    count, last = 0, FIRST
    for event, claimed in events:
        if event.sequence != count + 1:
            return Chain(count, last, f"event {count + 1} is missing: event {event.sequence} follows {count}")
        found = event_hash(last, event)
        if found != claimed:
            return Chain(count, last, f"event {event.sequence} or its hash was changed")
        if seen is not None and event.sequence == seen[0] and found != seen[1]:
            return Chain(count, last, f"event {event.sequence} is not the one that was accepted before")
        if named.get(event.sequence, found) != found:
            return Chain(count, last, f"event {event.sequence} is not the one that the log names")
        count, last = event.sequence, found
    if seen is not None and count < seen[0]:
        return Chain(count, last, f"there were {seen[0]} events and there are {count}")
    if max(named, default=0) > count:
        return Chain(count, last, f"the log names event {max(named)} and there are {count}")
    return Chain(count, last)
