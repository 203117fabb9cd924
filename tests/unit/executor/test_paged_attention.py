"""Implementations of the attention port against the torch oracle, on one cache: chunks, decoding rows, windows, caps."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch

from services.executor.engine.backend import gpu_attention, torch_attention
from services.executor.model.attention import AttentionBatch, AttentionSpan, KvCache
from services.executor.model.flash_attention import FlashAttention
from services.executor.model.interface import Attention, ModelInfo
from services.executor.model.paged_attention import AttentionMaker, TorchAttention
from tests.support import fake_flashinfer

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS, CONTEXT = 4, 2, 64, 4, 24, 40
RULES = ({}, {"window": 5}, {"softcap": 3.0}, {"window": 3, "softcap": 2.0})
# Spans (count, start) of a step; each request has blocks of its own, out of order.
STEPS = (
    ((1, 0), (1, 7), (1, 16)),
    ((9, 0), (1, 3)),
    ((4, 6), (5, 3), (1, 11)),
    ((12, 0),),
)


def make_cache() -> KvCache:
    cache = KvCache(
        layers=2, blocks=BLOCKS, block_size=BLOCK, kv_heads=KV_HEADS, head_dim=SIZE, dtype=torch.float32, spare=True
    )
    noise = torch.Generator().manual_seed(5)
    for tensor in (cache.k, cache.v):
        tensor[:, 1:BLOCKS] = torch.randn(tensor[:, 1:BLOCKS].shape, generator=noise)
    return cache


def spans_of(step: Sequence[tuple[int, int]], *, first_row: int = 0, backwards: bool = True) -> list[AttentionSpan]:
    spans, row, block = [], first_row, BLOCKS - 1
    for count, start in step:
        need = -(-(start + count) // BLOCK)
        spans.append(AttentionSpan(row, count, start, tuple(range(block, block - need, -1))))
        row, block = row + count, block - need
    return spans


def noise_of(rows: int, q_heads: int = HEADS) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, heads, SIZE, generator=noise) for heads in (q_heads, KV_HEADS, KV_HEADS)]


def flash(cache: KvCache) -> FlashAttention:
    return FlashAttention(cache, q_heads=HEADS, kv_heads=KV_HEADS, max_context=CONTEXT, library=fake_flashinfer)


def plain(cache: KvCache) -> TorchAttention:
    return TorchAttention(cache, q_heads=HEADS, kv_heads=KV_HEADS, max_context=CONTEXT)


def assert_same(
    got: Attention, spans: list[AttentionSpan], cache: KvCache, *, spare: int = 0, heads: int = HEADS
) -> None:
    """Every rule in both layers; also the cache's keys and values. `spare` padding rows of `got` come first."""
    oracle_cache = make_cache()
    moved = [AttentionSpan(s.row - spare, s.count, s.start, s.blocks) for s in spans]
    oracle = AttentionBatch(moved, oracle_cache, q_heads=heads, kv_heads=KV_HEADS)
    rows = sum(s.count for s in spans)
    q, k, v = noise_of(rows, heads)
    padded = [torch.cat((torch.full((spare, *t.shape[1:]), 1e3), t)) for t in (q, k, v)]
    for layer, rule in enumerate((*RULES, *RULES)):
        wanted = oracle.attend(layer % 2, q, k, v, scale=0.2, **rule)
        torch.testing.assert_close(got.attend(layer % 2, *padded, scale=0.2, **rule)[spare:], wanted)
    assert torch.equal(cache.k[:, :BLOCKS], oracle_cache.k[:, :BLOCKS])
    assert torch.equal(cache.v[:, :BLOCKS], oracle_cache.v[:, :BLOCKS])


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_librarys_steps_equal_the_oracle(step: tuple[tuple[int, int], ...]) -> None:
    cache = make_cache()
    assert_same(flash(cache).step(spans_of(step)), spans_of(step), cache)


@pytest.mark.parametrize("make", [flash, plain])
def test_fixed_steps_equal_the_oracle_whatever_was_there_before(make) -> None:
    """One set of buffers for step after step; padding rows first, then rows of other contexts and blocks."""
    for spare in (2, 0, 1):
        cache = make_cache()
        maker: AttentionMaker = make(cache)
        fixed = maker.fixed(3)
        for step in ([(1, 30)], [(1, 2), (1, 8), (1, 5)]):
            fixed.fill(spans_of(step, first_row=3 - len(step)))
            fixed.attend(0, *noise_of(3), scale=0.2)
        for tensor, fresh in ((cache.k, make_cache().k), (cache.v, make_cache().v)):
            tensor.copy_(fresh)
        step = ((1, 0), (1, 7), (1, 16))[spare:]
        spans = spans_of(step, first_row=spare)
        fixed.fill(spans)
        assert_same(fixed, spans, cache, spare=spare)


def test_kernels_are_planned_once_per_step_and_rule() -> None:
    cache = make_cache()
    maker = flash(cache)
    fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.made = 0
    for _ in range(3):
        step = maker.step(spans_of(STEPS[0]))
        for layer in range(8):
            step.attend(layer % 2, *noise_of(3), scale=0.2, window=5 if layer % 2 else None)
    wrappers = list(maker._wrappers.values())
    assert [w.plans for w in wrappers] == [3, 3]
    assert fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.made == 2
    assert not any(w.named["use_tensor_cores"] for w in wrappers), "two queries per key head are few"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "installed", "name"),
    [
        (torch.bfloat16, 128, True, "flashinfer"),
        (torch.float16, 64, True, "flashinfer"),
        (torch.bfloat16, 128, False, "torch"),
        (torch.bfloat16, 80, True, "torch"),
        (torch.float32, 128, True, "torch"),
    ],
)
def test_the_library_is_taken_where_it_has_kernels(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int, installed: bool, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr("services.executor.engine.backend.find_spec", lambda name: object() if installed else None)
    info = ModelInfo(
        path="native", vocab_size=8, hidden_size=8, layers=2, heads=HEADS, kv_heads=KV_HEADS, head_dim=head_dim,
        max_context=CONTEXT, eos_ids=frozenset(), dtype=dtype,
    )  # fmt: skip
    assert gpu_attention(make_cache(), info).name == name
    assert torch_attention(make_cache(), info).name == "torch"
