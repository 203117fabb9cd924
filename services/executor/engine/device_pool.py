"""The numbers of the adapter pool: A and B rank rows in pages, and the arrangement of a step's adapters on them.

Layout per group: a [layers, pages * page_rows, subs, in]; b [layers, pages * page_rows, sum(out)], each sub's part
after the other. An adapter's rank row i lives in pool row pages[i // page_rows] * page_rows + i % page_rows of every
group. Steps read the rows there; nothing is copied for them.

Pages are zeroed when they are freed. With `poison` they are filled with NaN instead and zeroed when they are given
out, so that a test sees any read of a page without an owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.executor.engine.staging import Staged
from services.executor.kernels.layout import GroupSpec, RowLayout, page_rows
from services.executor.kernels.shrink_expand import Bank
from services.executor.model.lora_linear import EmbeddingAdapter, GroupAdapter, LoraBatch, base_batch, make_batch

# What adapters are kept and computed in on a CPU, whatever the base's dtype: nothing of a published number is lost, and
# no CPU path is faster in another.
POOL_DTYPE = torch.float32

# Written at a time: an output head's rows of rank 256 are 50 MB on a vocabulary of 49,000, too much between two steps.
PIECE_BYTES = 1 << 20

# Steps whose arrangement is kept: decoding repeats the last one, and its head's, until a row joins or leaves.
_KEPT_BATCHES = 4


def page_bytes(groups: Sequence[GroupSpec], *, rows_per_page: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page over all groups of linears and all layers."""
    return sum(g.values_per_rank for g in groups if g.kind == "linear") * rows_per_page * dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Bound:
    """A revision on its pages. `generation` differs for every load, so no arrangement outlives what it was made of."""

    pages: tuple[int, ...]
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
        device: str = "cpu",
        poison: bool = False,
    ) -> None:
        self._all_groups = tuple(groups)
        self.groups = tuple(g for g in groups if g.kind == "linear")
        self.rows_per_page = rows_per_page
        self._poison = poison
        self._device_type = torch.device(device).type
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
        for page in pages:
            rows = slice(page * self.rows_per_page, (page + 1) * self.rows_per_page)
            for tensor in self._tensors():
                tensor[:, rows] = value

    def prepare(self, pages: Sequence[int]) -> None:
        """Make newly given pages zero."""
        if self._poison:
            self._fill(pages, 0.0)

    def scrub(self, pages: Sequence[int]) -> None:
        """Erase pages that lost their owner, and forget every arrangement that reads them."""
        if not pages:
            return
        gone = set(pages)
        self._bound = {k: b for k, b in self._bound.items() if not gone.intersection(b.pages)}
        self._batches.clear()
        self._fill(pages, float("nan") if self._poison else 0.0)

    def write(self, staged: Staged, pages: Sequence[int]) -> Iterator[int]:
        """Copy a staged revision to its pages, up to PIECE_BYTES of one layer of one group at a time; yields the bytes.

        The caller may stop between yields to run a step: pages of a revision that is not bound are read by nobody.
        """
        for group in self.groups:
            part = staged.groups.get(group.name)
            if part is None:
                continue
            bank = self.banks[group.name]
            rows = torch.tensor(page_rows(pages, rank=part.rank, rows_per_page=self.rows_per_page))
            bank.scale.index_copy_(1, rows, part.scale)
            row_bytes = part.a[0, 0].nbytes + sum(b[0, 0].nbytes for b in part.b)
            many = max(1, PIECE_BYTES // row_bytes)
            for layer in range(group.layers):
                for first in range(0, part.rank, many):
                    some, to = slice(first, first + many), rows[first : first + many]
                    bank.a[layer].index_copy_(0, to, part.a[layer, some])
                    for target, source in zip(bank.b[layer].split(bank.widths, dim=1), part.b, strict=True):
                        target.index_copy_(0, to, source[layer, some])
                    yield len(to) * row_bytes

    def bind(self, staged: Staged, pages: tuple[int, ...]) -> None:
        """Make a written revision usable in `arrange`."""
        self._generation += 1
        groups = {}
        for name, part in staged.groups.items():
            rows = page_rows(pages, rank=part.rank, rows_per_page=self.rows_per_page)
            # Rank rows above a module's own rank are zero, so its first row's scaling is the module's.
            groups[name] = GroupAdapter(self.banks[name], rows, part.scale[:, 0].tolist())
        part = staged.embedding
        embedding = None if part is None else EmbeddingAdapter(part.a, part.b, part.scaling)
        self._bound[staged.revision_id] = _Bound(pages, groups, embedding, self._generation)

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

    def arrange(self, layout: RowLayout, revisions: tuple[str, ...]) -> LoraBatch:
        """Return the adapters of a step's rows. `revisions[i]` is adapter i of the layout.

        Raises:
            KeyError: a revision is not bound.
        """
        if not layout.segments:
            return base_batch(layout)
        bound = [self._bound[r] for r in revisions]
        key = (layout, tuple(b.generation for b in bound))
        batch = self._batches.get(key)
        if batch is None:
            batch = make_batch(
                layout,
                self.banks,
                [b.groups for b in bound],
                embeddings=[b.embedding for b in bound],
                device_type=self._device_type,
            )
            while len(self._batches) >= _KEPT_BATCHES:
                del self._batches[next(iter(self._batches))]
            self._batches[key] = batch
        return batch
