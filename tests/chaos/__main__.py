"""`make chaos` and `make soak`: mixed traffic with an oracle, under faults one by one, or for long.

Ends with a table and `N passed, N failed`. A row of faults passes when no answer was wrong, every request ended once, and
the fleet answered again afterwards; typed refusals are counted and shown. A soak passes when that holds, no request was
refused, and what every process holds on to is flat.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.meter import Meter
from tests.chaos.traffic import Counts, Oracle, Traffic
from tests.chaos.world import World, world

AGAIN_S = 60.0
SAMPLE_S = 5.0


def say(text: str) -> None:
    """Shows what is being done."""
    print(f"chaos: {text}", file=sys.stderr, flush=True)


def under(fault: Fault, place: World, oracle: Oracle, *, seed: int) -> tuple[bool, str]:
    """Returns whether the fleet stood a fault, and what was seen."""
    trouble = ""
    with Traffic(place.stack.data, oracle, threads=3, pause_s=0.05, seed=seed) as traffic:
        counts = traffic.counts
        time.sleep(1.0)
        try:
            fault.run(place)
        except AssertionError as error:
            trouble = str(error)[:300]
        mended, before = time.monotonic(), counts.answered
        while counts.answered < before + 5 and time.monotonic() - mended < AGAIN_S:
            time.sleep(0.05)
        again = time.monotonic() - mended
    good = not (trouble or counts.wrong or counts.not_ended) and again < AGAIN_S and counts.begun == counts.ended
    return good, f"5 answers {again:.1f} s after; {told(counts)}{'; ' + trouble if trouble else ''}"


def told(counts: Counts) -> str:
    """Returns the counts in one line."""
    parts = [f"{counts.begun} begun", f"{counts.answered} answered", f"{counts.cancelled} left"]
    parts += [f"{number} refused {reason}" for reason, number in counts.refused.items()]
    parts += [f"{number} broken off {reason}" for reason, number in counts.broken_off.items()]
    parts += [f"WRONG: {wrong}" for wrong in counts.wrong[:1]]
    return ", ".join([*parts, f"{len(counts.wrong)} wrong", f"{len(counts.not_ended)} not ended"])


def chaos(place: World, oracle: Oracle, *, only: str) -> list[tuple[str, bool, str]]:
    """Tries every fault once."""
    rows = []
    for number, fault in enumerate(fault for fault in FAULTS if only in fault.name):
        say(fault.name)
        rows.append((fault.name, *under(fault, place, oracle, seed=1000 * number)))
    return rows


def soak(place: World, oracle: Oracle, *, minutes: float) -> list[tuple[str, bool, str]]:
    """Lets it run: adapters take each other's places on the devices, an alias moves every few seconds."""
    meter, ends, version = Meter(place.stack), time.monotonic() + minutes * 60, 1
    with Traffic(place.stack.data, oracle, threads=4, pause_s=0.02, seed=7) as traffic:
        time.sleep(min(30.0, minutes * 12))  # every adapter has been loaded once
        while time.monotonic() < ends:
            meter.sample()
            version = 3 - version
            assert place.move_alias(version) == 0
            time.sleep(SAMPLE_S)
    counts = traffic.counts
    clean = not (counts.wrong or counts.not_ended or counts.refused or counts.broken_off)
    rows = [("requests", clean and counts.begun == counts.ended, told(counts))]
    for name, what, first, last, flat in meter.rows():
        unit = 1 << 20 if what == "rss" else 1
        rows.append((f"{name} {what}", flat, f"{first / unit:.0f} to {last / unit:.0f}{' MiB' * (what == 'rss')}"))
    return rows


def main() -> int:
    """Runs one of the two. Exit code 1: something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("what", choices=("faults", "soak"))
    parser.add_argument("--minutes", type=float, default=20.0, help="soak: how long")
    parser.add_argument("--only", default="", help="faults: those with this in their name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loraport-chaos-") as folder, world(Path(folder)) as place:
        say("learning the answers")
        oracle = Oracle(place.stack.data, place.targets)
        if options.what == "soak":
            rows = soak(place, oracle, minutes=options.minutes)
        else:
            rows = chaos(place, oracle, only=options.only)
    width = max(len(name) for name, _, _ in rows)
    for name, passed, seen in rows:
        print(f"{name:<{width}}  {'PASS' if passed else 'FAIL'}  {seen}")
    failed = sum(1 for _, passed, _ in rows if not passed)
    print(f"{len(rows) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
