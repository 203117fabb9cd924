"""Asking again: a request that has been told nothing yet may be sent anew while the fleet says that it is unavailable.

A router that is being replaced refuses connections for a moment, an executor that is being replaced has none to give;
both pass. What has begun to be answered is never asked again, since another answer could begin otherwise.
"""

from loraport.errors import LoraportError, UnavailableError

FIRST_DELAY_S = 0.2
LAST_DELAY_S = 2.0


class Patience:
    """The tries of one request. `patience_s` and `timeout_s` (None: no limit) begin at `now`; times in seconds."""

    def __init__(self, patience_s: float, timeout_s: float | None, *, now: float) -> None:
        self._patience_ends = now + patience_s
        self._ends = None if timeout_s is None else now + timeout_s
        self._delay = FIRST_DELAY_S

    def left(self, now: float) -> float | None:
        """Returns the timeout of a try that begins now."""
        return None if self._ends is None else max(0.0, self._ends - now)

    def after(self, error: LoraportError, *, begun: bool, now: float) -> float | None:
        """Returns how long to wait before the next try; None when the error is final."""
        if begun or not isinstance(error, UnavailableError):
            return None
        delay = max(self._delay, min(error.retry_after or 0.0, LAST_DELAY_S))
        ends = self._patience_ends if self._ends is None else min(self._patience_ends, self._ends)
        if now + delay >= ends:
            return None
        self._delay = min(LAST_DELAY_S, self._delay * 2)
        return delay
