"""Which refused calls become audit events: a bounded number a minute for each caller, the rest as a count. Pure.

This is for calls that reach no handler, as of an identity that may not call a method or without a deadline, and for
what a handler refuses a service. Anybody with a certificate could make those without end, and each event is a commit.
What is refused an operator is audited always.
"""

from dataclasses import dataclass

WINDOW_S = 60.0
PER_WINDOW = 10
# Callers that are told apart; certificates of the fleet name far fewer.
MAX_CALLERS = 1000
OTHERS = "(others)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An event to write."""

    principal: str
    method: str
    reason: str
    request_id: str
    resource: str = ""


@dataclass(slots=True)
class _Window:
    began: float
    written: int = 0
    suppressed: int = 0


class Refusals:
    """Counts refusals by caller. Times are seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def note(self, refusal: Refusal, *, now: float) -> list[Refusal]:
        """Returns the events to write for a refused call: itself, or none when its caller has had its share."""
        events = self.expire(now=now)
        caller = refusal.principal
        if caller not in self._windows and len(self._windows) >= MAX_CALLERS:
            caller = OTHERS
        window = self._windows.setdefault(caller, _Window(now))
        if window.written >= PER_WINDOW:
            window.suppressed += 1
            return events
        window.written += 1
        return [*events, refusal]

    def expire(self, *, now: float | None) -> list[Refusal]:
        """Forgets windows that are over, all of them for None; returns an event for each that left something out."""
        over = {name: window for name, window in self._windows.items() if now is None or now - window.began >= WINDOW_S}
        for name in over:
            del self._windows[name]
        return [
            Refusal(principal=name, method="", reason=f"{window.suppressed} more refused calls", request_id="")
            for name, window in over.items()
            if window.suppressed
        ]
