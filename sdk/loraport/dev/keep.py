"""`python -m loraport.dev.keep COMMAND…`: runs a command and starts it again when it fails.

An executor whose device is stuck ends itself, and whoever runs it starts it again; on a local stack that is this. What
ends well (0) or cannot be used as it is configured (2) is not started again. The command never outlives its keeper.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

FINAL_CODES = (0, 2)
# Seconds: what ran for so long had come up; delays double from the first to the last.
STEADY_S = 60.0
FIRST_DELAY_S = 0.5
LAST_DELAY_S = 30.0
# Ends in a row without ever having run steadily; then it is given up.
MAX_QUICK_ENDS = 5
_PR_SET_PDEATHSIG = 1


class Backoff:
    """How long to wait before the next start."""

    def __init__(self) -> None:
        self._quick_ends = 0

    def after(self, ran_s: float) -> float | None:
        """Returns the delay after a run of `ran_s` seconds that failed, None when it is to be given up."""
        self._quick_ends = 1 if ran_s >= STEADY_S else self._quick_ends + 1
        if self._quick_ends >= MAX_QUICK_ENDS:
            return None
        return min(LAST_DELAY_S, FIRST_DELAY_S * 2 ** (self._quick_ends - 1))


class Keeper:
    """Runs one command until it ends for good; `stop` ends it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Asks the command to end, for good. May be called by a signal's handler."""
        self._stopping.set()
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGTERM)

    def run(self) -> int:
        """Returns the exit code of the last run."""
        backoff = Backoff()
        while True:
            started = time.monotonic()
            self._child = subprocess.Popen(self._command, preexec_fn=_end_with_parent)
            if self._stopping.is_set():
                self.stop()
            code = self._child.wait()
            if self._stopping.is_set() or code in FINAL_CODES:
                return max(code, 0)
            delay = backoff.after(time.monotonic() - started)
            if delay is None:
                _say("gave up: it ends again and again", exit_code=code)
                return 1
            _say("it ended and is started again", exit_code=code, delay_s=delay)
            if self._stopping.wait(delay):
                return 0


def _end_with_parent() -> None:
    """In the new process: be killed when the keeper is, so that nothing is left behind it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say(event: str, **fields: object) -> None:
    sys.stderr.write(json.dumps({"event": event, "level": "warning", "service": "keeper", **fields}) + "\n")
    sys.stderr.flush()


def main() -> int:
    """Runs the command in the arguments."""
    if len(sys.argv) < 2:
        sys.stderr.write("usage: python -m loraport.dev.keep COMMAND...\n")
        return 2
    keeper = Keeper(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.stop())
    return keeper.run()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
