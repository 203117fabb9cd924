"""Are the kernels right on this device? Every variant against plain torch, graphs against eager, nothing recompiled."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import torch
import triton

from bench.gpu.bed import LLAMA_8B, ODD, PAGE, TINY, Bed, Device, add_all, capture
from services.executor.kernels import triton_decode, triton_prefill
from services.executor.kernels.layout import RowLayout, make_layout
from services.executor.kernels.reference import ReferenceStep
from services.executor.kernels.variants import VARIANTS, Variant
from services.executor.model.attention import AttentionSpan, KvCache
from services.executor.model.flash_attention import FlashAttention
from services.executor.model.paged_attention import TorchAttention

TOLERANCE = {torch.bfloat16: (6e-2, 2e-2), torch.float16: (8e-3, 4e-3)}
RANKS = (1, 3, 12, 16, 63, 128)


def _mixes(variant: Variant, adapters: int) -> list[RowLayout]:
    rows = ((1, 1, 2, 1, 1, 1), (5, 0, 17, 1, 3, 2)) if variant.kind == "decode" else ((33, 1, 17, 129, 2, 64),)
    return [make_layout([None, *range(adapters)], [3, *counts[:adapters]]) for counts in rows]


def check_variants(device: Device) -> Iterator[tuple[str, str]]:
    """Yield (what, fault) per variant, dtype and shapes; a fault is empty when all is well."""
    todo = ((torch.bfloat16, ODD), (torch.float16, ODD), (torch.bfloat16, LLAMA_8B))
    for dtype, shapes in ((torch.bfloat16, TINY[:1]),) if device.rehearse else todo:
        ranks = RANKS[:2] if device.rehearse else RANKS
        bed = Bed(device, shapes, ranks, layers=2, dtype=dtype)
        for variant in VARIANTS.values():
            faults = [f for layout in _mixes(variant, len(ranks)) for f in _compare(bed, variant, layout)]
            yield f"{variant.name} {dtype} {shapes[0][0]}", "; ".join(faults)


def _compare(bed: Bed, variant: Variant, layout: RowLayout) -> Iterator[str]:
    lora = bed.kernels(variant, rows=layout.row_count)
    step = lora.load(layout, bed.residents)
    twin = ReferenceStep(layout, tuple(bed.residents), bed.banks, PAGE)
    atol, rtol = TOLERANCE[bed.dtype]
    for name, (y, x) in bed.tensors(layout.row_count).items():
        y[: layout.base_rows] = x[: layout.base_rows] = float("nan")
        got, expected = y.clone(), y.clone()
        step.add(name, 1, got, x)
        twin.add(name, 1, expected, x)
        low = layout.base_rows
        if not got[:low].isnan().all():
            yield f"{name}: base rows were written"
        if not torch.allclose(got[low:].float(), expected[low:].float(), atol=atol, rtol=rtol):
            off = (got[low:].float() - expected[low:].float()).abs().max().item()
            yield f"{name}: off by {off:.3g}"


def compilations() -> int | None:
    """Return how many kernels this process compiled; None where this Triton keeps no such count."""
    kernels = [
        triton_decode.shrink_decode, triton_decode.expand_decode,
        triton_prefill.shrink_prefill, triton_prefill.expand_prefill,
    ]  # fmt: skip
    try:
        return sum(len(cache[0]) for k in kernels for cache in k.device_caches.values())
    except (AttributeError, TypeError, KeyError, IndexError):
        return None


def check_graphs(device: Device) -> Iterator[tuple[str, str]]:
    """Yield whether one captured graph replays other steps with the bits of eager launches, and nothing is compiled."""
    if device.rehearse or not isinstance(triton_decode.shrink_decode, triton.runtime.JITFunction):
        yield "graph == eager", ""
        return
    bed = Bed(device, LLAMA_8B, (8, 16, 64, 128), layers=1)
    for name in ("triton-decode-1x8", "triton-decode-4x8", "triton-prefill-16x16"):
        lora = bed.kernels(VARIANTS[name], rows=64)
        start = bed.tensors(64)
        moving = {key: (y.clone(), x) for key, (y, x) in start.items()}
        steps = [
            make_layout([None, 0, 1, 2, 3], [16, 12, 12, 12, 12]),
            make_layout([None, 3], [60, 4]),
            make_layout([None], [64]),
            make_layout([None, 2, 0, 3, 1], [0, 1, 2, 30, 31]),
        ]
        step = lora.load(steps[0], bed.residents)
        graph = capture(lambda step=step, moving=moving: add_all(step, moving, 1))
        before, faults = compilations(), []
        for number, layout in enumerate(steps):
            lora.load(layout, bed.residents)
            eager = {key: (y.clone(), x) for key, (y, x) in start.items()}
            add_all(step, eager, 1)
            for key, (y, _) in start.items():
                moving[key][0].copy_(y)
            graph.replay()
            device.sync()
            faults += [f"step {number} {k}" for k in start if not torch.equal(eager[k][0], moving[k][0])]
        if compilations() != before:
            faults.append("something was compiled after the first step")
        yield f"graph == eager {name}", ", ".join(faults)


def check_attention(device: Device) -> Iterator[tuple[str, str]]:
    """Yield whether the library's attention is torch's: chunks beside decoding rows, decoding alone, fixed buffers."""
    if device.rehearse or find_spec("flashinfer") is None:
        yield "attention (torch's own, no library here)", ""
        return
    for name, shapes in (("mixed", ((300, 0), (1, 40), (64, 100))), ("decode", ((1, 0), (1, 77), (1, 400)))):
        spans, row, block = [], 0, 1
        for count, start in shapes:
            need = -(-(start + count) // 16)
            spans.append(AttentionSpan(row, count, start, tuple(range(block + need - 1, block - 1, -1))))
            row, block = row + count, block + need
        where = {"device": device.torch_name, "dtype": torch.bfloat16}
        q, k, v = (torch.randn(row, heads, 128, **where) for heads in (32, 8, 8))
        found = []
        for library in (None, import_module("flashinfer")):
            torch.manual_seed(1)
            cache = KvCache(layers=1, blocks=128, block_size=16, kv_heads=8, head_dim=128, spare=True, **where)
            cache.k.normal_()
            cache.v.normal_()
            sizes = {"q_heads": 32, "kv_heads": 8, "max_context": 512}
            maker = FlashAttention(cache, **sizes, library=library) if library else TorchAttention(cache, **sizes)
            steps = [maker.step(spans)]
            if name == "decode":
                fixed = maker.fixed(row)
                fixed.fill(spans)
                steps.append(fixed)
            found += [step.attend(0, q, k, v, scale=128**-0.5) for step in steps]
        off = max(float((found[0].float() - other.float()).abs().max()) for other in found[1:])
        yield f"attention by {maker.name}, {name}", "" if off < 3e-2 else f"off by {off:.3g}"
