"""Decoding attention over the paged cache equals plain attention over the same keys, and reads nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.engine.sampling import _argmax
from services.executor.kernels.cpu_step import CpuStep
from services.executor.model import attention
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


chunk = st.tuples(st.integers(1, 40), st.integers(0, 40))


@given(st.lists(chunk, min_size=1, max_size=6), st.sampled_from([None, 9]), st.integers(0, 3), st.booleans())
@settings(deadline=None, max_examples=60)
def test_prompts_and_decoding_rows_of_one_step_equal_plain_attention(chunks, window, padding, long) -> None:
    """Whatever chunks there are, in one call or by several, rotated by it or before, with padding behind."""
    step, rows = compiled_step(), sum(count for count, _ in chunks)
    torch.manual_seed(rows)
    cache = KvCache(
        layers=1, blocks=40, block_size=BLOCK, kv_heads=KV_HEADS, head_dim=SIZE, dtype=torch.float32, poison=True,
        step=step,
    )  # fmt: skip
    order, spans, row = (torch.randperm(39) + 1).tolist(), [], 0
    q, k, v = (torch.randn(rows + padding, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cos, sin = torch.randn(2, rows + padding, SIZE // 2).unbind()
    turned_q, turned_k = (step.rotate(some, some.shape[1], cos, sin) for some in (q, k))
    held = []
    for count, start in chunks:
        blocks, order = tuple(order[: -(-(start + count) // BLOCK)]), order[-(-(start + count) // BLOCK) :]
        cache.clear(blocks)
        spans.append(AttentionSpan(row, count, start, blocks))
        old = torch.randn(2, start, KV_HEADS, SIZE)
        for position in range(start):
            block, slot = blocks[position // BLOCK], position % BLOCK
            cache.k[0, block, slot], cache.v[0, block, slot] = old[0, position], old[1, position]
        new = turned_k[row : row + count], v[row : row + count]
        held.append([torch.cat((some, added)) for some, added in zip(old, new, strict=True)])
        row += count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_SHORT", 200 if long else attention._SHORT)
        batch = AttentionBatch(spans, cache, q_heads=HEADS, kv_heads=KV_HEADS)
    if batch.is_one_call:
        got = batch.rotate_and_attend(0, q, k, v, (cos, sin), scale=0.4, window=window)
    else:
        got = batch.attend(0, turned_q, turned_k, v, scale=0.4, window=window)
    assert batch.is_one_call or long
    for span, (keys, values) in zip(spans, held, strict=True):
        for i in range(span.count):
            end = span.start + i + 1
            expected = plain(turned_q[span.row + i], keys[:end], values[:end], scale=0.4, window=window, softcap=None)
            torch.testing.assert_close(got[span.row + i], expected, atol=5e-6, rtol=1e-5)
        blocks = list(span.blocks)
        assert torch.equal(cache.k[0, blocks].flatten(0, 1)[: len(keys)], keys)
        assert torch.equal(cache.v[0, blocks].flatten(0, 1)[: len(values)], values)
    assert not got[rows:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "start"), [(40, 0), (64, 0), (64, 64), (24, 100), (100, 60), (128, 0)])
def test_a_chunk_has_the_same_bits_whatever_chunks_of_its_shape_are_beside_it(count, start, dtype) -> None:
    torch.manual_seed(count)
    each, most = -(-(count + start) // BLOCK), 5
    cache = KvCache(
        layers=1, blocks=1 + most * each, block_size=BLOCK, kv_heads=KV_HEADS, head_dim=SIZE, dtype=dtype,
        step=compiled_step(),
    )  # fmt: skip
    cache.k.copy_(torch.randn(cache.k.shape))
    cache.v.copy_(torch.randn(cache.v.shape))
    q, k, v = (torch.randn(most * count + 1, heads, SIZE).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    spans = [
        AttentionSpan(i * count, count, start, tuple(range(1 + i * each, 1 + (i + 1) * each))) for i in range(most)
    ]

    def attended(chunks: int) -> torch.Tensor:
        batch, rows = AttentionBatch(spans[:chunks], cache, q_heads=HEADS, kv_heads=KV_HEADS), chunks * count
        return batch.attend(0, q[:rows], k[:rows], v[:rows], scale=0.4)[:count]

    alone = attended(1)
    for chunks in range(2, most + 1):
        assert torch.equal(attended(chunks), alone), chunks


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
