"""The slow exact twin of every LoRA path: a plain loop over segments, pages and ranks. Oracle and baseline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.executor.kernels.layout import RowLayout, page_rows


def lora_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    *,
    layout: RowLayout,
    a_pool: torch.Tensor,
    b_pool: torch.Tensor,
    pages: Sequence[Sequence[int]],
    ranks: Sequence[int],
    scales: Sequence[float],
    rows_per_page: int,
) -> None:
    """Add every row's own adapter to y, for one module of one layer.

    Semantics: for each segment (s, e, i), with A, B the rank rows of adapter i in its pages:
        y[s:e] += scales[i] * (x[s:e] @ A.T) @ B
    Shapes: y [rows, out] and x [rows, in], any float dtype; a_pool [pages * rows_per_page, in];
        b_pool [pages * rows_per_page, out]; pages, ranks, scales per adapter.
    Computes in float64, one rank row at a time, and writes y in place, rounded once. Rows without an adapter are not
    read or written.
    """
    for segment in layout.segments:
        i = segment.adapter
        own = slice(segment.start, segment.end)
        total = y[own].double()
        for pool_row in page_rows(pages[i], rank=ranks[i], rows_per_page=rows_per_page):
            shrunk = (x[own].double() * a_pool[pool_row].double()).sum(dim=1)
            total += scales[i] * torch.outer(shrunk, b_pool[pool_row].double())
        y[own] = total.to(y.dtype)
