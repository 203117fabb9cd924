"""LoRA over segments on torch: the CPU backend. See `reference.py` for the exact semantics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.executor.kernels.layout import RowLayout


@dataclass(frozen=True, slots=True)
class Bank:
    """The active adapters' rank rows of one group, packed.

    Shapes: a [layers, ranks, subs, in]; b one [layers, ranks, out_sub] per sub; scale [layers, ranks, subs], float32
    whatever the weights' dtype (alpha / sqrt(r) is no bfloat16 number). `spans[i]` is adapter i's half-open range of
    ranks, empty where it has nothing in this group.
    """

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]
    scale: torch.Tensor
    spans: tuple[tuple[int, int], ...]

    @property
    def ranks(self) -> int:
        return self.a.shape[1]


def rank_mask(layout: RowLayout, spans: Sequence[tuple[int, int]], ranks: int) -> torch.Tensor:
    """Return a bool [lora_rows, ranks]: True where the rank belongs to the row's own adapter."""
    mask = torch.zeros(layout.lora_rows, ranks, dtype=torch.bool)
    for segment in layout.segments:
        start, end = spans[segment.adapter]
        mask[segment.start - layout.base_rows : segment.end - layout.base_rows, start:end] = True
    return mask


def add_grouped(
    y: torch.Tensor, x: torch.Tensor, *, bank: Bank, layer: int, layout: RowLayout, mask: torch.Tensor
) -> None:
    """Add all adapters to y through one masked shrink and one expand per sub.

    Semantics: as `lora_reference` for each sub, whose columns in y follow each other.
    Shapes: y [rows, sum(out)], x [rows, in], mask from `rank_mask`; one dtype. In place; rows [0, base_rows) untouched.
    A foreign adapter's product is discarded by selection, not by multiplication: an overflow there stays there.
    """
    low = layout.base_rows
    subs = len(bank.b)
    shrunk = x[low:] @ bank.a[layer].view(-1, x.shape[1]).t()
    scaled = shrunk.view(-1, bank.ranks, subs) * bank.scale[layer]
    own = torch.where(mask.unsqueeze(-1), scaled, 0.0).to(x.dtype)
    column = 0
    for sub, b in enumerate(bank.b):
        width = b.shape[2]
        y[low:, column : column + width].addmm_(own[:, :, sub], b[layer])
        column += width


def add_segmented(y: torch.Tensor, x: torch.Tensor, *, bank: Bank, layer: int, layout: RowLayout) -> None:
    """Add each adapter to its own rows, one adapter after the other. Semantics and shapes as `add_grouped`."""
    subs = len(bank.b)
    for segment in layout.segments:
        start, end = bank.spans[segment.adapter]
        if start == end:
            continue
        rows = slice(segment.start, segment.end)
        shrunk = x[rows] @ bank.a[layer, start:end].view(-1, x.shape[1]).t()
        scaled = (shrunk.view(-1, end - start, subs) * bank.scale[layer, start:end]).to(x.dtype)
        column = 0
        for sub, b in enumerate(bank.b):
            width = b.shape[2]
            y[rows, column : column + width].addmm_(scaled[:, :, sub], b[layer, start:end])
            column += width
