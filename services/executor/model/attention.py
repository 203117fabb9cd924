"""Attention over the paged key/value cache, for packed rows that mix prefill and decode.

The cache of a layer has shape [blocks, block_size, kv_heads, head_dim]; block 0 is the null block and stays zero.
Rows are handled in groups that share one product: all rows that decode and have about the same context
(padded to the longest with the null block), and all prefill chunks of one shape. Grouping is decided once per step;
the layers repeat it. In float32, decoding rows read the cache where it lies (paged_decode.py). With a compiled step,
all rows that decode are one group, and short prefill chunks with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from services.executor.kernels.cpu_step import CpuStep
from services.executor.kv_blocks import NULL_BLOCK
from services.executor.model.paged_decode import CompiledDecode, PagedDecode

# Rows x positions of a prefill chunk up to which a compiled step reads the cache for each of its rows.
# Products of whole chunks cost little for each position, and much to start: beside 16 rows that decode, in bfloat16, a
# chunk of 64 tokens takes 139 µs by rows and 189 by products, one of 128 323 and 280. Three of 64 take 311 and 293, but
# a chunk whose way depended on its neighbours would have other last bits beside them.
_SHORT = 1 << 13


class KvCache:
    """Keys and values of all layers: two tensors [layers, blocks, block_size, kv_heads, head_dim]."""

    def __init__(
        self, *, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device | str = "cpu", spare: bool = False, poison: bool = False, step: CpuStep | None = None,
    ) -> None:  # fmt: skip
        """`spare` adds one block behind the others, for keys and values of padding rows that nobody reads. `step`
        computes what reads the cache row by row, where it is there."""
        shape = (layers, blocks + spare, block_size, kv_heads, head_dim)
        self.block_size = block_size
        self.spare_block = blocks if spare else None
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = tuple(zip(self.k.unbind(), self.v.unbind(), strict=True))
        self.step = step if dtype in (torch.float32, torch.bfloat16) else None
        self._poison = poison
        if poison:
            self.erase(list(range(1, blocks)))

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that were just handed out: nothing of their last owner is left, and padding is finite."""
        if blocks:
            index = torch.tensor(blocks, device=self.k.device)
            self.k.index_fill_(1, index, 0.0)
            self.v.index_fill_(1, index, 0.0)

    def erase(self, blocks: Sequence[int]) -> None:
        """With `poison`, fill blocks that nobody holds with NaN. Otherwise nothing: `clear` comes before any use."""
        if self._poison and blocks:
            index = torch.tensor(blocks, device=self.k.device)
            self.k.index_fill_(1, index, float("nan"))
            self.v.index_fill_(1, index, float("nan"))


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """One request's rows: `count` packed rows from `row`, at positions [start, start + count), over `blocks`."""

    row: int
    count: int
    start: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans computed together. `rows` int64 [spans * count], empty where a compiled step computes all rows as one
    group; `table` int64 [spans * blocks], None for prefill without context; `last` int64 [spans or 1, count], each
    query's position, so the last key that it sees; `keys` positions. `paged` computes the group where it is set."""

    rows: torch.Tensor
    spans: int
    count: int
    table: torch.Tensor | None
    last: torch.Tensor
    keys: int
    fold: int
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    paged: PagedDecode | CompiledDecode | None = None

    def is_plain(self, window: int | None) -> bool:
        """Says whether the queries and keys of this step alone, plainly causal, are all that counts."""
        return self.table is None and (window is None or window >= self.count)

    def mask(self, window: int | None) -> torch.Tensor:
        """Return which keys are seen, bool [spans or 1, 1, count * fold, keys]; made once per step."""
        mask = self.masks.get(window)
        if mask is None:
            last = self.last[:, :, None]
            key = torch.arange(self.keys, device=last.device)[None, None, :]
            seen = key <= last
            if window is not None:
                seen &= key > last - window
            mask = self.masks[window] = seen.repeat_interleave(self.fold, dim=1).unsqueeze(1)
        return mask


@dataclass(frozen=True, slots=True)
class _Rule:
    """A layer's own attention: see `AttentionBatch.attend`."""

    scale: float
    window: int | None
    softcap: float | None


class AttentionBatch:
    """The attention of one step: where new keys and values go, and which rows see what."""

    def __init__(self, spans: Sequence[AttentionSpan], cache: KvCache, *, q_heads: int, kv_heads: int) -> None:
        self._cache = cache
        self._fold = q_heads // kv_heads
        self._kv_heads = kv_heads
        self._slots = _slots(spans, cache.block_size).to(cache.k.device)
        together, groups = _group(spans, cache.step is not None)
        self._groups = [_make_group(group, cache, q_heads, kv_heads) for group in groups]
        self._whole = len(groups) + bool(together) == 1 and _is_range(spans)
        if together and cache.step is not None:
            self._groups.append(_compiled_group(together, cache.step, self._fold, whole=self._whole))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
        scale: float, window: int | None = None, softcap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write k and v to the cache and return the attention output.

        Semantics: out[t] = softmax(cap(scale * q[t] · K)) V over the positions up to t of t's own request, of which
            `window` keeps the last so many, t included; cap(s) = softcap * tanh(s / softcap), s itself without softcap.
        Shapes: q [rows, q_heads, head_dim]; k, v [rows, kv_heads, head_dim]; returns [rows, q_heads * head_dim]. Rows
            behind those of the spans are padding: nothing is written for them, their output is zero.
        """
        keys, values = self._cache.layers[layer]
        head_dim, rows = q.shape[2], len(self._slots)
        keys.view(-1, self._kv_heads, head_dim).index_copy_(0, self._slots, k[:rows])
        values.view(-1, self._kv_heads, head_dim).index_copy_(0, self._slots, v[:rows])
        rule = _Rule(scale, window, softcap)
        if self._whole:
            out = self._attend_group(self._groups[0], q[:rows], k[:rows], v[:rows], keys, values, rule)
            return out if rows == len(q) else pad(out, (0, 0, 0, len(q) - rows))
        out = q.new_empty(q.shape[0], q.shape[1] * head_dim)
        out[rows:] = 0
        for group in self._groups:
            mine = group.rows
            some = [t.index_select(0, mine) for t in (q, k, v)]
            out.index_copy_(0, mine, self._attend_group(group, some[0], some[1], some[2], keys, values, rule))
        return out

    @property
    def is_one_call(self) -> bool:
        """Says whether the compiled step computes all rows of the step together."""
        return self._whole and isinstance(self._groups[0].paged, CompiledDecode)

    def rotate_and_attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], *,
        scale: float, window: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The same as `attend` of q and k that are rotated first, where the step `is_one_call`.

        Shapes: `turn` is cos and sin, [rows, 1, head_dim / 2], of all rows of q.
        """
        compiled, rows = self._groups[0].paged, len(self._slots)
        assert isinstance(compiled, CompiledDecode)
        keys, values = self._cache.layers[layer]
        fresh = (k, v, self._slots)
        out = compiled.attend(q[:rows], keys, values, scale=scale, window=window, softcap=None, fresh=fresh, turn=turn)
        return out if rows == len(q) else pad(out, (0, 0, 0, len(q) - rows))

    def _attend_group(
        self, group: _Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        keys: torch.Tensor, values: torch.Tensor, rule: _Rule,
    ) -> torch.Tensor:  # fmt: skip
        head_dim, n, count, heads = q.shape[2], group.spans, group.count, self._kv_heads
        if group.paged is not None:
            return group.paged.attend(q, keys, values, scale=rule.scale, window=rule.window, softcap=rule.softcap)
        if group.is_plain(rule.window) and rule.softcap is None:
            qs, ks, vs = (t.view(n, count, -1, head_dim).transpose(1, 2) for t in (q, k, v))
            out = scaled_dot_product_attention(qs, ks, vs, is_causal=True, scale=rule.scale, enable_gqa=self._fold > 1)
            return out.transpose(1, 2).reshape(n * count, -1)
        if group.table is None:
            ks, vs = (t.reshape(n, count, heads, head_dim).transpose(1, 2) for t in (k, v))
        else:
            ks = keys.index_select(0, group.table).view(n, -1, heads, head_dim).transpose(1, 2)
            vs = values.index_select(0, group.table).view(n, -1, heads, head_dim).transpose(1, 2)
        # The heads that share a key head become more queries of it: no key is repeated in memory.
        qs = q.view(n, count, heads, self._fold, head_dim).permute(0, 2, 1, 3, 4).reshape(n, heads, -1, head_dim)
        mask = group.mask(rule.window)
        if rule.softcap is None:
            out = scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, scale=rule.scale)
        else:
            out = _capped_attention(qs, ks, vs, mask=mask, scale=rule.scale, softcap=rule.softcap)
        return out.view(n, heads, count, self._fold, head_dim).permute(0, 2, 1, 3, 4).reshape(n * count, -1)


def _capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """Attention whose scores are capped before the mask; the fused kernels have no such step. Softmax in float32."""
    scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


def _slots(spans: Sequence[AttentionSpan], block_size: int) -> torch.Tensor:
    """Return the cache slot of every row, int64 [rows]. Vectorised over the tokens of a chunk."""
    parts: list[torch.Tensor] = []
    decoding: list[int] = []
    for span in spans:
        if span.count == 1:
            decoding.append(span.blocks[span.start // block_size] * block_size + span.start % block_size)
            continue
        if decoding:
            parts.append(torch.tensor(decoding))
            decoding = []
        positions = torch.arange(span.start, span.start + span.count)
        parts.append(torch.tensor(span.blocks)[positions // block_size] * block_size + positions % block_size)
    if decoding:
        parts.append(torch.tensor(decoding))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _group(spans: Sequence[AttentionSpan], compiled: bool) -> tuple[list[AttentionSpan], list[list[AttentionSpan]]]:
    """Return what a compiled step computes together, and the groups of all others: decoding spans by context within a
    factor of about 1.5, prefill spans by exact shape."""
    together: list[AttentionSpan] = []
    groups: dict[tuple[int, int], list[AttentionSpan]] = {}
    for span in spans:
        if compiled and (span.count == 1 or span.count * (span.count + span.start) <= _SHORT):
            together.append(span)
            continue
        key = (1, _bucket(len(span.blocks))) if span.count == 1 else (span.count, span.start)
        groups.setdefault(key, []).append(span)
    return together, list(groups.values())


def _bucket(blocks: int) -> int:
    """Return the least of 4, 6, 8, 12, 16, 24, … that is not below `blocks`."""
    size = 4
    while size < blocks:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def _compiled_group(spans: Sequence[AttentionSpan], step: CpuStep, fold: int, *, whole: bool) -> _Group:
    """Where the group is the `whole` step nobody asks for its rows."""
    rows = [] if whole else [row for span in spans for row in range(span.row, span.row + span.count)]
    starts, counts, blocks = ([getattr(span, name) for span in spans] for name in ("start", "count", "blocks"))
    paged, index = CompiledDecode(starts, counts, blocks, step), torch.tensor(rows, dtype=torch.int64)
    return _Group(index, sum(counts), 1, None, index, 0, fold, paged=paged)


def _make_group(spans: Sequence[AttentionSpan], cache: KvCache, q_heads: int, kv_heads: int) -> _Group:
    count, fold, block_size, device = spans[0].count, q_heads // kv_heads, cache.block_size, cache.k.device
    rows = torch.tensor([row for span in spans for row in range(span.row, span.row + count)], device=device)
    starts = torch.tensor([span.start for span in spans], device=device)
    last = starts[:, None] + torch.arange(count, device=device)[None, :]
    if count > 1 and spans[0].start == 0:
        return _Group(rows, len(spans), count, None, last[:1], count, fold)
    if count == 1 and cache.k.dtype is torch.float32 and cache.k.device.type == "cpu":
        paged = PagedDecode(
            [s.start for s in spans], [s.blocks for s in spans], block_size=block_size, q_heads=q_heads,
            kv_heads=kv_heads, slots=cache.k.shape[1] * block_size,
        )  # fmt: skip
        return _Group(rows, len(spans), count, None, last, 0, fold, paged=paged)
    width = max(len(span.blocks) for span in spans)
    padded = [[*s.blocks, *[NULL_BLOCK] * (width - len(s.blocks))] for s in spans]
    table = torch.tensor(padded, device=device).view(-1)
    return _Group(rows, len(spans), count, table, last, width * block_size, fold)


def _is_range(spans: Sequence[AttentionSpan]) -> bool:
    """Say whether the spans' rows are 0, 1, 2, … in order."""
    ends = [0, *(span.row + span.count for span in spans)]
    return all(span.row == end for span, end in zip(spans, ends, strict=False))
