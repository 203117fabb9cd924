"""Run the whole suite; the last line is `N passed, N failed, N skipped`.

Tests that start whole stacks have the machine to themselves; all others share its cores, file by file. With arguments
pytest is run once, with those.
"""

import os
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parent.parent
STACKS = ("tests/e2e", "tests/chaos", "tests/compose")
# Each worker imports torch, and a stack of fixtures of its own: more of them gain little and take memory.
MOST_WORKERS = 4


class Tally:
    """Counts each test once: it failed if its set-up, its body or its tear-down failed."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.broken_files: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.outcomes.get(report.nodeid)
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes[report.nodeid] = before or "skipped"
        elif report.when == "call" and before is None:
            self.outcomes[report.nodeid] = "passed"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken_files.add(report.nodeid)

    def line(self) -> str:
        counts = Counter(self.outcomes.values())
        failed = counts["failed"] + len(self.broken_files)
        return f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped"


def main() -> int:
    tally = Tally()
    started = time.monotonic()
    if sys.argv[1:]:
        codes = [_run(tally, sys.argv[1:])]
    else:
        stacks = [str(ROOT / folder) for folder in STACKS]
        workers = min(os.cpu_count() or 1, MOST_WORKERS)
        shared = ["-n", str(workers), "--dist", "loadfile", *(f"--ignore={folder}" for folder in stacks)]
        with patch.dict(os.environ, OMP_NUM_THREADS="1"):  # torch's, in each worker
            codes = [_run(tally, [str(ROOT / "tests"), *shared])]
        codes.append(_run(tally, stacks))
    print(f"the suite took {time.monotonic() - started:.0f} s")
    print(tally.line(), flush=True)
    return max(codes)


def _run(tally: Tally, arguments: list[str]) -> int:
    return int(pytest.main([f"--rootdir={ROOT}", "-q", "--no-header", "--durations=8", *arguments], plugins=[tally]))


if __name__ == "__main__":
    sys.exit(main())
