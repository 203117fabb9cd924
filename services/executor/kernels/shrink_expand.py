"""LoRA over segments on torch: the CPU backend. See `reference.py` for the exact semantics. Everything is float32, but
for what the compiled step takes.

Nothing is packed for a step: both ways read rank rows in the pool, where they lie.
 - Few rows of an adapter (`PagedStep`): one sampled product for the shrink (exactly the pairs of row and rank that
   exist) and one weighted sum of rank rows for the expand. No arithmetic and no memory beyond the ranks that are
   there; the adapters of the step take two calls together.
 - Many rows of an adapter (`add_run`): one dense product per shrink and per expand, adapter after adapter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.executor.kernels.cpu_step import CpuStep, LoraStep
from services.executor.kernels.threads import on_one_thread

# Multiply-adds below which a dense product is left to one thread. MKL shares it from 28 rows on, and handing over costs
# more than it gains: rank 8 to 1,536 columns takes 13 µs for 24 rows and 34 µs for 32.
_SHARED = 1 << 20


@dataclass(frozen=True, slots=True)
class Bank:
    """One group of the pool, over all layers.

    Shapes: a [layers, pool rows, subs, in]; b [layers, pool rows, sum(widths)], a rank row's parts one after the other;
    scale [layers, pool rows, subs].
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: torch.Tensor
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One adapter in one group, as dense operands per layer.

    Shapes per layer: shrink [in, rank * subs], a view or a copy; expand one [rank, width] per sub. `scaling` is 0 for a
    module that the adapter does not touch.
    """

    shrink: tuple[torch.Tensor, ...]
    expand: tuple[tuple[torch.Tensor, ...], ...]
    scaling: tuple[tuple[float, ...], ...]


def make_run(bank: Bank, rows: Sequence[int], scaling: Sequence[Sequence[float]]) -> Run | None:
    """Return views of the pool rows, None unless they are adjacent. `scaling[layer][sub]`."""
    first, count = rows[0], len(rows)
    if list(rows) != list(range(first, first + count)):
        return None
    layers, size = range(bank.a.shape[0]), bank.a.shape[3]
    return Run(
        tuple(bank.a[layer, first : first + count].view(-1, size).t() for layer in layers),
        tuple(bank.b[layer, first : first + count].split(bank.widths, dim=1) for layer in layers),
        tuple(tuple(values) for values in scaling),
    )


def gather_run(bank: Bank, rows: torch.Tensor, scaling: Sequence[float], layer: int) -> Run:
    """Return one layer's operands of scattered pool rows, copied; index them with layer 0."""
    a, b = bank.a[layer].index_select(0, rows), bank.b[layer].index_select(0, rows)
    return Run((a.view(-1, a.shape[2]).t(),), (b.split(bank.widths, dim=1),), (tuple(scaling),))


def add_run(y: torch.Tensor, x: torch.Tensor, run: Run, layer: int) -> None:
    """Add one adapter to all rows of y, in place. Shapes: y [rows, sum(widths)], x [rows, in]."""
    parts = run.expand[layer]
    rank, widest = parts[0].shape[0], max(part.shape[1] for part in parts)
    if x.shape[0] * rank * widest >= _SHARED:
        _add_run(y, x, run, layer)
        return
    on_one_thread(_add_run, y, x, run, layer)


def _add_run(y: torch.Tensor, x: torch.Tensor, run: Run, layer: int) -> None:
    shrunk = torch.mm(x, run.shrink[layer])
    parts, scaling = run.expand[layer], run.scaling[layer]
    if len(parts) == 1:
        y.addmm_(shrunk, parts[0], alpha=scaling[0])
        return
    split = shrunk.view(x.shape[0], -1, len(parts)).permute(2, 0, 1).contiguous()
    column = 0
    for sub, part in enumerate(parts):
        width = part.shape[1]
        if scaling[sub] != 0.0:
            y.narrow(1, column, width).addmm_(split[sub], part, alpha=scaling[sub])
        column += width


class PagedStep:
    """The rows of one step that have few neighbours with the same adapter, in one group.

    `ranks[i]` are the pool rows of row i's adapter. A rank row's expand is cut into pieces of one width, so that all
    subs are one table: q|k|v of grouped heads into pieces of the width of k.
    """

    def __init__(self, bank: Bank, ranks: Sequence[torch.Tensor]) -> None:
        subs, width = len(bank.widths), math.gcd(*bank.widths)
        pieces = sum(bank.widths) // width
        sub_of = [sub for sub, w in enumerate(bank.widths) for _ in range(w // width)]
        counts = torch.tensor([len(r) for r in ranks])
        parts = {id(r): r for r in ranks}  # Rows of one adapter share their tensor, and so the lists made of it.
        shrink = {key: _spread(r, subs).view(-1) for key, r in parts.items()}
        expand = {key: _spread(r, pieces).view(-1) for key, r in parts.items()}
        shrunk = torch.cat([shrink[id(r)] for r in ranks])
        self._picked = torch.cat([expand[id(r)] for r in ranks])
        self._offsets = _starts(counts.repeat_interleave(pieces))[:-1].contiguous()
        self._order = None if pieces == subs else _order(counts, torch.tensor(sub_of), subs)
        self._pattern = torch.sparse_csr_tensor(
            _starts(counts * subs), shrunk, torch.zeros(len(shrunk)), (len(ranks), bank.a.shape[1] * subs),
            check_invariants=False,
        )  # fmt: skip
        self._scale = bank.scale.view(bank.scale.shape[0], -1).index_select(1, shrunk)
        self._a = bank.a.view(bank.a.shape[0], -1, bank.a.shape[3]).transpose(1, 2)
        self._b = bank.b.view(bank.b.shape[0], -1, width)

    def add(self, y: torch.Tensor, x: torch.Tensor, layer: int) -> None:
        """Add every row's own adapter to y, in place. Shapes: y [rows, sum(widths)], x [rows, in]."""
        shrunk = torch.sparse.sampled_addmm(self._pattern, x, self._a[layer], beta=0.0).values()
        shrunk.mul_(self._scale[layer])
        if self._order is not None:
            shrunk = shrunk.index_select(0, self._order)
        table = self._b[layer]
        total = torch.embedding_bag(table, self._picked, self._offsets, False, 0, False, shrunk, False)[0]
        y.add_(total.view(y.shape))


class CompiledRows:
    """All adapters by the compiled step. `runs` are the rows of the step that each has, and its pool rows."""

    def __init__(self, bank: Bank, runs: Sequence[tuple[range, torch.Tensor]], step: CpuStep) -> None:
        self._step = step
        pool = (bank.a, bank.b, bank.scale)
        self._rows = LoraStep(pool, [rows for rows, _ in runs], [ranks for _, ranks in runs], bank.widths)

    def add(self, y: torch.Tensor, x: torch.Tensor, layer: int) -> None:
        """Add every row's own adapter to y, in place. Shapes: y [rows, sum(widths)], x [rows, in], all of the step.

        Both float32, or both bfloat16; bfloat16 where the pool is.
        """
        self._step.lora(x.contiguous(), y, self._rows, layer)

    def takes(self, dtype: torch.dtype) -> bool:
        """Says whether rows may be of this type: bfloat16, or what the pool is."""
        return dtype is torch.bfloat16 or (dtype is torch.float32 and not self._rows.halves)


def _spread(rows: torch.Tensor, parts: int) -> torch.Tensor:
    """Return [parts, ranks]: where part p of every rank row lies in a table of rank rows cut into `parts`."""
    return rows[None, :] * parts + torch.arange(parts)[:, None]


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """Return len(counts) + 1 offsets of runs of these lengths."""
    return torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))


def _order(counts: torch.Tensor, sub_of: torch.Tensor, subs: int) -> torch.Tensor:
    """Return the shrunk number of each picked piece. Numbers lie by (row, sub, rank), pieces by (row, piece, rank)."""
    starts = _starts(counts * subs)
    runs = [
        int(start) + (sub_of[:, None] * int(count) + torch.arange(int(count))[None, :]).view(-1)
        for start, count in zip(starts, counts, strict=False)
    ]
    return torch.cat(runs)
