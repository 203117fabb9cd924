"""A step's adapters, arranged once for all linears and layers, and added on top of the base's products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.executor.kernels.cpu_step import CpuStep
from services.executor.kernels.dispatch import BASE, choose_path, has_many_rows
from services.executor.kernels.layout import RowLayout, Segment
from services.executor.kernels.shrink_expand import Bank, CompiledRows, PagedStep, Run, add_run, gather_run, make_run


class GroupAdapter:
    """What one adapter has in one group: its pool rows, and alpha / rank per layer and sub (0: module not touched)."""

    __slots__ = ("_bank", "_run", "rows", "scaling")

    def __init__(self, bank: Bank, rows: Sequence[int], scaling: Sequence[Sequence[float]]) -> None:
        self.rows = torch.tensor(rows, device=bank.a.device)
        self.scaling = scaling
        self._bank = bank
        self._run: Run | None = None

    def add(self, y: torch.Tensor, x: torch.Tensor, layer: int) -> None:
        """Add this adapter to all rows of y, in place."""
        if self._run is None:
            self._run = make_run(self._bank, self.rows.tolist(), self.scaling)
        if self._run is not None:
            add_run(y, x, self._run, layer)
        else:
            add_run(y, x, gather_run(self._bank, self.rows, self.scaling[layer], layer), 0)

    def deltas(self, layer: int) -> list[torch.Tensor]:
        """Return scaling * B @ A of every sub, [out, in]; zero where the adapter does not touch the module."""
        a, b = self._bank.a[layer].index_select(0, self.rows), self._bank.b[layer].index_select(0, self.rows)
        parts = zip(b.float().split(self._bank.widths, dim=1), self.scaling[layer], strict=True)
        return [(part.t() @ a[:, sub].float()) * scaling for sub, (part, scaling) in enumerate(parts)]


@dataclass(frozen=True, slots=True)
class EmbeddingAdapter:
    """What one adapter adds to token embeddings. Shapes: a [vocab, rank], b [rank, hidden]; computed in float32."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def add(self, y: torch.Tensor, tokens: torch.Tensor, gain: float) -> None:
        """Add to y [rows, hidden], in place, rounded once."""
        delta = (self.a.index_select(0, tokens).float() @ self.b.float()).mul_(self.scaling * gain)
        y.copy_(y + delta)

    def delta(self) -> torch.Tensor:
        """Return what the adapter adds to the embedding's weight, [vocab, hidden]."""
        return (self.a.float() @ self.b.float()).mul_(self.scaling)


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One group's part of a step: dense products for `many` runs of rows, one call for the rows `few` (None: all)."""

    many: tuple[tuple[slice, GroupAdapter], ...]
    together: PagedStep | CompiledRows | None
    few: slice | torch.Tensor | None

    def takes(self, dtype: torch.dtype) -> bool:
        """Says whether rows may be of this type."""
        return self.together.takes(dtype) if isinstance(self.together, CompiledRows) else dtype is torch.float32

    def add(self, y: torch.Tensor, x: torch.Tensor, layer: int) -> None:
        """Add to y in place. Shapes: y [rows, sum(out)], x [rows, in]; float32, or what the compiled step takes."""
        for rows, adapter in self.many:
            adapter.add(y[rows], x[rows], layer)
        if self.together is None:
            return
        if self.few is None:
            self.together.add(y, x, layer)
        elif isinstance(self.few, slice):
            self.together.add(y[self.few], x[self.few], layer)
        else:
            some = y.index_select(0, self.few)
            self.together.add(some, x.index_select(0, self.few), layer)
            y.index_copy_(0, self.few, some)


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """The adapters of one packed tensor of rows, by group name, and the path that computes them."""

    layout: RowLayout
    groups: Mapping[str, GroupBatch]
    path: str
    embeddings: tuple[tuple[slice, EmbeddingAdapter], ...] = ()

    def add(self, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the adapters of `group` in `layer` to y, in place; base rows are untouched.

        Shapes: y [rows, sum(out)], x [rows, in]. Sums are float32: y of another dtype is added to and rounded once.
        """
        part = self.groups.get(group)
        if part is None:
            return
        if y.dtype is x.dtype and part.takes(y.dtype) and y.is_contiguous():
            part.add(y, x, layer)
            return
        low = self.layout.base_rows
        if not part.takes(torch.float32):
            half = y.dtype is torch.bfloat16  # else what is added is rounded, and what it is added to is not
            own = y.clone(memory_format=torch.contiguous_format) if half else torch.zeros(y.shape, dtype=torch.bfloat16)
            part.add(own, x.to(torch.bfloat16), layer)
            y[low:] = own[low:] if half else y[low:] + own[low:]
            return
        own = y.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        part.add(own, x.float(), layer)
        y[low:] = own[low:].to(y.dtype)

    def add_embedding(self, y: torch.Tensor, tokens: torch.Tensor, *, gain: float = 1.0) -> None:
        """Add the adapters of the token embedding to y, in place. Shapes: y [rows, hidden], tokens int64 [rows].

        `gain` is the factor that the base's own embedding is multiplied by, where it has one.
        """
        for rows, adapter in self.embeddings:
            adapter.add(y[rows], tokens[rows], gain)


def base_batch(layout: RowLayout) -> LoraBatch:
    """Return the batch of a step without adapters."""
    return LoraBatch(layout, {}, BASE)


def make_batch(
    layout: RowLayout,
    banks: Mapping[str, Bank],
    adapters: Sequence[Mapping[str, GroupAdapter]],
    *,
    embeddings: Sequence[EmbeddingAdapter | None] = (),
    device_type: str,
    step: CpuStep | None = None,
) -> LoraBatch:
    """Arrange a step. `adapters[i]` has adapter i of the layout, by the names of the groups that it touches;
    `embeddings[i]` what it adds to token embeddings. `step` computes all of them, where it is there."""
    path = choose_path(layout, device_type=device_type, compiled=step is not None)
    groups = {}
    for name, bank in banks.items():
        own = [adapter.get(name) for adapter in adapters]
        if any(own):
            groups[name] = _group_batch(layout.segments, bank, own, step)
    return LoraBatch(layout, groups, path, embedded_rows(layout, embeddings))


def embedded_rows(
    layout: RowLayout, embeddings: Sequence[EmbeddingAdapter | None]
) -> tuple[tuple[slice, EmbeddingAdapter], ...]:
    """Return the rows whose adapter touches the token embedding, with it. `embeddings[i]` is adapter i's."""
    found = []
    for segment in layout.segments if any(embeddings) else ():
        embedding = embeddings[segment.adapter]
        if embedding is not None:
            found.append((slice(segment.start, segment.end), embedding))
    return tuple(found)


def _group_batch(
    segments: Sequence[Segment], bank: Bank, own: Sequence[GroupAdapter | None], step: CpuStep | None
) -> GroupBatch:
    touched = [(segment, own[segment.adapter]) for segment in segments]
    if step is not None:
        runs = [
            (range(segment.start, segment.end), adapter.rows) for segment, adapter in touched if adapter is not None
        ]
        return GroupBatch((), CompiledRows(bank, runs, step) if runs else None, None)
    many: list[tuple[slice, GroupAdapter]] = []
    few: list[int] = []
    ranks: list[torch.Tensor] = []
    for segment, adapter in touched:
        if adapter is None:
            continue
        if has_many_rows(segment):
            many.append((slice(segment.start, segment.end), adapter))
        else:
            few += range(segment.start, segment.end)
            ranks += [adapter.rows] * segment.rows
    if not few:
        return GroupBatch(tuple(many), None, slice(0, 0))
    adjacent = few[-1] - few[0] + 1 == len(few)
    where = slice(few[0], few[-1] + 1) if adjacent else torch.tensor(few)
    return GroupBatch(tuple(many), PagedStep(bank, ranks), where)
