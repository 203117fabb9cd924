"""Checks and times the adapters' kernels on the GPU of this machine: `python bench/gpu/run.py --minutes 8`.

First whether every variant is right here (against plain torch; one captured graph for many steps, bit-equal to eager
launches), then times at Llama-3-8B's shapes, as shares of the copy bandwidth and matmul rate measured in the same run.
Needs this repository, torch >= 2.11 with its Triton, no network and no other part of the project. Stops by itself;
what the time did not allow is named. The last lines are the table. Exit status: 0 measured (whatever the verdicts),
1 a kernel is wrong, 3 no GPU.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported.

import torch  # noqa: E402
import triton  # noqa: E402

from bench.figures import RESULTS, Figure  # noqa: E402
from bench.gpu import timings  # noqa: E402
from bench.gpu.bed import Device, find_device  # noqa: E402
from bench.gpu.check import check_graphs, check_variants  # noqa: E402


def _facts(device: Device) -> dict[str, str]:
    return {
        "gpu": device.name,
        "multiprocessors": str(device.multiprocessors),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _check(device: Device, left: Callable[[], float]) -> tuple[int, list[str]]:
    """Return (checks that ran, faults)."""
    count, faults = 0, []
    for checks in (check_variants(device), check_graphs(device)):
        for what, fault in checks:
            count += 1
            if fault:
                faults.append(f"{what}: {fault}")
                print(f"WRONG {faults[-1]}", flush=True)
            if left() < 0:
                print("the time ended during the checks", flush=True)
                return count, faults
    return count, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this long")
    parser.add_argument("--rehearse", action="store_true", help="try the script on a CPU, in small")
    options = parser.parse_args()
    ends = time.monotonic() + options.minutes * 60
    device = find_device(rehearse=options.rehearse)
    if device is None:
        print("no GPU on this machine: nothing was measured")
        return 3
    facts = _facts(device)
    print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)

    def left() -> float:
        return ends - time.monotonic()

    count, faults = _check(device, left)
    print(f"{count} checks, {len(faults)} wrong", flush=True)
    figures: list[Figure] = []
    skipped: list[str] = []
    for part in timings.PARTS:
        if left() < part.seconds and not device.rehearse:
            skipped.append(part.name)
            continue
        try:
            figures += part.run(device)
        except torch.OutOfMemoryError:
            skipped.append(f"{part.name} (out of memory)")
    document = {**facts, "checks": count, "wrong": faults, "skipped": skipped}
    document["figures"] = [{"name": f.name, "value": f.value, "baseline": f.baseline, "unit": f.unit} for f in figures]
    if not device.rehearse:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "gpu-kernels.json").write_text(json.dumps(document, indent=2) + "\n")
    print(f"\n{device.name}: {count} checks, {len(faults)} wrong; left out: {', '.join(skipped) or 'nothing'}")
    for figure in figures:
        print(f"rehearsed {figure.name}" if device.rehearse else figure.line())
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
