"""Attention over paged keys and values, as an engine asks for it: a port, and its implementation in plain torch.

A step's attention is made in one of two ways. `step` looks at the spans and arranges what suits them. `fixed` makes one
whose buffers keep their addresses and shapes, for decode steps that a captured graph replays: `fill` changes what the
buffers say, `attend` is what is captured. On a GPU `flash_attention.py` implements the same; this is its oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.executor.kernels import streams
from services.executor.kv_blocks import NULL_BLOCK
from services.executor.model.attention import AttentionBatch, AttentionSpan, KvCache
from services.executor.model.interface import Attention


class FixedAttention(Attention, Protocol):
    """The attention of decode steps of a fixed number of rows."""

    def fill(self, spans: Sequence[AttentionSpan]) -> None:
        """Say what the next steps' rows see; each span has one row. Rows without a span are padding: they write to the
        cache's spare block and their output means nothing."""


class AttentionMaker(Protocol):
    """Makes the attention of steps over one cache. Owned by the device thread."""

    @property
    def name(self) -> str:
        """What computes it, for the log."""

    def step(self, spans: Sequence[AttentionSpan]) -> Attention:
        """Return the attention of one step."""

    def fixed(self, rows: int) -> FixedAttention:
        """Return the attention of decode steps of `rows` rows, all of them padding. The cache has a spare block."""


class TorchAttention:
    """Implements `AttentionMaker` with torch's own products; `max_context` bounds `fixed`, in tokens."""

    name = "torch"

    def __init__(self, cache: KvCache, *, q_heads: int, kv_heads: int, max_context: int) -> None:
        self._cache = cache
        self._heads = q_heads, kv_heads
        self._blocks = -(-max_context // cache.block_size)

    def step(self, spans: Sequence[AttentionSpan]) -> Attention:
        """See `AttentionMaker`."""
        q_heads, kv_heads = self._heads
        return AttentionBatch(spans, self._cache, q_heads=q_heads, kv_heads=kv_heads)

    def fixed(self, rows: int) -> FixedAttention:
        """See `AttentionMaker`."""
        return FixedDecode(self._cache, rows=rows, blocks=self._blocks, fold=self._heads[0] // self._heads[1])


class Refilled:
    """An int tensor that keeps its address. `fill` is in order with the steps' stream."""

    def __init__(self, *shape: int, value: int = 0, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.full(shape, value, dtype=dtype, device=device)
        self._pinned = streams.on_gpu(device)

    def fill(self, values: Sequence[object]) -> None:
        """Write `values` to the front; the rest stays."""
        host = torch.tensor(values, dtype=self.tensor.dtype, pin_memory=self._pinned)
        self.tensor[: len(host)].copy_(host, non_blocking=True)


class FixedDecode:
    """Gathers every row's blocks, up to the longest context there may be: right, and slow where contexts are short."""

    def __init__(self, cache: KvCache, *, rows: int, blocks: int, fold: int) -> None:
        assert cache.spare_block is not None, "padding rows need a block to write to"
        device = cache.k.device
        self._cache, self._rows, self._fold, self._blocks = cache, rows, fold, blocks
        self._nowhere = cache.spare_block * cache.block_size
        self._slots = Refilled(rows, value=self._nowhere, dtype=torch.int64, device=device)
        self._table = Refilled(rows, blocks, value=NULL_BLOCK, dtype=torch.int64, device=device)
        self._last = Refilled(rows, dtype=torch.int64, device=device)
        self._keys = torch.arange(blocks * cache.block_size, device=device)

    def fill(self, spans: Sequence[AttentionSpan]) -> None:
        """See `FixedAttention`."""
        size = self._cache.block_size
        slots, last = [self._nowhere] * self._rows, [0] * self._rows
        table = [[NULL_BLOCK] * self._blocks for _ in range(self._rows)]
        for span in spans:
            slots[span.row] = span.blocks[span.start // size] * size + span.start % size
            last[span.row] = span.start
            table[span.row][: len(span.blocks)] = span.blocks[: self._blocks]
        self._slots.fill(slots)
        self._last.fill(last)
        self._table.fill(table)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
        scale: float, window: int | None = None, softcap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `AttentionBatch.attend`. Everything that a step changes is read from the buffers."""
        rows, heads, head_dim = k.shape
        keys, values = self._cache.k[layer], self._cache.v[layer]
        for cached, new in ((keys, k), (values, v)):
            cached.view(-1, heads, head_dim).index_copy_(0, self._slots.tensor, new)
        table = self._table.tensor.view(-1)
        ks, vs = (t.index_select(0, table).view(rows, -1, heads, head_dim).transpose(1, 2) for t in (keys, values))
        last = self._last.tensor[:, None]
        seen = self._keys[None, :] <= last
        if window is not None:
            seen = seen & (self._keys[None, :] > last - window)
        mask = seen[:, None, None, :]
        qs = q.reshape(rows, heads, self._fold, head_dim)
        if softcap is None:
            out = scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, scale=scale)
        else:
            scores = torch.tanh(qs @ ks.transpose(2, 3) * (scale / softcap)) * softcap
            weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
            out = weights @ vs
        return out.reshape(rows, -1)
