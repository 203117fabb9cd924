"""The slow exact twin of every LoRA path: a plain loop over segments, pages and ranks. Oracle and baseline.

`ReferenceStep` is the same for a whole step on any device: dense products, one adapter after the other. It serves a GPU
without Triton, and is what the kernels are compared with where float64 is slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.executor.kernels.dispatch import REFERENCE
from services.executor.kernels.layout import RowLayout, page_rows
from services.executor.kernels.shrink_expand import Bank
from services.executor.kernels.work import Resident


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


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """A step's adapters over the pool, in plain torch."""

    layout: RowLayout
    residents: tuple[Resident, ...]
    banks: Mapping[str, Bank]
    rows_per_page: int

    @property
    def path(self) -> str:
        return REFERENCE

    def add(self, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the adapters of `group` in `layer` to y. Shapes as `lora_reference`, subs side by side in y.

        In place. Sums in float32, rounded once; rows without an adapter are neither read nor written.
        """
        bank = self.banks[group]
        for segment in self.layout.segments:
            resident = self.residents[segment.adapter]
            rank = resident.ranks.get(group, 0)
            if rank == 0:
                continue
            rows = page_rows(resident.pages, rank=rank, rows_per_page=self.rows_per_page)
            index = torch.tensor(rows, device=y.device)
            a, b, scale = (t[layer].index_select(0, index).float() for t in (bank.a, bank.b, bank.scale))
            own = slice(segment.start, segment.end)
            shrunk = torch.einsum("ri,ksi->rks", x[own].float(), a) * scale
            parts = [shrunk[:, :, s] @ part for s, part in enumerate(b.split(bank.widths, dim=1))]
            y[own] = (y[own].float() + torch.cat(parts, dim=1)).to(y.dtype)
