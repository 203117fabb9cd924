"""The two lives of bytes in the loader, as tables: a load to host memory, and the intake of an upload.

    load     RESOLVE → FETCH → VERIFY → STAGE_HOST → READY          any stage → FAILED, or → CANCELLED
             VERIFY → FETCH when the node's disk held other bytes than were signed: the store is read instead
    intake   RECEIVE → VERIFY → PROMOTE → REPORT → DONE             VERIFY → REPORT when refused; any stage → FAILED

`handle(event)` moves a life on and says what to do next; it does nothing itself. A pair of state and event that is
not in the table is a fault of the shell and raises with the whole story.

Invariants:
 1. Outside the final states exactly one stage is running: the state's own. CANCELLED may have one that is ending.
 2. Bytes become visible to others (`Act.PUBLISH`) only on the way into READY.
 3. What a load holds is given back exactly once: by `Act.DISCARD`, or by `Act.UNPIN` after `Act.PUBLISH`.
 4. An intake that has begun to write into quarantine ends with exactly one `Act.CLEAN`.
 5. A load is abandoned exactly when its last waiter leaves, and never after it has ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Generic, TypeVar


class LoadState(StrEnum):
    """Where a load is."""

    RESOLVE = "RESOLVE"
    FETCH = "FETCH"
    VERIFY = "VERIFY"
    STAGE_HOST = "STAGE_HOST"
    READY = "READY"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class IntakeState(StrEnum):
    """Where an intake is."""

    RECEIVE = "RECEIVE"
    VERIFY = "VERIFY"
    PROMOTE = "PROMOTE"
    REPORT = "REPORT"
    DONE = "DONE"
    FAILED = "FAILED"


class Act(Enum):
    """What the shell is told to do."""

    RUN = "run the stage of the new state"
    PUBLISH = "put the sealed bytes into the host tier, pinned by the load"
    UNPIN = "drop the load's own pin: every waiter has its lease or is gone"
    DISCARD = "close what was fetched and give the reservation back"
    STOP = "tell the running stage to end early"
    CLEAN = "delete what the intake left in quarantine"


@dataclass(frozen=True, slots=True)
class Ended:
    """The running stage ended well. `elapsed_ms` >= 0; `size_bytes` is what it moved or checked, `tier` where from."""

    elapsed_ms: float
    size_bytes: int = 0
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The running stage worked, and its answer is no: the bytes are not what was announced."""

    elapsed_ms: float
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Spoiled:
    """The running stage worked, and the copy on the node's disk is not what it must be. There is a better source."""

    elapsed_ms: float
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Broke:
    """The running stage could not do its work. `reason` is one of `services.shared.errors.REASONS`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Nobody waits any more."""


Event = Ended | Refused | Spoiled | Broke | Abandoned


@dataclass(frozen=True, slots=True)
class Report:
    """A stage that has ended. `tier` is where a FETCH took the bytes from, STORE or DISK; empty for other stages."""

    stage: str
    elapsed_ms: float
    size_bytes: int
    tier: str = ""


S = TypeVar("S", bound=StrEnum)
Moves = Mapping[tuple[S, type[Event]], tuple[S, tuple[Act, ...]]]

_L = LoadState
LOAD_FINAL = frozenset({_L.READY, _L.FAILED, _L.CANCELLED})
_LOADING = (_L.RESOLVE, _L.FETCH, _L.VERIFY, _L.STAGE_HOST)
LOAD_MOVES: Moves[LoadState] = {
    (_L.RESOLVE, Ended): (_L.FETCH, (Act.RUN,)),
    (_L.FETCH, Ended): (_L.VERIFY, (Act.RUN,)),
    (_L.VERIFY, Ended): (_L.STAGE_HOST, (Act.RUN,)),
    (_L.VERIFY, Spoiled): (_L.FETCH, (Act.RUN,)),
    (_L.STAGE_HOST, Ended): (_L.READY, (Act.PUBLISH,)),
    **{(state, Broke): (_L.FAILED, (Act.DISCARD,)) for state in _LOADING},
    **{(state, Abandoned): (_L.CANCELLED, (Act.STOP,)) for state in _LOADING},
    (_L.READY, Abandoned): (_L.READY, (Act.UNPIN,)),
    (_L.FAILED, Abandoned): (_L.FAILED, ()),
    # The stage that was told to stop has ended, one way or the other.
    (_L.CANCELLED, Ended): (_L.CANCELLED, (Act.DISCARD,)),
    (_L.CANCELLED, Spoiled): (_L.CANCELLED, (Act.DISCARD,)),
    (_L.CANCELLED, Broke): (_L.CANCELLED, (Act.DISCARD,)),
}

_I = IntakeState
INTAKE_FINAL = frozenset({_I.DONE, _I.FAILED})
INTAKE_MOVES: Moves[IntakeState] = {
    (_I.RECEIVE, Ended): (_I.VERIFY, (Act.RUN,)),
    (_I.VERIFY, Ended): (_I.PROMOTE, (Act.RUN,)),
    (_I.VERIFY, Refused): (_I.REPORT, (Act.RUN,)),
    (_I.PROMOTE, Ended): (_I.REPORT, (Act.RUN,)),
    (_I.REPORT, Ended): (_I.DONE, (Act.CLEAN,)),
    **{(state, Broke): (_I.FAILED, (Act.CLEAN,)) for state in (_I.RECEIVE, _I.VERIFY, _I.PROMOTE, _I.REPORT)},
}


class IllegalMove(RuntimeError):
    """The shell reported what cannot happen. The message holds the story."""


class Life(Generic[S]):
    """One life under one table. `cause` names who or what it is about, for the story only."""

    def __init__(self, moves: Moves[S], start: S, *, cause: str) -> None:
        self.state: S = start
        self.reports: list[Report] = []
        self._moves = moves
        self._story = [f"{cause}: begins in {start}"]

    def handle(self, event: Event) -> tuple[Act, ...]:
        """Moves on and returns what to do, in order.

        Raises:
            IllegalMove: the event cannot happen in this state.
        """
        before = self.state
        move = self._moves.get((before, type(event)))
        if move is None:
            raise IllegalMove(f"{event} cannot happen in {before}. {self.story()}")
        self.state, acts = move
        if isinstance(event, Ended | Refused | Spoiled) and self.state != before:
            tier = event.tier if isinstance(event, Ended) else ""
            self.reports.append(Report(before.value, event.elapsed_ms, event.size_bytes, tier))
        self._story.append(f"{before} → {self.state} on {event}")
        return acts

    def story(self) -> str:
        """Returns everything that happened, in one line."""
        return "; ".join(self._story)


class LoadLife(Life[LoadState]):
    """A load and the callers that wait for it, each under its holder's name."""

    def __init__(self, *, cause: str) -> None:
        super().__init__(LOAD_MOVES, LoadState.RESOLVE, cause=cause)
        self._waiting: dict[str, int] = {}

    @property
    def waiter_count(self) -> int:
        """Callers that wait, >= 0."""
        return sum(self._waiting.values())

    @property
    def final(self) -> bool:
        """Whether nothing but a late stage can move it any more."""
        return self.state in LOAD_FINAL

    def join(self, holder: str) -> None:
        """Notes a caller that waits."""
        self._waiting[holder] = self._waiting.get(holder, 0) + 1

    def leave(self, holder: str) -> tuple[Act, ...]:
        """Notes that a caller waits no longer, whatever the reason; the last one abandons the load.

        Raises:
            IllegalMove: no caller of this holder waits.
        """
        if self._waiting.get(holder, 0) < 1:
            raise IllegalMove(f"{holder} does not wait. {self.story()}")
        self._waiting[holder] -= 1
        if not self._waiting[holder]:
            del self._waiting[holder]
        return self._abandon_if_alone()

    def others_than(self, holder: str) -> int:
        """Returns how many callers of other holders wait."""
        return self.waiter_count - self._waiting.get(holder, 0)

    def cancel(self, holder: str) -> tuple[Act, ...] | None:
        """Stops the load for `holder`; None, and nothing done, when others wait for it or it has ended."""
        if self.final or self.others_than(holder):
            return None
        return self.handle(Abandoned())

    def _abandon_if_alone(self) -> tuple[Act, ...]:
        if self._waiting or self.state is LoadState.CANCELLED:
            return ()
        return self.handle(Abandoned())


class IntakeLife(Life[IntakeState]):
    """The intake of one upload."""

    def __init__(self, *, cause: str) -> None:
        super().__init__(INTAKE_MOVES, IntakeState.RECEIVE, cause=cause)

    @property
    def final(self) -> bool:
        """Whether it has ended."""
        return self.state in INTAKE_FINAL
