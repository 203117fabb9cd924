"""The figures of `run.py`. Baselines are measured in the same run: copy bandwidth, matmul rate, the base's own step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from bench.figures import Figure
from bench.gpu.bed import LLAMA_8B, TINY, Bed, Device, add_all, even_layout, mixed_ranks
from services.executor.kernels.layout import RowLayout
from services.executor.kernels.variants import Variant, chip_of, choose_variant
from services.executor.kernels.work import GroupShape

LAYERS = 4  # of the 32: enough that the adapters of a step do not fit a cache
TARGETS = {"decode": 0.8, "overhead": 1.10, "load": 0.7, "cold ms": 6.0}  # shares, a ratio, milliseconds


@cache
def copy_gb_s(device: Device) -> float:
    """Return the bandwidth of copying memory to memory, reads and writes counted."""
    size = 2**20 if device.rehearse else 2**30
    source = torch.zeros(size, dtype=torch.uint8, device=device.torch_name)
    target = torch.empty_like(source)
    return 2 * size / device.milliseconds(lambda: target.copy_(source)) / 1e6


@cache
def matmul_tflops(device: Device) -> float:
    """Return the rate of a large bfloat16 product."""
    n = 128 if device.rehearse else 8192
    a = torch.randn(n, n, device=device.torch_name, dtype=torch.bfloat16)
    return 2 * n**3 / device.milliseconds(lambda: a @ a) / 1e9


def chosen_variant(bed: Bed, layout: RowLayout) -> Variant:
    """Return what the roofline chooses for a step."""
    shapes = [GroupShape(g.in_features, g.out_features, bed.layers) for g in bed.groups]
    return choose_variant(
        layout, ranks=bed.ranks, shapes=shapes, element_bytes=bed.dtype.itemsize, chip=chip_of(bed.device.name)
    )


def _time(bed: Bed, layout: RowLayout, variant: Variant) -> float:
    step = bed.kernels(variant, rows=layout.row_count).load(layout, bed.residents)
    tensors = bed.tensors(layout.row_count)
    return bed.device.milliseconds(lambda: add_all(step, tensors, bed.layers))


def decode(device: Device) -> Iterator[Figure]:
    """Share of the copy bandwidth, rows x adapters of mixed ranks 8 to 128."""
    shapes = TINY if device.rehearse else LLAMA_8B
    sizes = ((2, 1),) if device.rehearse else ((1, 1), (16, 4), (16, 16), (64, 16), (64, 64), (256, 64))
    bed = Bed(device, shapes, mixed_ranks(max(n for _, n in sizes)), layers=1 if device.rehearse else LAYERS)
    for rows, adapters in sizes:
        layout = even_layout(rows, adapters)
        variant = chosen_variant(bed, layout)
        rate = bed.bytes_of(layout) / _time(bed, layout, variant) / 1e6
        yield Figure(
            name=f"{rows}r {adapters}a {variant.name[7:]}", value=rate, baseline=copy_gb_s(device),
            target=TARGETS["decode"] * copy_gb_s(device), unit="GB/s", at_most=False,
        )  # fmt: skip


def prefill(device: Device) -> Iterator[Figure]:
    """Useful TFLOP/s; ranks are small, so these steps are bound by reading and writing x and y."""
    shapes = TINY if device.rehearse else LLAMA_8B
    sizes = ((20, 1),) if device.rehearse else ((512, 1), (2048, 4), (8192, 4))
    for rank in (16,) if device.rehearse else (16, 64):
        bed = Bed(device, shapes, [rank] * 4, layers=1)
        for rows, adapters in sizes:
            layout = even_layout(rows, adapters)
            variant = chosen_variant(bed, layout)
            ms = _time(bed, layout, variant)
            bound = max(
                bed.bytes_of(layout) / copy_gb_s(device) / 1e6, bed.flops_of(layout) / matmul_tflops(device) / 1e9
            )
            yield Figure(name=f"{rows}t {adapters}a rank {rank}", value=ms, baseline=bound, target=2 * bound, unit="ms")


def overhead(device: Device) -> Iterator[Figure]:
    """A decode step's linears with mixed adapters over the same linears without, each under one graph.

    With no adapter at all the kernels are launched and find no work: what a graph for adapters costs a base step.
    """
    shapes = TINY if device.rehearse else LLAMA_8B
    layers = 1 if device.rehearse else LAYERS
    bed = Bed(device, shapes, mixed_ranks(1 if device.rehearse else 64), layers=layers)
    where = {"device": device.torch_name, "dtype": bed.dtype}
    weights = [
        {g.name: torch.randn(sum(g.out_features), g.in_features, **where).mul_(0.01) for g in bed.groups}
        for _ in range(layers)
    ]
    sizes = ((2, 1),) if device.rehearse else ((16, 16), (64, 0), (64, 1), (64, 4), (64, 16), (64, 64))
    for rows, adapters in sizes:
        layout = even_layout(rows, adapters) if adapters else RowLayout(rows, rows, ())
        step = bed.kernels(chosen_variant(bed, layout), rows=rows).load(layout, bed.residents)
        tensors = bed.tensors(rows)

        def base(
            adapters: bool, tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = tensors, step: object = step
        ) -> None:
            for layer, own in enumerate(weights):
                for name, (y, x) in tensors.items():
                    torch.mm(x, own[name].t(), out=y)
                    if adapters:
                        step.add(name, layer, y, x)

        alone = device.milliseconds(lambda: base(False))
        both = device.milliseconds(lambda: base(True))
        yield Figure(
            name=f"{rows}r {adapters}a / without", value=both / alone, baseline=1.0, target=TARGETS["overhead"],
            unit="x",
        )  # fmt: skip


def loading(device: Device) -> Iterator[Figure]:
    """Pinned host memory to the device, and one rank-16 adapter of 32 layers from there to its pages."""
    if device.rehearse:
        return
    size = 2**28
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    rate = size / device.milliseconds(lambda: target.copy_(host, non_blocking=True)) / 1e6
    yield Figure(name="pinned host to device", value=rate, baseline=rate, target=0, unit="GB/s", at_most=False)
    bed = Bed(device, LLAMA_8B, [16], layers=32)
    rows = torch.tensor([p * 8 + i for p in bed.residents[0].pages for i in range(8)], device="cuda")
    staged = {
        name: [t[:, :16].cpu().pin_memory() for t in (bank.a, bank.b, bank.scale)] for name, bank in bed.banks.items()
    }
    moved = sum(t.nbytes for tensors in staged.values() for t in tensors)
    side = torch.cuda.Stream()
    times = []
    for _ in range(5):
        device.sync()
        started = time.perf_counter()
        with torch.cuda.stream(side):
            for name, tensors in staged.items():
                bank = bed.banks[name]
                for pool, part in zip((bank.a, bank.b, bank.scale), tensors, strict=True):
                    pool.index_copy_(1, rows, part.to("cuda", non_blocking=True))
        side.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    ms = sorted(times)[2]
    yield Figure(
        name="rank 16, HOST to pages", value=ms, baseline=moved / rate / 1e6, target=TARGETS["cold ms"], unit="ms"
    )


def engine(device: Device) -> Iterator[Figure]:
    """A whole engine. Imported here: it needs more than torch, and the other parts do not."""
    from bench.gpu.engine import engine as whole

    return whole(device)


@dataclass(frozen=True, slots=True)
class Part:
    """One group of figures and the most seconds it takes; it is left out when fewer are left."""

    name: str
    run: Callable[[Device], Iterator[Figure]]
    seconds: float


PARTS = (
    Part("decode", decode, 60),
    Part("overhead", overhead, 40),
    Part("prefill", prefill, 60),
    Part("loading", loading, 30),
    Part("engine", engine, 150),
)
