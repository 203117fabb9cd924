"""Run the whole suite; the last line is `N passed, N failed, N skipped`. Arguments go to pytest."""

import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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
    code = pytest.main([f"--rootdir={ROOT}", "-q", "--no-header", "--durations=8", *sys.argv[1:]], plugins=[tally])
    print(f"the suite took {time.monotonic() - started:.0f} s")
    print(tally.line(), flush=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
