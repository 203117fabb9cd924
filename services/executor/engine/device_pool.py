"""The numbers of the adapter pool: A and B rank rows in pages, and the arrangement of a step's adapters on them.

Layout per group: a [layers, pages * page_rows, subs, in]; b [layers, pages * page_rows, sum(out)], each sub's part
after the other. An adapter's rank row i lives in pool row pages[i // page_rows] * page_rows + i % page_rows of every
group. Steps read the rows there; nothing is copied for them.

On a CPU the rows are float32, or bfloat16 where a matrix unit reads them (`lora_linear.py`); on a GPU they have the
base's dtype and the kernels read them (`gpu_lora.py`), in the same layout. Bytes come over a link (`device_link.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.executor.engine.device_link import CpuLink, DeviceLink
from services.executor.engine.staging import Staged
from services.executor.kernels.cpu_step import CpuStep
from services.executor.kernels.layout import GroupSpec, RowLayout, page_rows
from services.executor.kernels.shrink_expand import Bank
from services.executor.kernels.work import Resident
from services.executor.model.interface import Adapters
from services.executor.model.kernel_batch import KernelBatch, KernelStep
from services.executor.model.lora_linear import (
    EmbeddingAdapter,
    GroupAdapter,
    LoraBatch,
    base_batch,
    embedded_rows,
    make_batch,
)

# What adapters are kept and computed in on a CPU, whatever the base's dtype: nothing of a published number is lost.
# Only a matrix unit is faster in another (`cpu_backend`).
POOL_DTYPE = torch.float32

# Steps whose arrangement is kept: decoding repeats the last one, and its head's, until a row joins or leaves.
_KEPT_BATCHES = 4


def page_bytes(groups: Sequence[GroupSpec], *, rows_per_page: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page over all groups of linears and all layers."""
    return sum(g.values_per_rank for g in groups if g.kind == "linear") * rows_per_page * dtype.itemsize


class StepKernels(Protocol):
    """What computes a step's adapters on a GPU: `gpu_lora.GpuLora`."""

    def arrange(self, layout: RowLayout, residents: Sequence[Resident]) -> KernelStep:
        """Return the step; `residents[i]` is adapter i of the layout."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """A revision on its pages. `generation` differs for every load, so no arrangement outlives what it was made of."""

    resident: Resident
    groups: Mapping[str, GroupAdapter]
    embedding: EmbeddingAdapter | None
    generation: int


class DevicePool:
    """Owned by the device thread."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        page_count: int,
        rows_per_page: int,
        dtype: torch.dtype = POOL_DTYPE,
        device: torch.device | str = "cpu",
        link: DeviceLink | None = None,
        poison: bool = False,
        step: CpuStep | None = None,
    ) -> None:
        self._step = step
        self._all_groups = tuple(groups)
        self.groups = tuple(g for g in groups if g.kind == "linear")
        self.rows_per_page = rows_per_page
        self._poison = poison
        self._device = torch.device(device)
        self._link = link or CpuLink()
        self._landing: set[int] = set()  # pages that copies may still be writing to
        self._arriving: dict[int, EmbeddingAdapter] = {}  # by the first page; kept until no copy writes to it
        self.kernels: StepKernels | None = None
        self._generation = 0
        self._bound: dict[str, _Bound] = {}
        self._batches: dict[tuple[RowLayout, tuple[int, ...]], LoraBatch] = {}
        rows = page_count * rows_per_page
        self.banks: dict[str, Bank] = {}
        for g in self.groups:
            subs, wide = len(g.out_features), sum(g.out_features)
            self.banks[g.name] = Bank(
                torch.zeros(g.layers, rows, subs, g.in_features, dtype=dtype, device=device),
                torch.zeros(g.layers, rows, wide, dtype=dtype, device=device),
                torch.zeros(g.layers, rows, subs, dtype=torch.float32, device=device),
                g.out_features,
            )
        if poison:
            self._fill(range(page_count), float("nan"))

    def _tensors(self) -> Iterator[torch.Tensor]:
        for bank in self.banks.values():
            yield from (bank.a, bank.b, bank.scale)

    def _fill(self, pages: Sequence[int] | range, value: float) -> None:
        for first, last in _runs(pages):
            rows = slice(first * self.rows_per_page, last * self.rows_per_page)
            for tensor in self._tensors():
                tensor[:, rows].fill_(value)

    def prepare(self, pages: Sequence[int]) -> None:
        """Make newly given pages zero."""
        if self._poison:
            self._fill(pages, 0.0)

    def scrub(self, pages: Sequence[int]) -> None:
        """Erase pages that lost their owner, and forget every arrangement that reads them."""
        if not pages:
            return
        gone = set(pages)
        if gone & self._landing:  # A load was stopped on its way.
            self._link.before_steps()
            self._landing -= gone
        for page in gone:
            self._arriving.pop(page, None)
        self._bound = {k: b for k, b in self._bound.items() if not gone.intersection(b.resident.pages)}
        self._batches.clear()
        self._fill(pages, float("nan") if self._poison else 0.0)

    def write(self, staged: Staged, pages: Sequence[int]) -> Iterator[int]:
        """Copy a staged revision to its pages and beside them, a piece at a time; yields each piece's bytes.

        The caller may stop between yields to run a step: pages of a revision that is not bound are read by nobody.
        A yield of 0 says that copies are on their way and there is nothing to do meanwhile. At the end all have landed.
        """
        part = staged.embedding
        if part is not None:
            a, b = (torch.empty_like(matrix, device=self._device) for matrix in (part.a, part.b))
            self._arriving[pages[0]] = EmbeddingAdapter(a, b, part.scaling)
        self._landing.update(pages)
        self._link.after_steps()
        if part is not None:
            yield from self._put_rows(a, part.a)
            yield from self._put_rows(b, part.b)
        for group in self.groups:
            part = staged.groups.get(group.name)
            if part is None:
                continue
            bank = self.banks[group.name]
            rows = self._link.index(page_rows(pages, rank=part.rank, rows_per_page=self.rows_per_page))
            self._link.put(bank.scale, rows, part.scale)
            row_bytes = part.a[0, 0].nbytes + part.b[0, 0].nbytes
            for layers, some in _pieces(group.layers, part.rank, most=max(1, self._link.piece_bytes // row_bytes)):
                for target, source in ((bank.a, part.a), (bank.b, part.b)):
                    self._link.put(target[layers], rows[some], source[layers, some])
                yield (layers.stop - layers.start) * (some.stop - some.start) * row_bytes
        landing = self._link.mark()
        while not landing.query():
            yield 0
        self._landing.difference_update(pages)

    def _put_rows(self, target: torch.Tensor, source: torch.Tensor) -> Iterator[int]:
        row_bytes = source[0].nbytes
        most = max(1, self._link.piece_bytes // row_bytes)
        for first in range(0, len(source), most):
            some = range(first, min(first + most, len(source)))
            self._link.put(target[None], self._link.index(some), source[None, some.start : some.stop])
            yield len(some) * row_bytes

    def bind(self, staged: Staged, pages: tuple[int, ...]) -> None:
        """Make a written revision usable in `arrange`."""
        self._generation += 1
        groups = {}
        resident = Resident(pages, {name: part.rank for name, part in staged.groups.items()})
        for name, part in staged.groups.items():
            rows = page_rows(pages, rank=part.rank, rows_per_page=self.rows_per_page)
            # Rank rows above a module's own rank are zero, so its first row's scaling is the module's.
            groups[name] = GroupAdapter(self.banks[name], rows, part.scale[:, 0].tolist())
        embedding = self._arriving.pop(pages[0], None)
        self._bound[staged.revision_id] = _Bound(resident, groups, embedding, self._generation)

    def deltas(self, revision_id: str) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield path, kind and what a bound revision adds to the weight of every module that it touches, float32.

        Raises:
            KeyError: the revision is not bound.
        """
        bound = self._bound[revision_id]
        for group in self.groups:
            part = bound.groups.get(group.name)
            for layer, paths in enumerate(group.paths) if part is not None else ():
                for path, delta, scaling in zip(paths, part.deltas(layer), part.scaling[layer], strict=True):
                    if scaling != 0:
                        yield path, "linear", delta
        if bound.embedding is not None:
            (group,) = (g for g in self._all_groups if g.kind == "embedding")
            yield group.paths[0][0], "embedding", bound.embedding.delta()

    def residents(self, revisions: Sequence[str]) -> list[Resident] | None:
        """Return where bound revisions lie; None when one of them has a part outside the pages, in the embedding.

        Raises:
            KeyError: a revision is not bound.
        """
        bound = [self._bound[r] for r in revisions]
        return None if any(b.embedding for b in bound) else [b.resident for b in bound]

    def arrange(self, layout: RowLayout, revisions: tuple[str, ...]) -> Adapters:
        """Return the adapters of a step's rows. `revisions[i]` is adapter i of the layout.

        Raises:
            KeyError: a revision is not bound.
        """
        if not layout.segments:
            return base_batch(layout)
        bound = [self._bound[r] for r in revisions]
        if self.kernels is not None:
            step = self.kernels.arrange(layout, [b.resident for b in bound])
            touched = frozenset(name for b in bound for name in b.groups)
            return KernelBatch(step, touched, embedded_rows(layout, [b.embedding for b in bound]))
        key = (layout, tuple(b.generation for b in bound))
        batch = self._batches.get(key)
        if batch is None:
            batch = make_batch(
                layout,
                self.banks,
                [b.groups for b in bound],
                embeddings=[b.embedding for b in bound],
                device_type=self._device.type,
                step=self._step,
            )
            while len(self._batches) >= _KEPT_BATCHES:
                del self._batches[next(iter(self._batches))]
            self._batches[key] = batch
        return batch


def _runs(pages: Sequence[int] | range) -> Iterator[tuple[int, int]]:
    """Cut pages into runs [first, last) of adjacent ones."""
    ordered = sorted(pages)
    first = 0
    for at in range(1, len(ordered) + 1):
        if at == len(ordered) or ordered[at] != ordered[at - 1] + 1:
            yield ordered[first], ordered[at - 1] + 1
            first = at


def _pieces(layers: int, rank: int, *, most: int) -> Iterator[tuple[slice, slice]]:
    """Cut [layers, rank] into parts of at most `most` rank rows: whole layers where they fit, else a layer's."""
    if rank <= most:
        step = most // rank
        for layer in range(0, layers, step):
            yield slice(layer, min(layer + step, layers)), slice(0, rank)
        return
    for layer in range(layers):
        for first in range(0, rank, most):
            yield slice(layer, layer + 1), slice(first, min(first + most, rank))
