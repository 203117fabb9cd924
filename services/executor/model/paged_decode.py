"""Attention of decoding rows straight over the paged cache, in float32, with nothing gathered.

A step's block tables become one sparse pattern: query head h of row t meets the slots of its own request. The scores
are the products of queries and keys at that pattern, the answer is a weighted sum of value rows picked by the same
list. Both read keys and values where they lie. Built once per step, used by every layer.

A compiled step does it in one loop over memory, and contexts of all lengths together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.executor.kernels.cpu_step import CpuStep
from services.executor.kernels.threads import on_one_thread
from services.executor.kv_blocks import NULL_BLOCK

# Scores of a layer (rows x heads x positions) below which one thread computes them. Three parallel regions cost more
# than a second thread gains: at 9 heads and 96 positions, 1 row takes 64 µs on one thread and 260 on two, 8 rows 181
# and 350, 16 rows 325 and about 440, 32 rows 640 and 560.
_SHARED = 20_000


class PagedDecode:
    """One query row per request, over contexts of about one length.

    `starts[i]` is row i's position, so it sees positions [0, starts[i]]; `blocks[i]` is its block table.
    """

    def __init__(
        self, starts: Sequence[int], blocks: Sequence[Sequence[int]], *, block_size: int, q_heads: int, kv_heads: int,
        slots: int,
    ) -> None:  # fmt: skip
        rows, longest = len(starts), max(starts) + 1
        width = -(-longest // block_size)
        table = torch.tensor([[*b[:width], *[NULL_BLOCK] * (width - len(b))] for b in blocks], dtype=torch.int32)
        position = torch.arange(longest, dtype=torch.int32)
        slot = table[:, position // block_size] * block_size + position % block_size
        head = torch.arange(kv_heads, dtype=torch.int32)
        key = slot[:, None, None, :] * kv_heads + head[None, :, None, None]
        self._keys = key.expand(rows, kv_heads, q_heads // kv_heads, longest).reshape(-1)
        bounds = torch.arange(0, rows * q_heads * longest + 1, longest, dtype=torch.int32)
        self._offsets = bounds[:-1].contiguous()
        self._pattern = torch.sparse_csr_tensor(
            bounds, self._keys, torch.zeros(len(self._keys)), (rows * q_heads, slots * kv_heads),
            check_invariants=False,
        )  # fmt: skip
        self._last = torch.tensor(starts, dtype=torch.int32)
        self._position = position
        self._longest = longest
        self._even = min(starts) == max(starts)
        self._unseen: dict[int | None, torch.Tensor | None] = {}

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *,
        scale: float, window: int | None, softcap: float | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the attention output; see `AttentionBatch.attend` for the semantics.

        Shapes: q [rows, q_heads, head_dim]; keys, values [slots, kv_heads, head_dim], a layer's; returns
        [rows, q_heads * head_dim]. All float32.
        """
        if len(self._keys) < _SHARED:
            return on_one_thread(self._attend, q, keys, values, scale=scale, window=window, softcap=softcap)
        return self._attend(q, keys, values, scale=scale, window=window, softcap=softcap)

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *,
        scale: float, window: int | None, softcap: float | None,
    ) -> torch.Tensor:  # fmt: skip
        rows, heads, size = q.shape
        pattern = torch.sparse.sampled_addmm(
            self._pattern, q.reshape(-1, size), keys.view(-1, size).t(), beta=0.0, alpha=scale
        )
        scores = pattern.values().view(rows, heads, self._longest)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        unseen = self._mask(window)
        if unseen is not None:
            scores += unseen
        weights = scores.softmax(dim=-1).view(-1)
        out = torch.embedding_bag(values.view(-1, size), self._keys, self._offsets, False, 0, False, weights, False)[0]
        return out.view(rows, heads * size)

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """Return -inf where a row does not see, else 0, [rows, 1, longest]; None where all see all. Made once."""
        if window not in self._unseen:
            unseen = self._position[None, :] > self._last[:, None]
            if window is not None:
                unseen |= self._position[None, :] <= self._last[:, None] - window
            needed = not self._even or (window is not None and window < self._longest)
            mask = torch.zeros(unseen.shape).masked_fill_(unseen, float("-inf")).unsqueeze(1)
            self._unseen[window] = mask if needed else None
        return self._unseen[window]


class CompiledDecode:
    """The same by the compiled step, for contexts of any lengths, and for several rows of a request.

    Request i has `counts[i]` rows, from position `starts[i]` on.
    """

    def __init__(
        self, starts: Sequence[int], counts: Sequence[int], blocks: Sequence[Sequence[int]], step: CpuStep
    ) -> None:
        width = max(len(b) for b in blocks)
        # By numpy: torch takes twice as long for a list of lists.
        padded = [[*b, *[NULL_BLOCK] * (width - len(b))] for b in blocks]
        table = torch.from_numpy(np.array(padded, dtype=np.int32))
        ends = torch.tensor([start + 1 for start in starts], dtype=torch.int32)
        if len(counts) < sum(counts):
            many = torch.tensor(counts)
            own = torch.arange(len(counts)).repeat_interleave(many)
            begins = many.cumsum(0) - many
            table = table[own]
            ends = (ends[own] + torch.arange(len(own)) - begins[own]).to(torch.int32)
        self._table, self._ends = table, ends
        self._begins: dict[int | None, torch.Tensor] = {None: torch.zeros_like(ends)}
        self._step = step

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *,
        scale: float, window: int | None, softcap: float | None,
        fresh: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        turn: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `PagedDecode.attend`, and `CpuStep.attend` for `fresh` and `turn`.

        Shapes: keys, values [blocks, block_size, kv_heads, head_dim].
        """
        begins = self._begins.get(window)
        if begins is None:
            assert window is not None
            begins = self._begins[window] = (self._ends - window).clamp_(min=0)
        return self._step.attend(
            q, keys, values, self._table, begins, self._ends, scale=scale, softcap=softcap, fresh=fresh, turn=turn
        )
