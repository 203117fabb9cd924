"""A linear (or several that share their input) with the step's adapters on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.executor.kernels.dispatch import GROUPED, choose_path
from services.executor.kernels.layout import RowLayout
from services.executor.kernels.shrink_expand import Bank, add_grouped, add_segmented, rank_mask


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """The adapters of one packed tensor of rows: layout, banks by group name, and the path that computes them."""

    layout: RowLayout
    banks: Mapping[str, Bank]
    masks: Mapping[str, torch.Tensor]
    path: str

    def add(self, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the adapters of `group` in `layer` to y, in place; base rows are untouched.

        Shapes: y [rows, sum(out)], x [rows, in].
        """
        bank = self.banks.get(group)
        if bank is None or not self.layout.segments:
            return
        if self.path == GROUPED:
            add_grouped(y, x, bank=bank, layer=layer, layout=self.layout, mask=self.masks[group])
        else:
            add_segmented(y, x, bank=bank, layer=layer, layout=self.layout)


def make_batch(layout: RowLayout, banks: Mapping[str, Bank], *, device_type: str) -> LoraBatch:
    """Choose the path for these rows and prepare its masks."""
    path = choose_path(layout, device_type=device_type)
    masks = {}
    if path == GROUPED:
        by_spans: dict[Sequence[tuple[int, int]], torch.Tensor] = {}
        for name, bank in banks.items():
            if bank.spans not in by_spans:
                by_spans[bank.spans] = rank_mask(layout, bank.spans, bank.ranks)
            masks[name] = by_spans[bank.spans]
    return LoraBatch(layout, banks, masks, path)
