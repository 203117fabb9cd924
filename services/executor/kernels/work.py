"""What the Triton kernels do in one step, as a list of records. Pure values.

A record is eight integers: (first row, rows, the segment's first row, the segment's rows, rank, first rank, first entry
in the page list, base in the scratch). A shrink record covers at most `block_rows` rows and `block_ranks` rank rows of
one adapter, an expand record the same rows and all its rank rows. There is no record for base rows, for an adapter
without rank in the group, or above an adapter's rank: nothing is padded to the largest rank of the step.

The scratch holds, segment after segment, [subs, rows, rank] numbers: exactly what the step's ranks need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.executor.kernels.layout import RowLayout

RECORD = 8
_LIMIT = 2**31
_PER_PAIR = 64  # no group has more than this many subs * splits


@dataclass(frozen=True, slots=True)
class Resident:
    """Where one adapter lies: its pages in rank order, and its rank in each group that it touches."""

    pages: tuple[int, ...]
    ranks: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One group's work. `shrink` and `expand` are flat records; `pages` is the concatenated page list of the segments.

    `scratch` counts (row, rank) pairs: the kernels need scratch * subs * splits float32 numbers.
    """

    shrink: tuple[int, ...]
    expand: tuple[int, ...]
    pages: tuple[int, ...]
    scratch: int

    @property
    def shrink_count(self) -> int:
        return len(self.shrink) // RECORD

    @property
    def expand_count(self) -> int:
        return len(self.expand) // RECORD


def make_work(
    layout: RowLayout,
    *,
    ranks: Sequence[int],
    pages: Sequence[Sequence[int]],
    rows_per_page: int,
    block_rows: int,
    block_ranks: int,
) -> Work:
    """Cut a step into records. `ranks[i]` (0: nothing in this group) and `pages[i]` belong to adapter i of the layout.

    Raises:
        ValueError: an adapter's pages do not hold its rank, or an index does not fit 32 bits.
    """
    shrink: list[int] = []
    expand: list[int] = []
    used: list[int] = []
    scratch = 0
    for segment in layout.segments:
        rank = ranks[segment.adapter]
        need = -(-rank // rows_per_page)
        own = pages[segment.adapter][:need]
        if len(own) < need:
            raise ValueError(f"rank {rank} does not fit {len(own)} pages of {rows_per_page} rows")
        if rank == 0:
            continue
        for row in range(segment.start, segment.end, block_rows):
            count = min(block_rows, segment.end - row)
            head = (row, count, segment.start, segment.rows, rank)
            expand += (*head, 0, len(used), scratch)
            for first in range(0, rank, block_ranks):
                shrink += (*head, first, len(used), scratch)
        used += own
        scratch += segment.rows * rank
    if max(scratch * _PER_PAIR, layout.row_count, len(shrink)) >= _LIMIT:
        raise ValueError("the step is too large for 32-bit indices")
    return Work(shrink=tuple(shrink), expand=tuple(expand), pages=tuple(used), scratch=scratch)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimits:
    """What static buffers must hold: rows of a step, distinct adapters in it, the largest rank, pages of the pool."""

    rows: int
    adapters: int
    rank: int
    pages: int

    def capacity(self, *, rows_per_page: int, block_rows: int, block_ranks: int) -> tuple[int, int, int]:
        """Return bounds of (shrink records, expand records, page list entries) of any such step."""
        adapters = min(self.adapters, self.rows)
        expand = min(self.rows, self.rows // block_rows + adapters)
        shrink = expand * -(-self.rank // block_ranks)
        listed = min(self.pages, adapters * -(-self.rank // rows_per_page))
        return shrink, expand, listed


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One group in one layer: features in, features out per sub, layers that repeat it."""

    in_features: int
    out_features: tuple[int, ...]
    layers: int = 1

    @property
    def values_per_rank(self) -> int:
        """Numbers of one rank row in one layer, A and B together."""
        return len(self.out_features) * self.in_features + sum(self.out_features)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that must move, bytes that are read again (from cache, if it holds them), and useful FLOPs."""

    compulsory_bytes: int
    repeated_bytes: int
    flops: int


def traffic(
    layout: RowLayout, *, ranks: Sequence[int], shape: GroupShape, element_bytes: int, block_rows: int
) -> Traffic:
    """Return what one group costs over all its layers, by the formulas in the kernels' docstrings.

    Compulsory: every distinct adapter's rank rows once, x read once, y read and written once, for rows with a rank.
    """
    weights = repeated = rows = flops = 0
    for segment in layout.segments:
        rank = ranks[segment.adapter]
        if rank:
            one = rank * shape.values_per_rank * element_bytes
            weights += one
            repeated += one * (-(-segment.rows // block_rows) - 1)
            rows += segment.rows
            flops += 2 * segment.rows * rank * shape.values_per_rank
    activations = rows * (shape.in_features + 2 * sum(shape.out_features)) * element_bytes
    return Traffic((weights + activations) * shape.layers, repeated * shape.layers, flops * shape.layers)
