"""Launches the Triton kernels for a step: static metadata, one scratch, two launches per group and layer.

Everything that changes from step to step lies in device buffers with fixed addresses, written by one small copy per
group; the grid is fixed too. So a captured graph replays any step that fits the buffers, whatever its adapters, ranks
and pages are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton

from services.executor.kernels import streams
from services.executor.kernels.layout import GroupSpec, RowLayout
from services.executor.kernels.shrink_expand import Bank
from services.executor.kernels.triton_decode import expand_decode, shrink_decode
from services.executor.kernels.triton_prefill import expand_prefill, shrink_prefill
from services.executor.kernels.variants import Variant
from services.executor.kernels.work import RECORD, Resident, Work, WorkLimits, make_work

ALIGNMENT = 16  # bytes; the kernels are compiled for pointers that divide by it
_HEAD = 4  # integers before the lists: shrink records, expand records, two unused
_HOSTS = 4  # steps whose metadata may wait for the device at once, each in a pinned buffer of its own
# Programs per multiprocessor: enough to keep its memory queue full at the kernels' register use (docs/kernels.md).
_DECODE_PROGRAMS, _PREFILL_PROGRAMS = 8, 4


def interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 when they were imported)."""
    return not isinstance(shrink_decode, triton.runtime.JITFunction)


def _aligned(count: int) -> int:
    return -(-count // 4) * 4


@dataclass(frozen=True, slots=True)
class _Sections:
    """Capacities, in integers, of a group's lists in the metadata buffer."""

    pages: int
    expand: int
    shrink: int

    @property
    def total(self) -> int:
        return _HEAD + self.pages + self.expand + self.shrink

    def write(self, row: torch.Tensor, work: Work) -> int:
        """Write a group's lists and return how many integers of the row are now in use, gaps included."""
        start = _HEAD
        row[0], row[1] = work.shrink_count, work.expand_count
        for values, room in ((work.pages, self.pages), (work.expand, self.expand), (work.shrink, self.shrink)):
            if len(values) > room:
                raise ValueError(f"a step with {len(values)} numbers of metadata where {room} fit")
            row[start : start + len(values)] = torch.tensor(values, dtype=torch.int32)
            start += room
        return start - self.shrink + len(work.shrink)


def scratch_numbers(groups: Sequence[GroupSpec], variant: Variant, limits: WorkLimits) -> int:
    """Return how many float32 numbers the scratch of any step within the limits takes, in the group that takes most."""
    return limits.rows * limits.rank * max(len(g.out_features) * variant.splits(g.in_features) for g in groups)


def _check_aligned(group: str, bank: Bank) -> None:
    """Raises ValueError when a layer of the pool begins where the kernels, as compiled, must not read."""
    for tensor in (bank.a, bank.b, bank.scale):
        if tensor.data_ptr() % ALIGNMENT or tensor[0].nbytes % ALIGNMENT or not tensor.is_contiguous():
            raise ValueError(f"{group}: layers of {tuple(tensor.shape[1:])} are not aligned to {ALIGNMENT} bytes")


class TritonLora:
    """The kernels of one variant over one pool. Owned by the device thread.

    `limits` bounds every step that `load` takes; the buffers are allocated once, for it, and so is the scratch where
    none is given (kernels of one stream may share one).
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pool: Mapping[str, Bank],
        *,
        variant: Variant,
        rows_per_page: int,
        limits: WorkLimits,
        multiprocessors: int,
        scratch: torch.Tensor | None = None,
    ) -> None:
        self.variant = variant
        self._groups = {group.name: index for index, group in enumerate(groups)}
        self._specs = tuple(groups)
        self._pool = pool
        self._rows_per_page = rows_per_page
        per = _DECODE_PROGRAMS if variant.kind == "decode" else _PREFILL_PROGRAMS
        self._programs = multiprocessors * per
        shrink, expand, pages = limits.capacity(
            rows_per_page=rows_per_page, block_rows=variant.rows, block_ranks=variant.ranks
        )
        self._sections = _Sections(_aligned(pages), expand * RECORD, shrink * RECORD)
        for group in groups:
            _check_aligned(group.name, pool[group.name])
        device = pool[groups[0].name].a.device
        shape = (len(groups), self._sections.total)
        self._later = later = streams.on_gpu(device)
        self._hosts = [torch.zeros(shape, dtype=torch.int32, pin_memory=later) for _ in range(_HOSTS if later else 1)]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._hosts)
        self._turn = 0
        self._loaded: tuple[RowLayout, tuple[Resident, ...]] | None = None
        self._meta = torch.zeros(shape, dtype=torch.int32, device=device)
        if scratch is None:
            scratch = torch.empty(scratch_numbers(groups, variant, limits), dtype=torch.float32, device=device)
        self.scratch = scratch
        self.memory_bytes = self._meta.nbytes

    def load(self, layout: RowLayout, residents: Sequence[Resident]) -> TritonStep:
        """Write a step's metadata to the device, in order with its stream, and return the step.

        `residents[i]` is adapter i of the layout. The step is usable until the next `load`. The same step again copies
        nothing: the metadata says where numbers lie, never what they are.

        Raises:
            ValueError: the step is beyond the limits.
        """
        key = (layout, tuple(residents))
        if self._loaded == key:
            return TritonStep(self)
        self._loaded = None
        host, copied = self._next_host()
        try:
            self._write(host, layout, residents)
        finally:
            if copied is not None:
                copied.record()
        self._loaded = key
        return TritonStep(self)

    def _write(self, host: torch.Tensor, layout: RowLayout, residents: Sequence[Resident]) -> None:
        works: dict[tuple[int, ...], Work] = {}
        for index, group in enumerate(self._specs):
            ranks = tuple(resident.ranks.get(group.name, 0) for resident in residents)
            if ranks not in works:
                works[ranks] = make_work(
                    layout,
                    ranks=ranks,
                    pages=[resident.pages for resident in residents],
                    rows_per_page=self._rows_per_page,
                    block_rows=self.variant.rows,
                    block_ranks=self.variant.ranks,
                )
            work = works[ranks]
            if work.scratch * len(group.out_features) * self.variant.splits(group.in_features) > len(self.scratch):
                raise ValueError(f"a step with {work.scratch} shrunk numbers is beyond the scratch")
            used = self._sections.write(host[index], work)
            self._meta[index, :used].copy_(host[index, :used], non_blocking=True)

    def _next_host(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Return a buffer whose last copy has run, and the event that says when the next one has."""
        self._turn = (self._turn + 1) % len(self._hosts)
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        elif self._later:
            copied = self._copied[self._turn] = torch.cuda.Event()
        return host, copied

    def add(self, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the loaded step's adapters of `group` in `layer` to y.

        Semantics: as `lora_reference` for each sub, whose columns in y follow each other.
        Shapes: y [rows, sum(out)], x [rows, in], the pool's dtype, contiguous, 16-byte aligned. In place; rows without
            an adapter, and adapters without rank in the group, are neither read nor written.

        Raises:
            ValueError: a tensor is not of that shape, dtype or alignment, or has fewer rows than the loaded step.
        """
        if self._loaded is None or min(len(y), len(x)) < self._loaded[0].row_count:
            raise ValueError(f"{group}: {len(y)} and {len(x)} rows are not those of the loaded step")
        index = self._groups[group]
        spec, view = self._specs[index], self._pool[group]
        outs = spec.out_features
        for tensor, width in ((y, sum(outs)), (x, spec.in_features)):
            if tensor.shape[1] != width or tensor.dtype != view.a.dtype or not tensor.is_contiguous():
                raise ValueError(f"{group}: a tensor {tuple(tensor.shape)} of {tensor.dtype} is not [rows, {width}]")
            if tensor.data_ptr() % ALIGNMENT:
                raise ValueError(f"{group}: a tensor is not aligned to {ALIGNMENT} bytes")
        meta, at = self._meta[index], _HEAD
        pages, at = meta[at:], at + self._sections.pages
        expand, at = meta[at:], at + self._sections.expand
        shrink = meta[at:]
        decode, v = self.variant.kind == "decode", self.variant
        common = {
            "SUBS": len(outs), "PAGE": self._rows_per_page, "ROWS": v.rows, "RANKS": v.ranks,
            "SPLITS": v.splits(spec.in_features), "num_stages": v.stages,
        }  # fmt: skip
        if not decode:
            common["UPCAST"] = interpreted()
        a, b, scale = view.a[layer], view.b[layer], view.scale[layer]
        sizes = (*outs, 0, 0)[:3]
        kernel = shrink_decode if decode else shrink_prefill
        kernel[(self._programs,)](
            x, a, pages, shrink, meta, self.scratch,
            IN=spec.in_features, COLS=v.in_cols, num_warps=v.shrink_warps, **common,
        )  # fmt: skip
        kernel = expand_decode if decode else expand_prefill
        kernel[(self._programs,)](
            y, b, scale, pages, expand, meta, self.scratch,
            OUT0=sizes[0], OUT1=sizes[1], OUT2=sizes[2], COLS=v.out_cols, num_warps=v.expand_warps, **common,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonStep:
    """The adapters of one packed tensor of rows, as the decoder takes them."""

    lora: TritonLora

    @property
    def path(self) -> str:
        return self.lora.variant.name

    def add(self, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """See `TritonLora.add`."""
        self.lora.add(group, layer, y, x)
