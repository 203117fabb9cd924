"""Decoding attention over the paged cache equals plain attention over the same keys, and reads nothing else."""

from __future__ import annotations

import pytest
import torch

from services.executor.engine.sampling import _argmax
from services.executor.kernels.compiled import CpuStep
from services.executor.model.attention import AttentionBatch, AttentionSpan, KvCache
from tests.support.compiled import compiled_step

BLOCK, HEADS, KV_HEADS, SIZE = 16, 9, 3, 20


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, softcap: float | None
):
    """One query over keys and values [positions, kv_heads, size], in float64."""
    low = 0 if window is None else max(0, len(k) - window)
    fold = HEADS // KV_HEADS
    out = []
    for head in range(HEADS):
        keys, values = k[low:, head // fold].double(), v[low:, head // fold].double()
        scores = scale * keys @ q[head].double()
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out.append(scores.softmax(0) @ values)
    return torch.cat(out).float()


@pytest.fixture(params=["torch", "compiled"])
def step(request: pytest.FixtureRequest) -> CpuStep | None:
    """What computes the attention: torch's own functions, or the compiled step."""
    return None if request.param == "torch" else compiled_step()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 10, 70, 200])
@pytest.mark.parametrize("lengths", [(1,), (64, 64), (70, 64, 80, 66), (3, 200, 17, 65)])
def test_decoding_rows_equal_plain_attention(lengths, window, softcap, step) -> None:
    torch.manual_seed(sum(lengths))
    counts = [-(-n // BLOCK) for n in lengths]
    total = sum(counts) + 3
    cache = KvCache(
        layers=1, blocks=total, block_size=BLOCK, kv_heads=KV_HEADS, head_dim=SIZE, dtype=torch.float32, poison=True,
        step=step,
    )  # fmt: skip
    order = (torch.randperm(total - 1) + 1).tolist()
    spans = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks, order = tuple(order[:count]), order[count:]
        cache.clear(blocks)
        spans.append(AttentionSpan(row, 1, length - 1, blocks))
    rows = len(lengths)
    held = [torch.randn(2, n, KV_HEADS, SIZE) for n in lengths]
    for span, (k, v) in zip(spans, held, strict=True):
        for position in range(span.start):
            block, slot = span.blocks[position // BLOCK], position % BLOCK
            cache.k[0, block, slot], cache.v[0, block, slot] = k[position], v[position]
    q = torch.randn(rows, HEADS, SIZE)
    new_k, new_v = (torch.stack([h[i][-1] for h in held]) for i in (0, 1))
    batch = AttentionBatch(spans, cache, q_heads=HEADS, kv_heads=KV_HEADS)
    got = batch.attend(0, q, new_k, new_v, scale=0.4, window=window, softcap=softcap)
    for row, (k, v) in enumerate(held):
        expected = plain(q[row], k, v, scale=0.4, window=window, softcap=softcap)
        torch.testing.assert_close(got[row], expected, atol=2e-6, rtol=1e-5)


def test_a_rows_bad_numbers_stay_its_own(step) -> None:
    cache = KvCache(
        layers=1, blocks=4, block_size=BLOCK, kv_heads=KV_HEADS, head_dim=SIZE, dtype=torch.float32, step=step
    )
    spans = [AttentionSpan(i, 1, 0, (i + 1,)) for i in range(3)]
    q, k, v = torch.randn(3, HEADS, SIZE), torch.randn(3, KV_HEADS, SIZE), torch.randn(3, KV_HEADS, SIZE)
    k[1] = float("nan")
    got = AttentionBatch(spans, cache, q_heads=HEADS, kv_heads=KV_HEADS).attend(0, q, k, v, scale=1.0)
    assert got.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("size", [7, 256, 4096, 49152, 151936])
def test_the_first_largest_logit_is_found(size: int) -> None:
    torch.manual_seed(size)
    logits = torch.randint(0, 50, (5, size)).float()
    logits[0, size // 2 :] = 50.0
    logits[1] = 1.0
    logits[2, -1] = 99.0
    logits[3] = -float("inf")
    assert _argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
