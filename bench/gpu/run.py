"""Checks and times the adapters' kernels on the GPU of this machine: `python bench/gpu/run.py --minutes 8`.

First whether every variant is right here (against plain torch; one captured graph for many steps, bit-equal to eager
launches; the library's attention against torch's, where it is installed), then times at Llama-3-8B's shapes, as shares
of the copy bandwidth and matmul rate measured in the same run, and at last a whole engine with random weights. Needs
this repository, torch >= 2.11 with its Triton, and no network; the engine also needs safetensors, structlog, rfc8785
and numpy. Stops by itself; what the time did not allow is named. The last lines are the table. Exit status: 0 measured
(whatever the verdicts), 1 something is wrong, 3 no GPU.
"""

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "sdk")]
if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported.

import torch  # noqa: E402
import triton  # noqa: E402

from bench.figures import RESULTS, Figure  # noqa: E402
from bench.gpu import timings  # noqa: E402
from bench.gpu.bed import Device, find_device  # noqa: E402
from bench.gpu.check import check_attention, check_graphs, check_variants  # noqa: E402

GRACE_S = 20.0  # after its time the script is cut, whatever it does


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
    for checks in (check_variants(device), check_graphs(device), check_attention(device)):
        for what, fault in checks:
            count += 1
            if fault:
                faults.append(f"{what}: {fault}")
                print(f"WRONG {faults[-1]}", flush=True)
            if left() < 0:
                print("the time ended during the checks", flush=True)
                return count, faults
    return count, faults


@dataclass
class Table:
    """What has been found so far."""

    device: Device
    facts: dict[str, str]
    count: int = 0
    faults: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def close(self) -> int:
        """Write the JSON file, print the table, return the exit status."""
        figures, skipped = list(self.figures), list(self.skipped)
        document = {**self.facts, "checks": self.count, "wrong": self.faults, "skipped": skipped}
        document["figures"] = [
            {"name": f.name, "value": f.value, "baseline": f.baseline, "unit": f.unit} for f in figures
        ]
        if not self.device.rehearse:
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / "gpu-kernels.json").write_text(json.dumps(document, indent=2) + "\n")
        left_out = ", ".join(skipped) or "nothing"
        print(f"\n{self.device.name}: {self.count} checks, {len(self.faults)} wrong; left out: {left_out}")
        for figure in figures:
            print(f"rehearsed {figure.name}" if self.device.rehearse else figure.line())
        return 1 if self.faults else 0

    def cut(self) -> None:
        """End the process: a part took longer than it said."""
        self.skipped.append("the rest: the time was over")
        status = self.close()
        sys.stdout.flush()
        os._exit(status)


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

    table = Table(device, facts)
    cut = threading.Timer(left() + GRACE_S, table.cut)
    cut.daemon = True
    cut.start()
    table.count, table.faults = _check(device, left)
    print(f"{table.count} checks, {len(table.faults)} wrong", flush=True)
    for part in timings.PARTS:
        if left() < part.seconds and not device.rehearse:
            table.skipped.append(part.name)
            continue
        try:
            for figure in part.run(device):
                table.figures.append(figure)
        except torch.OutOfMemoryError:
            table.skipped.append(f"{part.name} (out of memory)")
        except ImportError as missing:
            table.skipped.append(f"{part.name} (needs {missing.name})")
    cut.cancel()
    return table.close()


if __name__ == "__main__":
    sys.exit(main())
