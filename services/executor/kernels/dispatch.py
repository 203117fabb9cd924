"""Which kernel path computes the adapters' part of a step. The name travels into every response and a metric.

base                  no row has an adapter
cpu-torch-paged       every adapter has few rows: one sampled product and one weighted sum for all of them
cpu-torch-segmented   every adapter has many rows: dense products, one adapter after the other
cpu-torch-mixed       both, each adapter in its own way
cpu-compiled          one compiled call for all adapters, however many rows each has
triton-KIND-ROWSxRANKS    a GPU: one of `variants.VARIANTS`, chosen in `gpu_lora.py` by a table or a roofline
triton-...-graph      the same, replayed from a captured graph
torch-reference       a GPU without Triton: dense products, one adapter after the other
merged                the adapter is in the base's weights

Measured on 2 cores without AVX-512 (SmolLM2 shapes, float32, ranks 8, 16, 32, 64 evenly, one layer): 16 adapters of 2
rows 1.1 ms paged, 4.2 ms segmented; 4 adapters of 8 rows 0.8 ms paged, 1.5 ms segmented; ranks 8 and 16 of 16 rows
0.5 ms paged, 0.4 ms segmented.
"""

from __future__ import annotations

from services.executor.kernels.layout import RowLayout, Segment
from services.executor.kernels.variants import VARIANTS

BASE = "base"
PAGED = "cpu-torch-paged"
SEGMENTED = "cpu-torch-segmented"
MIXED = "cpu-torch-mixed"
COMPILED = "cpu-compiled"
REFERENCE = "torch-reference"
MERGED = "merged"
GRAPH = "-graph"  # ends the path of an adapter's replayed steps
_MANY_ROWS = 12  # rows of one adapter from which dense products are faster


def all_paths() -> frozenset[str]:
    """Return every path that there is."""
    cpu = {PAGED, SEGMENTED, MIXED, COMPILED}
    return frozenset({BASE, REFERENCE, MERGED, *cpu, *VARIANTS, *(name + GRAPH for name in VARIANTS)})


def has_many_rows(segment: Segment) -> bool:
    """Return whether a segment takes dense products of its own."""
    return segment.rows >= _MANY_ROWS


def choose_path(layout: RowLayout, *, device_type: str, compiled: bool = False) -> str:
    """Return the kernel path for a step's token rows; `compiled` where there is a compiled step.

    Raises:
        ValueError: no kernel exists for the device.
    """
    if not layout.segments:
        return BASE
    if device_type != "cpu":
        raise ValueError(f"no LoRA kernel for device {device_type!r}")
    if compiled:
        return COMPILED
    many = sum(has_many_rows(segment) for segment in layout.segments)
    if many == 0:
        return PAGED
    return SEGMENTED if many == len(layout.segments) else MIXED
