"""The adapters of a GPU's steps: chooses each step's kernels and holds their buffers. Owned by the device thread."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from services.executor.kernels.layout import GroupSpec, RowLayout, make_layout
from services.executor.kernels.reference import ReferenceStep
from services.executor.kernels.shrink_expand import Bank
from services.executor.kernels.variants import (
    VARIANTS,
    KernelTable,
    chip_of,
    choose_variant,
    read_table,
)
from services.executor.kernels.work import GroupShape, Resident, WorkLimits

if TYPE_CHECKING:
    from services.executor.kernels.triton_lora import TritonLora, TritonStep

_USUAL_RANKS = (16, 64)  # narrow and wide: by them a graph's variants are chosen; the most usual first
_MOST_BYTES = 2**20  # of a table's file
TABLES = Path(__file__).resolve().parent / "tables"


def table_path(gpu: str) -> Path:
    """Return where the measured table of a GPU lies: its name in small letters, other characters as dashes."""
    return TABLES / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def load_table(gpu: str) -> KernelTable | None:
    """Return the measured table of a GPU by its name; None where nobody measured one.

    Raises:
        ValueError: the table is not readable as one, or was measured on a GPU of another name.
    """
    path = table_path(gpu)
    if not path.is_file():
        return None
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path.name} is too large for a kernel table")
    try:
        table = read_table(json.loads(path.read_text()))
    except (ValueError, RecursionError) as error:  # no JSON, no text, or none of ours
        raise ValueError(f"{path.name} is not a kernel table: {error}") from error
    if table.gpu != gpu:
        raise ValueError(f"{path.name} was measured on {table.gpu!r}, this is {gpu!r}")
    return table


class GpuLora:
    """Kernels over one pool. `limits` bounds every step; `gpu` is the device's name and picks table and roofline.

    Without Triton every step takes `ReferenceStep`: right, and slow.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        banks: Mapping[str, Bank],
        *,
        rows_per_page: int,
        limits: WorkLimits,
        gpu: str,
        multiprocessors: int,
    ) -> None:
        self._banks = banks
        self._rows_per_page = rows_per_page
        self._groups = tuple(groups)
        self._shapes = [GroupShape(g.in_features, g.out_features, g.layers) for g in groups]
        self._chip, self._table = chip_of(gpu), load_table(gpu)
        self._element_bytes = banks[groups[0].name].a.element_size()
        self._kernels = self._make_kernels(limits, multiprocessors) if find_spec("triton") else {}
        self._chosen: tuple[RowLayout, tuple[int, ...], str] | None = None

    def _make_kernels(self, limits: WorkLimits, multiprocessors: int) -> dict[str, TritonLora]:
        from services.executor.kernels.triton_lora import TritonLora, scratch_numbers

        own = {name: replace(limits, rows=min(limits.rows, v.max_rows)) for name, v in VARIANTS.items()}
        most = max(scratch_numbers(self._groups, v, own[name]) for name, v in VARIANTS.items())
        device = self._banks[self._groups[0].name].a.device
        scratch = torch.empty(most, dtype=torch.float32, device=device)
        return {
            name: TritonLora(
                self._groups,
                self._banks,
                variant=variant,
                rows_per_page=self._rows_per_page,
                limits=own[name],
                multiprocessors=multiprocessors,
                scratch=scratch,
            )
            for name, variant in VARIANTS.items()
        }

    @property
    def memory_bytes(self) -> int:
        """Device bytes that the kernels hold beside the pool: metadata of every variant, one scratch."""
        one = next(iter(self._kernels.values()), None)
        return sum(lora.memory_bytes for lora in self._kernels.values()) + (one.scratch.nbytes if one else 0)

    @property
    def can_be_captured(self) -> bool:
        """Say whether a graph may hold the kernels: plain torch reads each step's own lists."""
        return bool(self._kernels)

    def arrange(
        self, layout: RowLayout, residents: Sequence[Resident], *, variant: str | None = None
    ) -> TritonStep | ReferenceStep:
        """Return the step's adapters on the kernels that suit it, or on a given variant. `residents[i]` is adapter i.

        A step of the same variant is usable until the next one is arranged.
        """
        if not self._kernels:
            return ReferenceStep(layout, tuple(residents), self._banks, self._rows_per_page)
        return self._kernels[variant or self.own_variant(layout, residents)].load(layout, residents)

    def usual_variants(self, rows: int, adapters: int) -> tuple[str, ...]:
        """Return the variants for `rows` decode rows shared evenly by `adapters` adapters of usual ranks, most usual
        first, each once.

        A graph holds one variant. It is right for every step of that size, and fast for the usual ones.
        """
        adapters = min(adapters, rows)
        counts = [rows // adapters + (i < rows % adapters) for i in range(adapters)]
        layout = make_layout(range(adapters), counts)
        return tuple(dict.fromkeys(self._variant(layout, (rank,) * adapters) for rank in _USUAL_RANKS))

    def own_variant(self, layout: RowLayout, residents: Sequence[Resident]) -> str:
        """Return the variant that `arrange` takes for a step when it is given none. There must be Triton."""
        ranks = tuple(max(r.ranks.values(), default=0) for r in residents)
        if self._chosen is None or self._chosen[:2] != (layout, ranks):
            self._chosen = (layout, ranks, self._variant(layout, ranks))
        return self._chosen[2]

    def _variant(self, layout: RowLayout, ranks: tuple[int, ...]) -> str:
        return choose_variant(
            layout,
            ranks=ranks,
            shapes=self._shapes,
            element_bytes=self._element_bytes,
            chip=self._chip,
            table=self._table,
        ).name

    def compile(self) -> int:
        """Compile every kernel that a step may choose, by a step without adapters; return how many variants.

        To be called before the first request: a shape that does not compile fails here and not there.
        """
        empty = RowLayout(1, 1, ())
        for lora in self._kernels.values():
            step = lora.load(empty, ())
            for group in self._groups:
                bank = self._banks[group.name]
                y = bank.b.new_zeros(1, sum(group.out_features))
                step.add(group.name, 0, y, bank.a.new_zeros(1, group.in_features))
        return len(self._kernels)
