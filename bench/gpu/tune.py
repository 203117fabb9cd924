"""Times every variant on this machine's GPU and writes its table: `make tune-kernels`.

For each (rows per adapter, rank) the fastest variant over Llama-3-8B's groups with four adapters. Where the roofline's
choice is within 3 % of it, that is taken, so that noise does not write tables. Exits 3 where there is no GPU.
"""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402

from bench.gpu.bed import LLAMA_8B, TINY, Bed, Device, add_all, even_layout, find_device  # noqa: E402
from bench.gpu.timings import chosen_variant  # noqa: E402
from services.executor.kernels.gpu_lora import table_path  # noqa: E402
from services.executor.kernels.variants import TABLE_SCHEMA, VARIANTS, read_table  # noqa: E402

ROWS = (1, 2, 4, 8, 16, 64, 512, 4096)
RANKS = (8, 16, 32, 64, 128, 256)
ADAPTERS = 4
NOISE = 1.03


def measure(device: Device, rows: int, rank: int) -> dict[str, object]:
    """Return the table's entry for steps of `rows` rows per adapter of rank `rank`, with all times in microseconds."""
    bed = Bed(device, TINY if device.rehearse else LLAMA_8B, [rank] * ADAPTERS, layers=1)
    layout = even_layout(rows * ADAPTERS, ADAPTERS)
    tensors = bed.tensors(layout.row_count)
    times = {}
    for name, variant in VARIANTS.items():
        # A vector kernel with hundreds of rows takes seconds and is never chosen.
        if layout.row_count > variant.max_rows or (variant.kind == "decode" and rows > 32):
            continue
        step = bed.kernels(variant, rows=layout.row_count).load(layout, bed.residents)
        times[name] = device.milliseconds(lambda step=step: add_all(step, tensors, 1), seconds=0.05) * 1e3
    best, expected = min(times, key=times.__getitem__), chosen_variant(bed, layout).name
    if times.get(expected, float("inf")) <= times[best] * NOISE:
        best = expected
    return {"rows": rows, "rank": rank, "variant": best, "us": {name: round(us, 2) for name, us in times.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="try the script on a CPU, in small; writes nothing")
    options = parser.parse_args()
    device = find_device(rehearse=options.rehearse)
    if device is None:
        print("no GPU on this machine: no table was made, the roofline stays the choice")
        return 3
    table = make_table(device, [(1, 1)] if device.rehearse else [(rows, rank) for rows in ROWS for rank in RANKS])
    if not device.rehearse:
        print(write_table(table))
    return 0


def make_table(device: Device, grid: Sequence[tuple[int, int]]) -> dict[str, object]:
    """Return the table of a device, measured at (rows per adapter, rank); prints each entry as it comes."""
    entries = []
    for rows, rank in grid:
        entries.append(measure(device, rows, rank))
        print(json.dumps(entries[-1]), flush=True)
    table = {
        "schema": TABLE_SCHEMA,
        "gpu": device.name,
        "made": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "entries": entries,
    }
    read_table(table)
    return table


def write_table(table: dict[str, object]) -> Path:
    """Put a table where an executor on that GPU finds it: whole, or not at all."""
    path = table_path(str(table["gpu"]))
    path.parent.mkdir(exist_ok=True)
    half = path.with_suffix(".half")
    half.write_text(json.dumps(table, indent=1) + "\n")
    half.replace(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
