"""The residency notice: what an executor says it holds, as others read it from the board.

A notice is a hint with an expiry, never the truth and never an authorization. Between two notices of one executor the
one with the higher (epoch, sequence) counts: a restarted process has a higher epoch, a change a higher sequence.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from loraport.bundle.canonical import StrictJsonError, canonical, load_strict

KEY_PREFIX = "loraport:residency:"
TTL_S = 10
REPORT_EVERY_S = 2.0
MAX_NOTICE_BYTES = 4 << 20
# What a tenant may hold of a pool beyond its part: one in so many of all pages. With more, the executor's pool lets its
# revisions go sooner, and the router has its loads come in turns.
SPARE = 4


@dataclass(frozen=True, slots=True)
class Resident:
    """One revision on a device. `state` is LOADING, READY or DRAINING."""

    revision_id: str
    state: str
    size_bytes: int
    lease_count: int


@dataclass(frozen=True, slots=True)
class Notice:
    """What one executor holds. Times in milliseconds since the epoch, sizes in bytes."""

    executor: str
    base_id: str
    epoch: int
    sequence: int
    time_ms: int
    queued_count: int
    running_count: int
    pool_used_bytes: int
    pool_size_bytes: int
    revisions: tuple[Resident, ...]

    @property
    def order(self) -> tuple[int, int]:
        """Orders notices of one executor."""
        return (self.epoch, self.sequence)


def key(executor: str) -> str:
    """Returns the board's key for an executor."""
    return KEY_PREFIX + executor


def encode(notice: Notice) -> bytes:
    """Returns the notice as canonical JSON."""
    return canonical(asdict(notice))


def decode(data: bytes) -> Notice | None:
    """Returns the notice, or None for anything that is not one: a board's content is a hint, so garbage is ignored."""
    try:
        value: Any = load_strict(data, max_bytes=MAX_NOTICE_BYTES, max_depth=4)
        rows = tuple(Resident(**row) for row in value.pop("revisions"))
        notice = Notice(**value, revisions=rows)
    except (StrictJsonError, TypeError, KeyError, AttributeError):
        return None
    return notice if _is_typed(notice) and all(map(_is_typed, rows)) else None


def _is_typed(value: Notice | Resident) -> bool:
    """Whether every text is a text and every number a whole one; `revisions` is made here."""
    return all(type(getattr(value, field.name)) is field.type for field in fields(value) if field.name != "revisions")
