"""One fault under traffic: whether the fleet stood it, and what was seen."""

import time

from tests.chaos.faults import Fault, NotHereError
from tests.chaos.traffic import Counts, Oracle, Traffic
from tests.chaos.world import World

# As `SEEN_WITHIN_S` of faults.py.
AGAIN_S = 150.0


def under(fault: Fault, place: World, oracle: Oracle, *, seed: int) -> tuple[bool | None, str]:
    """Returns whether the fleet stood a fault, None when there was none, and what was seen."""
    trouble = ""
    with Traffic(place.stack.data, oracle, threads=3, pause_s=0.05, seed=seed) as traffic:
        counts = traffic.counts
        time.sleep(1.0)
        try:
            fault.run(place)
        except AssertionError as error:
            trouble = str(error)[:300] or "an assertion"
        except NotHereError as error:
            return None, str(error)
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
