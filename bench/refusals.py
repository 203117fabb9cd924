"""What refusing a malformed bundle costs: `make bench-refusals`.

Every bundle of the security tests' corpus is written to a directory and verified as the loader and the command line do
it, in a process of its own: the median time, and the memory, which is the larger of what the kernel says that the
process grew by and what was allocated at once (a process may reuse what it was born with). The baseline is the honest
bundle that all of them spoil. Exits 0 unless something cannot be measured.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

from bench.figures import RESULTS, Figure, report
from loraport.bundle.base import BaseSpec
from loraport.bundle.bundle_dir import verify_dir
from loraport.bundle.manifest import CONFIG_NAME, WEIGHTS_NAME
from tests.bundle_files import small_base
from tests.security.corpus import Kit, corpus

TIME_MS = 200.0
MEMORY_MIB = 64.0
# Writing it makes the kernel forget the largest size that the process has had (proc(5)).
FORGET_PEAK = "5"


def memory_kib(field: str) -> int:
    """Returns `VmRSS` (now) or `VmHWM` (the largest since the peak was forgotten) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def cost(folder: Path, base: BaseSpec, rounds: int, *, admitted: bool) -> tuple[float, float]:
    """Returns (median milliseconds, MiB) of judging a bundle.

    Measured in a child of its own: memory that an earlier bundle has left to be used again would hide a later one's.

    Raises:
        RuntimeError: another verdict than was expected, or the child broke.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Path("/proc/self/clear_refs").write_text(FORGET_PEAK)
            before, times, verdicts = memory_kib("VmRSS"), [], set()
            for _ in range(rounds):
                started = time.perf_counter()
                verdicts.add(verify_dir(folder, base=base, tenant="acme").admitted)
                times.append((time.perf_counter() - started) * 1000)
            grown = memory_kib("VmHWM") - before
            tracemalloc.start()
            verify_dir(folder, base=base, tenant="acme")
            most = max(grown / 1024, tracemalloc.get_traced_memory()[1] / 2**20)
            os.write(writer, json.dumps([verdicts == {admitted}, statistics.median(times), most]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read()
    os.waitpid(child, 0)
    good, milliseconds, mebibytes = json.loads(answer or "[false, 0, 0]")
    if not good:
        raise RuntimeError(f"{folder.name} was not judged as expected")
    return milliseconds, mebibytes


def measure(folder: Path, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """Returns the figures of the slowest and of the hungriest bundle."""
    base = small_base()
    kit = Kit(base)
    honest = folder / "honest"
    honest.mkdir()
    (honest / CONFIG_NAME).write_bytes(kit.good_config)
    (honest / WEIGHTS_NAME).write_bytes(kit.good_weights)
    plain_ms, plain_mib = cost(honest, base, rounds, admitted=True)
    costs = {}
    for number, case in enumerate(corpus(base)):
        place = folder / str(number)
        place.mkdir()
        case.write(place)
        costs[case.name] = cost(place, base, rounds, admitted=False)
    slowest = max(costs, key=lambda name: costs[name][0])
    hungriest = max(costs, key=lambda name: costs[name][1])
    figures = [
        Figure(name="slowest_refusal", value=costs[slowest][0], baseline=plain_ms, target=TIME_MS, unit="ms"),
        Figure(name="hungriest_refusal", value=costs[hungriest][1], baseline=plain_mib, target=MEMORY_MIB, unit="MiB"),
    ]
    facts = {
        "bundles": len(costs),
        "rounds": rounds,
        "slowest": slowest,
        "hungriest": hungriest,
        "median_ms": round(statistics.median(ms for ms, _ in costs.values()), 2),
    }
    return figures, facts


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what refusing malformed bundles costs.")
    parser.add_argument("--rounds", type=int, default=5, help="measurements per bundle")
    parser.add_argument("--out", type=Path, default=RESULTS / "refusals.json", help="where the JSON goes")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="loraport-bench-") as name:
            figures, facts = measure(Path(name), max(1, options.rounds))
    except Exception as error:
        print(f"error: could not measure: {error!r}", file=sys.stderr)
        return 1
    report(options.out, figures, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
