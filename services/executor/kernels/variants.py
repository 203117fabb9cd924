"""The Triton variants, and which one a step takes: a measured table where there is one, else a roofline. Pure.

Each variant is one pair of compiled kernels per group of the model and dtype. The list is closed: everything that can
be chosen is compiled before the first request, and tested for every target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.executor.kernels.layout import RowLayout
from services.executor.kernels.work import GroupShape, traffic

TABLE_SCHEMA = "loraport.kernel-table/1"
_MOST_ENTRIES = 4096  # a table is looked through from its beginning, once for each arrangement of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Block sizes of one pair of kernels. `rows` x `ranks` per record; `in_cols`, `out_cols` columns per step.

    `max_splits` bounds into how many slices the input features are cut. The cut depends on the model's shape only, so
    with one variant a row's numbers do not depend on the rows beside it. `max_rows` bounds the packed rows of a step,
    and so the scratch, whose size grows with rows * splits.
    """

    kind: Literal["decode", "prefill"]
    rows: int
    ranks: int
    in_cols: int
    out_cols: int
    max_splits: int
    max_rows: int
    shrink_warps: int = 4
    expand_warps: int = 4
    stages: int = 2

    @property
    def name(self) -> str:
        return f"triton-{self.kind}-{self.rows}x{self.ranks}"

    def splits(self, in_features: int) -> int:
        """Return the slices of the input features, a power of two."""
        splits = 1
        while splits * 2 <= min(self.max_splits, in_features // self.in_cols):
            splits *= 2
        return splits


# Chosen so that no target spills (`make test-kernels`); untimed until a table is measured on a GPU.
VARIANTS: Mapping[str, Variant] = {
    v.name: v
    for v in (
        Variant(kind="decode", rows=1, ranks=8, in_cols=512, out_cols=512, max_splits=4, max_rows=512, shrink_warps=8),
        Variant(kind="decode", rows=4, ranks=8, in_cols=512, out_cols=128, max_splits=4, max_rows=512, shrink_warps=8),
        Variant(kind="prefill", rows=16, ranks=16, in_cols=128, out_cols=128, max_splits=4, max_rows=1024, stages=3),
        Variant(kind="prefill", rows=16, ranks=64, in_cols=128, out_cols=128, max_splits=4, max_rows=1024, stages=3),
        Variant(kind="prefill", rows=64, ranks=16, in_cols=64, out_cols=128, max_splits=1, max_rows=2**16, stages=3),
        Variant(
            kind="prefill",
            rows=64,
            ranks=64,
            in_cols=64,
            out_cols=128,
            max_splits=1,
            max_rows=2**16,
            expand_warps=8,
            stages=3,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Peak rates of a device. Bandwidth in GB/s; rates in TFLOP/s, dense; `cache` is bandwidth over memory's."""

    bandwidth: float
    tensor: float
    vector: float
    cache: float = 3.0


# Vendors' figures for the products' 16-bit dense tensor rate and 32-bit vector rate.
CHIPS: Mapping[str, Chip] = {
    "A100": Chip(bandwidth=2039, tensor=312, vector=19.5),
    "H100": Chip(bandwidth=3350, tensor=989, vector=67),
    "H200": Chip(bandwidth=4800, tensor=989, vector=67),
    "B200": Chip(bandwidth=8000, tensor=2250, vector=75),
    "MI300X": Chip(bandwidth=5300, tensor=1307, vector=163),
}
DEFAULT_CHIP = CHIPS["A100"]  # The least of them: its ratio of vector rate to bandwidth is the most careful one.

# Vector products convert 16-bit operands before each multiply-add; tiles reach about half of the peak at these sizes.
_VECTOR_SHARE, _TENSOR_SHARE = 0.4, 0.5


def chip_of(gpu_name: str) -> Chip:
    """Return the chip whose name occurs in the device's name, else `DEFAULT_CHIP`."""
    return next((chip for name, chip in CHIPS.items() if name in gpu_name), DEFAULT_CHIP)


def roofline_us(
    variant: Variant,
    layout: RowLayout,
    *,
    ranks: Sequence[int],
    shapes: Sequence[GroupShape],
    element_bytes: int,
    chip: Chip,
) -> float:
    """Return the least time of a step's adapters in microseconds: the larger of memory time and arithmetic time.

    Arithmetic counts whole blocks (padded rows, and padded ranks on tensor cores), memory counts bytes once at the
    memory's rate and repeated reads at the cache's: rank rows for every block of rows and, where
    tiles are wide enough not to keep it at hand, x for every block of ranks.
    """
    rate = chip.vector * _VECTOR_SHARE if variant.kind == "decode" else chip.tensor * _TENSOR_SHARE
    total = 0.0
    for shape in shapes:
        cost = traffic(layout, ranks=ranks, shape=shape, element_bytes=element_bytes, block_rows=variant.rows)
        blocks = again = 0
        for segment in layout.segments:
            rank = ranks[segment.adapter]
            padded = rank if variant.kind == "decode" else -(-rank // variant.ranks) * variant.ranks
            blocks += -(-segment.rows // variant.rows) * variant.rows * padded
            again += (
                (variant.kind == "prefill")
                * segment.rows
                * max(0, -(-rank // variant.ranks) * len(shape.out_features) - 1)
            )
        repeated = cost.repeated_bytes + again * shape.in_features * element_bytes * shape.layers
        memory = (cost.compulsory_bytes + repeated / chip.cache) / (chip.bandwidth * 1e3)
        total += max(memory, 2 * blocks * shape.values_per_rank * shape.layers / (rate * 1e6))
    return total


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of a table: steps of up to `rows` rows per adapter and up to `rank` were fastest with `variant`."""

    rows: int
    rank: int
    variant: str


@dataclass(frozen=True, slots=True)
class KernelTable:
    """A measured table of one GPU, made by `make tune-kernels`. Entries ordered by (rows, rank)."""

    gpu: str
    entries: tuple[Measured, ...]

    def find(self, rows: int, rank: int) -> Variant | None:
        """Return the variant of the smallest entry that covers `rows` and `rank`; None when none does."""
        for entry in self.entries:
            if rows <= entry.rows and rank <= entry.rank:
                return VARIANTS[entry.variant]
        return None


def read_table(document: Mapping[str, Any]) -> KernelTable:
    """Read a table's JSON value.

    Raises:
        ValueError: not this schema, no entries or thousands, an entry that is not three known values, or a variant that
            does not exist (any more).
    """
    try:
        schema, gpu, found = document["schema"], document["gpu"], document["entries"]
        entries = [(e["rows"], e["rank"], e["variant"]) for e in found]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a kernel table: {error!r}") from error
    if schema != TABLE_SCHEMA or not isinstance(gpu, str):
        raise ValueError(f"schema is not {TABLE_SCHEMA}, or no GPU is named")
    if not 0 < len(entries) <= _MOST_ENTRIES:
        raise ValueError(f"a kernel table with {len(entries)} entries")
    for rows, rank, variant in entries:
        if type(rows) is not int or type(rank) is not int or min(rows, rank) < 1 or variant not in tuple(VARIANTS):
            raise ValueError(f"an entry is not rows, a rank and a known variant: {(rows, rank, variant)!r:.200}")
    return KernelTable(gpu, tuple(Measured(*entry) for entry in sorted(entries)))


def choose_variant(
    layout: RowLayout,
    *,
    ranks: Sequence[int],
    shapes: Sequence[GroupShape],
    element_bytes: int,
    chip: Chip,
    table: KernelTable | None = None,
) -> Variant:
    """Return the variant for a step: the table's answer for its longest segment and largest rank, else the roofline's.

    `ranks[i]` is adapter i's rank. Of equal predictions the first variant of the list is taken. A variant whose
    `max_rows` the step exceeds is not taken, whatever the table says.
    """
    rows = max((s.rows for s in layout.segments), default=0)
    rank = max((ranks[s.adapter] for s in layout.segments), default=0)
    measured = table.find(rows, rank) if table else None
    if measured and layout.row_count <= measured.max_rows:
        return measured
    return min(
        (v for v in VARIANTS.values() if layout.row_count <= v.max_rows),
        key=lambda v: roofline_us(v, layout, ranks=ranks, shapes=shapes, element_bytes=element_bytes, chip=chip),
    )
