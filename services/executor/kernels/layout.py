"""How the packed rows of one step map to adapters, ranks and pool rows. Pure values; no tensors.

Conventions (half-open, in row order):
 - rows [0, base_rows) belong to the base and are never touched;
 - rows [base_rows, row_count) are cut into segments, one per distinct adapter, in ascending row order;
 - in each group an adapter owns the packed rank columns [rank_start, rank_end), zero or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Linears that share one input, and so one shrink: q|k|v, gate|up, or a single module.

    `paths[layer][sub]` are PEFT's module paths; `out_features[sub]` their widths. A group has one entry of `paths` per
    layer (the output head has one "layer"). A group of kind "embedding" is one module; its input is a token, one-hot
    over `in_features`, and it is not kept in pages.
    """

    name: str
    in_features: int
    out_features: tuple[int, ...]
    paths: tuple[tuple[str, ...], ...]
    kind: Literal["linear", "embedding"] = "linear"

    @property
    def layers(self) -> int:
        return len(self.paths)

    @property
    def values_per_rank(self) -> int:
        """Numbers that one rank row holds over all layers, A and B together."""
        return self.layers * (len(self.out_features) * self.in_features + sum(self.out_features))


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, end) use adapter number `adapter` of the active set."""

    start: int
    end: int
    adapter: int

    @property
    def rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Segments of one packed tensor of rows."""

    row_count: int
    base_rows: int
    segments: tuple[Segment, ...]

    @property
    def lora_rows(self) -> int:
        return self.row_count - self.base_rows


def make_layout(owners: Sequence[int | None], counts: Sequence[int]) -> RowLayout:
    """Return the layout of runs of rows: run i has `counts[i]` rows of adapter `owners[i]` (None for the base).

    Raises:
        ValueError: base runs are not first, or an adapter's runs are not adjacent.
    """
    base_rows = row = 0
    segments: list[Segment] = []
    for owner, count in zip(owners, counts, strict=True):
        if count == 0:
            continue
        if owner is None:
            if segments:
                raise ValueError("base rows come first")
            base_rows += count
        elif segments and segments[-1].adapter == owner:
            segments[-1] = Segment(segments[-1].start, row + count, owner)
        else:
            if any(s.adapter == owner for s in segments):
                raise ValueError("rows of one adapter are adjacent")
            segments.append(Segment(row, row + count, owner))
        row += count
    return RowLayout(row, base_rows, tuple(segments))


def page_rows(pages: Sequence[int], *, rank: int, rows_per_page: int) -> list[int]:
    """Return the pool row of each of the first `rank` rank rows of an adapter that owns `pages`."""
    if rank > len(pages) * rows_per_page:
        raise ValueError(f"rank {rank} does not fit {len(pages)} pages of {rows_per_page} rows")
    return [pages[i // rows_per_page] * rows_per_page + i % rows_per_page for i in range(rank)]
