"""`make chaos` and `make soak`: mixed traffic with an oracle, under faults one by one, or for long.

Ends with a table and `N passed, N failed, N skipped`. A row of faults passes when no answer was wrong, every request ended once, and
the fleet answered again afterwards; typed refusals are counted and shown. A soak passes when that holds, no request was
refused, and what every process holds on to is flat.
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.meter import Meter
from tests.chaos.traffic import Oracle, Traffic
from tests.chaos.trial import told, under
from tests.chaos.world import World, world

SAMPLE_S = 5.0
WORDS = {True: "PASS", False: "FAIL", None: "SKIP"}


def say(text: str) -> None:
    """Shows what is being done."""
    print(f"chaos: {text}", file=sys.stderr, flush=True)


def chaos(place: World, oracle: Oracle, *, only: str) -> list[tuple[str, bool | None, str]]:
    """Tries every fault once."""
    rows: list[tuple[str, bool | None, str]] = []
    for number, fault in enumerate(fault for fault in FAULTS if re.search(only, fault.name)):
        say(fault.name)
        rows.append((fault.name, *under(fault, place, oracle, seed=1000 * number)))
    return rows


def soak(place: World, oracle: Oracle, *, minutes: float) -> list[tuple[str, bool | None, str]]:
    """Lets it run: adapters take each other's places on the devices, an alias moves every few seconds."""
    meter, ends, version = Meter(place.stack), time.monotonic() + minutes * 60, 1
    moves, again, refused = 0, list[str](), list[str]()
    with Traffic(place.stack.data, oracle, threads=4, pause_s=0.02, seed=7) as traffic:
        time.sleep(min(30.0, minutes * 12))  # every adapter has been loaded once
        while time.monotonic() < ends:
            meter.sample()
            version, moves = 3 - version, moves + 1
            if fault := place.move_alias(version):
                # An operator asks again what may be asked again; both are told.
                again.append(fault)
                say(f"a move was not made: {fault}")
                time.sleep(1.0)
                refused += [fault] if (fault := place.move_alias(version)) else []
            time.sleep(SAMPLE_S)
    counts = traffic.counts
    clean = not (counts.wrong or counts.not_ended or counts.refused or counts.broken_off)
    rows: list[tuple[str, bool | None, str]] = [("requests", clean and counts.begun == counts.ended, told(counts))]
    twice = f"{len(again)} asked for twice, {len(refused)} refused {''.join((refused or again)[:1])}"
    rows.append(("alias moves", not refused, f"{moves} asked for, {twice}"))
    room = shutil.disk_usage(place.stack.data)
    rows.append(("room for data", room.free > room.total // 8, f"{room.free >> 20} of {room.total >> 20} MiB free"))
    for name, what, first, last, flat in meter.rows():
        unit = 1 << 20 if what == "rss" else 1
        rows.append((f"{name} {what}", flat, f"{first / unit:.0f} to {last / unit:.0f}{' MiB' * (what == 'rss')}"))
    return rows


def main() -> int:
    """Runs one of the two. Exit code 1: something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("what", choices=("faults", "soak"))
    parser.add_argument("--minutes", type=float, default=20.0, help="soak: how long")
    parser.add_argument("--only", default="", help="faults: those whose names this pattern finds")
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
            print(f"{name:<{width}}  {WORDS[passed]}  {seen}")
        passed, failed, skipped = (sum(1 for row in rows if row[1] is word) for word in (True, False, None))
        print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
