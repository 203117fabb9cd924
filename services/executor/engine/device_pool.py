"""The numbers of the adapter pool: A and B rank rows in pages, and the packed set of the active adapters.

Layout per group: a [layers, pages * page_rows, subs, in]; b[sub] [layers, pages * page_rows, out_sub]. An adapter's
rank row i lives in pool row pages[i // page_rows] * page_rows + i % page_rows of every group.

Pages are zeroed when they are freed. With `poison` they are filled with NaN instead and zeroed when they are given
out, so that a test sees any read of a page without an owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.executor.engine.staging import Staged
from services.executor.kernels.layout import GroupSpec, page_rows
from services.executor.kernels.shrink_expand import Bank


def page_bytes(groups: Sequence[GroupSpec], *, rows_per_page: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page over all groups and layers."""
    return sum(g.values_per_rank for g in groups) * rows_per_page * dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Bound:
    """A revision on its pages. `generation` differs for every load, so no packed set outlives what it was made of."""

    pages: tuple[int, ...]
    ranks: Mapping[str, int]
    scale: Mapping[str, torch.Tensor]
    generation: int


@dataclass(frozen=True, slots=True)
class ActiveSet:
    """The packed banks of the adapters in one step, in order."""

    revisions: tuple[str, ...]
    banks: Mapping[str, Bank]


class DevicePool:
    """Owned by the device thread."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        page_count: int,
        rows_per_page: int,
        dtype: torch.dtype,
        device: str = "cpu",
        poison: bool = False,
    ) -> None:
        self.groups = tuple(groups)
        self.rows_per_page = rows_per_page
        self._poison = poison
        self._generation = 0
        self._bound: dict[str, _Bound] = {}
        self._packed: tuple[tuple[tuple[str, int], ...], ActiveSet] | None = None
        rows = page_count * rows_per_page
        self._a = {
            g.name: torch.zeros(g.layers, rows, len(g.out_features), g.in_features, dtype=dtype, device=device)
            for g in groups
        }
        self._b = {
            g.name: tuple(torch.zeros(g.layers, rows, out, dtype=dtype, device=device) for out in g.out_features)
            for g in groups
        }
        if poison:
            self._fill(range(page_count), float("nan"))

    def _tensors(self) -> Iterator[torch.Tensor]:
        for group in self.groups:
            yield self._a[group.name]
            yield from self._b[group.name]

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
        """Erase pages that lost their owner, and forget every packed copy of them."""
        if not pages:
            return
        gone = set(pages)
        self._bound = {k: b for k, b in self._bound.items() if not gone.intersection(b.pages)}
        self._packed = None
        self._fill(pages, float("nan") if self._poison else 0.0)

    def write(self, staged: Staged, pages: Sequence[int]) -> Iterator[int]:
        """Copy a staged revision to its pages, one layer of one group at a time; yields the bytes copied.

        The caller may stop between yields to run a step: pages of a revision that is not bound are read by nobody.
        """
        for group in self.groups:
            part = staged.groups.get(group.name)
            if part is None:
                continue
            rows = torch.tensor(page_rows(pages, rank=part.rank, rows_per_page=self.rows_per_page))
            for layer in range(group.layers):
                self._a[group.name][layer].index_copy_(0, rows, part.a[layer])
                copied = part.a[layer].nbytes
                for target, source in zip(self._b[group.name], part.b, strict=True):
                    target[layer].index_copy_(0, rows, source[layer])
                    copied += source[layer].nbytes
                yield copied

    def bind(self, staged: Staged, pages: tuple[int, ...]) -> None:
        """Make a written revision usable in `activate`."""
        self._generation += 1
        ranks = {name: part.rank for name, part in staged.groups.items()}
        scale = {name: part.scale for name, part in staged.groups.items()}
        self._bound[staged.revision_id] = _Bound(pages, ranks, scale, self._generation)

    def activate(self, revisions: tuple[str, ...]) -> ActiveSet:
        """Return the packed banks of these revisions. The last set is kept: decoding repeats it step after step.

        Raises:
            KeyError: a revision is not bound.
        """
        key = tuple((r, self._bound[r].generation) for r in revisions)
        if self._packed is None or self._packed[0] != key:
            banks = {}
            for group in self.groups:
                bank = self._pack(group, [self._bound[r] for r in revisions])
                if bank is not None:
                    banks[group.name] = bank
            self._packed = (key, ActiveSet(revisions, banks))
        return self._packed[1]

    def _pack(self, group: GroupSpec, bound: Sequence[_Bound]) -> Bank | None:
        rows: list[int] = []
        spans: list[tuple[int, int]] = []
        scales: list[torch.Tensor] = []
        for one in bound:
            rank = one.ranks.get(group.name, 0)
            spans.append((len(rows), len(rows) + rank))
            rows += page_rows(one.pages, rank=rank, rows_per_page=self.rows_per_page)
            if rank:
                scales.append(one.scale[group.name])
        if not rows:
            return None
        a, b = self._a[group.name], self._b[group.name]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            run = slice(rows[0], rows[0] + len(rows))
            packed_a, packed_b = a[:, run], tuple(t[:, run] for t in b)
        else:
            index = torch.tensor(rows)
            packed_a, packed_b = a.index_select(1, index), tuple(t.index_select(1, index) for t in b)
        return Bank(packed_a, packed_b, torch.cat(scales, dim=1), tuple(spans))
