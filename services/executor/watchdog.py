"""A thread that watches the device thread, and ends the process when it is stuck.

    a step takes too long ──> stacks to the log, `on_stuck` (NOT_SERVING, the service stops) ──> grace ──> killed

A process whose threads cannot run at all, since the stuck one holds the interpreter, is ended by a timer of the C
library that this thread winds up again and again.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from services.executor.stuck import StuckDetector

log = structlog.get_logger()

POLLS = 20  # per limit
MAX_POLL_S = 1.0
GRACE_S = 10.0
EXIT_CODE = 1


class LastResort(Protocol):
    """Ends a process that cannot end itself."""

    def wind(self, seconds: float) -> None:
        """End the process after so long unless this is called again."""

    def unwind(self) -> None:
        """Take that back."""

    def show(self) -> None:
        """Write what every thread does to the log."""

    def end(self) -> None:
        """End the process now."""


class ProcessEnd:
    """The real one."""

    def wind(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    def unwind(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def show(self) -> None:
        faulthandler.dump_traceback(file=2, all_threads=True)

    def end(self) -> None:
        os._exit(EXIT_CODE)


class Watchdog:
    """See the module's text. `turn` is `Engine.turn`; without a last resort, `on_stuck` is all that happens."""

    def __init__(
        self,
        turn: Callable[[], int | None],
        *,
        limit_s: float,
        on_stuck: Callable[[], None],
        last_resort: LastResort | None,
    ) -> None:
        self._turn = turn
        self._limit_s = limit_s
        self._poll_s = min(MAX_POLL_S, limit_s / POLLS)
        self._on_stuck = on_stuck
        self._last_resort = last_resort
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loraport-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more; safe to repeat."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        resort, detector = self._last_resort, StuckDetector(self._limit_s, poll_s=self._poll_s)
        while not self._over.wait(self._poll_s):
            if resort is not None:
                resort.wind(self._limit_s + GRACE_S)
            if detector.observe(self._turn(), now=time.monotonic()):
                log.error("a step is stuck, this process ends", seconds=self._limit_s)
                if resort is not None:
                    resort.show()
                self._on_stuck()
                if not self._over.wait(GRACE_S) and resort is not None:
                    resort.end()
                break
        if resort is not None:
            resort.unwind()
