"""Whether a compiled step computes what torch does: asked once, before it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from services.executor.kernels.cpu_step import CpuStep, LoraStep


def computes_what_torch_does(step: CpuStep) -> bool:
    """Hold the functions of a compiled step against torch, with odd sizes."""
    numbers = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers)

    x, weight, add = some(3, 37), some(29, 37).bfloat16(), some(3, 29)
    pairs = [(step.thin(x, weight, weight[:, 0].float(), add), x @ weight.float().t() + weight[:, 0].float() + add)]
    small = x * 1e-2
    pairs.append((step.norm(small, x[0], 1e-4), torch.nn.functional.rms_norm(small, (37,), x[0], 1e-4)))
    both = some(3, 2 * 19) * 20
    pairs.append((step.gated(both), torch.nn.functional.silu(both[:, :19]) * both[:, 19:]))
    keys, values, q = some(4, 8, 2, 92), some(4, 8, 2, 92), some(2, 6, 92)
    table, ends = torch.tensor([[2, 1], [3, 0]], dtype=torch.int32), torch.tensor([13, 5], dtype=torch.int32)
    begins = torch.tensor([4, 0], dtype=torch.int32)

    turn, fresh, slots = (some(2, 46), some(2, 46)), (some(2, 2, 92), some(2, 2, 92)), torch.tensor([12, 28])

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **added: Any) -> torch.Tensor:
        return step.attend(q, keys, values, table, begins, ends, scale=0.1, softcap=2.0, **added)

    seen = attend(q, keys, values)
    for row, (blocks, begin, end) in enumerate((([2, 1], 4, 13), ([3, 0], 0, 5))):
        k, v = (t[blocks].flatten(0, 1)[begin:end].repeat_interleave(3, dim=1) for t in (keys, values))
        scores = torch.einsum("hd,phd->hp", q[row], k).mul(0.1 / 2.0).tanh().mul(2.0).softmax(dim=-1)
        pairs.append((seen[row], torch.einsum("hp,phd->hd", scores, v).flatten()))
    given = (q, keys, values, *fresh, *turn)
    pairs += _written(step, attend, slots, *given)
    pairs += _written(step, attend, slots, *(tensor.bfloat16() for tensor in given))
    heads, cos, sin = some(3, 5, 10), some(3, 5), some(3, 5)
    a, b = heads[:, :4, :5], heads[:, :4, 5:]
    turned = (a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None])
    pairs.append((step.rotate(heads, 4, cos, sin), torch.cat(turned, dim=-1)))
    many = some(3, 3000)
    many[0, 2900], many[0, 1500], many[1, 7], many[2, 2999] = 9.0, 9.0, float("inf"), float("nan")
    pairs.append((step.largest(many).float(), torch.tensor([1500.0, -1.0, -1.0])))
    pairs += [_lora_pair(step, some, size, threads) for size in (37, 40) for threads in (1, 2)]
    pairs.append(_half_pair(step, some))
    pairs.append(_rounded(lambda x, weight: step.norm(x, weight, 1e-4), small, x[0]))
    pairs.append(_rounded(step.gated, both))
    pairs.append(_rounded(attend, q, keys, values))
    pairs.append(_rounded(lambda heads, cos, sin: step.rotate(heads, 4, cos, sin), heads, cos, sin))
    alike = all(torch.allclose(got, want, rtol=1e-4, atol=1e-5) for got, want in pairs)
    if step.pool_dtype is torch.bfloat16:
        for size, threads, large in ((37, 1, False), (64, 2, False), (64, 1, True), (37, 2, True)):
            got, want = _lora_pair(step, some, size, threads, torch.bfloat16, large=large)
            alike &= torch.allclose(got.float(), want, rtol=2**-8, atol=1e-3)
    return alike


def _written(
    step: CpuStep, attend: Callable[..., torch.Tensor], slots: torch.Tensor, q: torch.Tensor, keys: torch.Tensor,
    values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Return what attention and the cache come to where it rotates and writes first, and where others did so before."""
    turned_q, turned_k = (step.rotate(part, part.shape[1], cos, sin) for part in (q, k))
    there, apart = (keys.clone(), values.clone()), (keys.clone(), values.clone())
    for row, slot in enumerate(slots.tolist()):
        apart[0].flatten(0, 1)[slot], apart[1].flatten(0, 1)[slot] = turned_k[row], v[row]
    got = attend(q, *there, fresh=(k, v, slots), turn=(cos, sin))
    pairs = [(got, attend(turned_q, *apart)), *zip(there, apart, strict=True)]
    return [(one.float(), other.float()) for one, other in pairs]


def _rounded(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a function makes of bfloat16 numbers, and what is rounded of the same numbers in float32."""
    halves = [tensor.bfloat16() for tensor in given]
    return function(*halves).float(), function(*(tensor.float() for tensor in halves)).bfloat16().float()


def _lora_pair(
    step: CpuStep, some: Callable[..., torch.Tensor], size: int, threads: int, dtype: torch.dtype = torch.float32,
    *, large: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return what the adapters of some rows come to, and what torch says: adapters of one, few, some and many rows.
    `large` ones have rank rows that fill a tile, and more, and columns and rows for more than one turn of a thread."""
    widths, ranks = (18, 141), [[5, 2, 1, 3], [4, 1, 5], [2, 3, 1, 0, 5], [0, 4, 5, 3, 2]]
    if large:
        widths, ranks = (18, 300), [*ranks[:2], list(range(20, 36)), list(range(40))]
    rows = [range(1), range(1, 3), range(3, 9), range(9, 90 if large else 30)]
    a, b = (some(2, 40, 2, size) / 8).to(dtype), some(2, 40, sum(widths)).to(dtype)
    scale, own_ranks = some(2, 40, 2), [torch.tensor(own) for own in ranks]
    x, y = some(rows[-1].stop, size).to(dtype), some(rows[-1].stop, sum(widths)).to(dtype)
    expected = y.float().clone()
    for at, own in zip(rows, own_ranks, strict=True):
        shrunk = torch.einsum("ri,ksi->rks", x[at.start : at.stop].float(), a[1, own].float()) * scale[1, own]
        parts = [shrunk[:, :, sub] @ part.float() for sub, part in enumerate(b[1, own].split(widths, dim=1))]
        expected[at.start : at.stop] += torch.cat(parts, dim=1)
    lora = LoraStep((a, b, scale), rows, own_ranks, widths)
    lora.threads = threads  # one computes everything from x to y, several share an adapter
    step.lora(x, y, lora, 1)
    return y, expected


def _half_pair(step: CpuStep, some: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what bfloat16 rows get, and what the same step rounds of float32 rows."""
    x, y = some(5, 37).bfloat16(), some(5, 29).bfloat16()
    pool = (some(1, 3, 1, 37), some(1, 3, 29), some(1, 3, 1))
    lora, wide = LoraStep(pool, [range(5)], [torch.tensor([2, 0])], (29,)), y.float()
    step.lora(x, y, lora, 0)
    step.lora(x.float(), wide, lora, 0)
    return y.float(), wide.bfloat16().float()
