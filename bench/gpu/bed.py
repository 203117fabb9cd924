"""What the GPU scripts share: the device and its clock, a pool of random adapters, steps over it.

Imports the kernels and torch, nothing else of the house: a GPU machine needs this repository, torch and its Triton.
With `rehearse` everything runs on the CPU in Triton's interpreter, in small: it tries the scripts, not the device.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.executor.kernels.layout import GroupSpec, RowLayout, make_layout, page_rows
from services.executor.kernels.shrink_expand import Bank
from services.executor.kernels.triton_lora import TritonLora
from services.executor.kernels.variants import Variant
from services.executor.kernels.work import GroupShape, Resident, WorkLimits, traffic

PAGE = 8
LLAMA_8B = (
    ("qkv", 4096, (4096, 1024, 1024)),
    ("o", 4096, (4096,)),
    ("gate_up", 4096, (14336, 14336)),
    ("down", 14336, (4096,)),
)
TINY = (("qkv", 64, (64, 32, 32)), ("o", 64, (64,)), ("down", 96, (64,)))
ODD = (("odd", 172, (96, 40, 40)), ("narrow", 64, (33,)))


@dataclass(frozen=True, slots=True)
class Device:
    """The device that is timed. `rehearse`: the CPU, played by Triton's interpreter."""

    name: str
    torch_name: str
    multiprocessors: int
    rehearse: bool

    def sync(self) -> None:
        """Wait until the device is idle."""
        if not self.rehearse:
            torch.cuda.synchronize()

    def milliseconds(self, work: Callable[[], object], *, seconds: float = 0.1) -> float:
        """Return the median time of `work` under a captured graph, warm, over about `seconds`."""
        work()
        if self.rehearse:
            started = time.perf_counter()
            work()
            return (time.perf_counter() - started) * 1e3
        graph = capture(work)
        times: list[float] = []
        ends = time.perf_counter() + seconds
        while len(times) < 5 or time.perf_counter() < ends:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            for _ in range(4):
                graph.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 4)
        return sorted(times)[len(times) // 2]


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Run `work` twice on a side stream, then capture it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def find_device(*, rehearse: bool) -> Device | None:
    """Return the GPU, or the rehearsal's CPU; None where a GPU is wanted and none is there."""
    if rehearse:
        return Device("rehearsal (CPU, interpreter)", "cpu", 1, True)
    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(0)
    return Device(facts.name, "cuda", facts.multi_processor_count, False)


class Bed:
    """A pool with one adapter per entry of `ranks`, on shuffled pages; free pages hold NaN."""

    def __init__(
        self, device: Device, shapes: Sequence[tuple[str, int, tuple[int, ...]]], ranks: Sequence[int], *, layers: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.device, self.ranks, self.layers, self.dtype = device, tuple(ranks), layers, dtype
        self.groups = tuple(
            GroupSpec(name=n, in_features=i, out_features=o, paths=tuple(tuple(n for _ in o) for _ in range(layers)))
            for n, i, o in shapes
        )
        counts = [-(-rank // PAGE) for rank in ranks]
        self.pages = sum(counts) + 4
        order = list(range(self.pages))
        random.Random(1).shuffle(order)  # noqa: S311  (any fixed order that is not ascending)
        self.residents = []
        for rank, count in zip(ranks, counts, strict=True):
            own, order = tuple(order[:count]), order[count:]
            self.residents.append(Resident(own, {g.name: rank for g in self.groups}))
        used = [row for r, rank in zip(self.residents, ranks, strict=True) for row in _rows(r.pages, rank)]
        free = torch.ones(self.pages * PAGE, dtype=torch.bool)
        free[used] = False
        self.banks = {g.name: self._bank(g, free.to(device.torch_name)) for g in self.groups}

    def _bank(self, group: GroupSpec, free: torch.Tensor) -> Bank:
        rows, subs = self.pages * PAGE, len(group.out_features)
        where = {"device": self.device.torch_name, "dtype": self.dtype}
        a = torch.randn(self.layers, rows, subs, group.in_features, **where).mul_(group.in_features**-0.5)
        b = torch.randn(self.layers, rows, sum(group.out_features), **where).mul_(0.2)
        scale = torch.rand(self.layers, 1, subs, device=self.device.torch_name).add_(0.5).repeat(1, rows, 1)
        for tensor in (a, b, scale):
            tensor[:, free] = float("nan")
        return Bank(a, b, scale, group.out_features)

    def kernels(self, variant: Variant, *, rows: int, adapters: int | None = None) -> TritonLora:
        """Return a variant's kernels for steps of up to `rows` rows; the scratch holds NaN."""
        limits = WorkLimits(
            rows=rows, adapters=adapters or len(self.ranks), rank=max(self.ranks, default=1), pages=self.pages
        )
        lora = TritonLora(
            self.groups, self.banks, variant=variant, rows_per_page=PAGE, limits=limits,
            multiprocessors=self.device.multiprocessors,
        )  # fmt: skip
        lora.scratch.fill_(float("nan"))
        return lora

    def tensors(self, rows: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return random (y, x) per group."""
        where = {"device": self.device.torch_name, "dtype": self.dtype}
        return {
            g.name: (torch.randn(rows, sum(g.out_features), **where), torch.randn(rows, g.in_features, **where))
            for g in self.groups
        }

    def bytes_of(self, layout: RowLayout) -> int:
        """Return the bytes that a step must move, over all groups and layers."""
        return sum(
            traffic(
                layout, ranks=self.ranks, shape=GroupShape(g.in_features, g.out_features, self.layers),
                element_bytes=self.dtype.itemsize, block_rows=1,
            ).compulsory_bytes
            for g in self.groups
        )  # fmt: skip

    def flops_of(self, layout: RowLayout) -> int:
        """Return a step's useful FLOPs, over all groups and layers."""
        return sum(
            traffic(
                layout, ranks=self.ranks, shape=GroupShape(g.in_features, g.out_features, self.layers),
                element_bytes=self.dtype.itemsize, block_rows=1,
            ).flops
            for g in self.groups
        )  # fmt: skip


def _rows(pages: tuple[int, ...], rank: int) -> list[int]:
    return page_rows(pages, rank=rank, rows_per_page=PAGE)


def even_layout(rows: int, adapters: int, *, base: int = 0) -> RowLayout:
    """Return `rows` rows shared as evenly as they can be by the first `adapters` adapters."""
    adapters = min(adapters, rows)
    counts = [rows // adapters + (i < rows % adapters) for i in range(adapters)]
    return make_layout([None, *range(adapters)], [base, *counts])


def mixed_ranks(count: int, among: Sequence[int] = (8, 16, 32, 64, 128)) -> list[int]:
    """Return `count` ranks that take turns."""
    return list(itertools.islice(itertools.cycle(among), count))


def add_all(step: object, tensors: dict[str, tuple[torch.Tensor, torch.Tensor]], layers: int) -> None:
    """Add a step's adapters in every group and layer."""
    for layer in range(layers):
        for name, (y, x) in tensors.items():
            step.add(name, layer, y, x)
