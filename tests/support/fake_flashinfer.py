"""Stands in for the module flashinfer: the two wrappers that we use, computing in plain torch what their documents say.

Written from FlashInfer's documentation of `plan` and `run` (0.7): page tables as starts, indices and the length of the
last page; `window_left` counts keys before a query's own; the causal mask ends at a request's last key; with
`use_cuda_graph` the batch keeps its size and the tables are copied to the buffers that were given.
"""

from __future__ import annotations

from typing import Any

import torch


class _Wrapper:
    made = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", **named: Any) -> None:
        type(self).made += 1
        assert workspace.dtype is torch.uint8
        assert not workspace[:64].any(), "zero at its first use"
        assert kv_layout == "NHD"
        self.named = named
        self.plans = 0

    def _note(
        self, queries: torch.Tensor, bounds: torch.Tensor, pages: torch.Tensor, last: torch.Tensor, *sizes: int,
        causal: bool, sm_scale: float, window_left: int, logits_soft_cap: float | None, q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert {t.dtype for t in (queries, bounds, pages, last)} == {torch.int32}
        assert len(queries) == len(bounds) == len(last) + 1
        assert len(pages) == bounds[-1]
        self.plans += 1
        self.sizes, self.dtypes = sizes, (q_data_type, kv_data_type)
        self.rule = (sm_scale, window_left, logits_soft_cap)
        self.queries, self.bounds, self.pages, self.last = queries, bounds, pages, last
        assert causal or bool((queries.diff() == 1).all())

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q_heads, kv_heads, head_dim, page = self.sizes
        assert q.is_contiguous()
        assert q.shape == (int(self.queries[-1]), q_heads, head_dim)
        assert cache[0].shape[1:] == (page, kv_heads, head_dim)
        assert (q.dtype, cache[0].dtype) == self.dtypes
        scale, window, cap = self.rule
        out = torch.empty_like(q)
        for i in range(len(self.last)):
            own = self.pages[int(self.bounds[i]) : int(self.bounds[i + 1])].long()
            length = (len(own) - 1) * page + int(self.last[i])
            k, v = (t[own].reshape(-1, kv_heads, head_dim)[:length].double() for t in cache)
            k, v = (t.repeat_interleave(q_heads // kv_heads, dim=1) for t in (k, v))
            rows = slice(int(self.queries[i]), int(self.queries[i + 1]))
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * scale
            if cap:
                scores = torch.tanh(scores / cap) * cap
            at = torch.arange(length)[None, :]
            last = length - (rows.stop - rows.start) + torch.arange(rows.stop - rows.start)[:, None]
            seen = at <= last
            if window >= 0:
                seen &= at >= last - window
            weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, queries: torch.Tensor, bounds: torch.Tensor, pages: torch.Tensor, last: torch.Tensor,
             *sizes: int, causal: bool, **rule: Any) -> None:  # fmt: skip
        assert causal
        self._note(queries, bounds, pages, last, *sizes, causal=True, **rule)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, bounds: torch.Tensor, pages: torch.Tensor, last: torch.Tensor, *sizes: int, **rule: Any) -> None:
        queries = torch.arange(len(last) + 1, dtype=torch.int32)
        if self.named.get("use_cuda_graph"):
            buffers = [self.named[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
            assert len(buffers[0]) == len(bounds), "the batch keeps its size"
            assert len(pages) <= len(buffers[1])
            for buffer, values in zip(buffers, (bounds, pages, last), strict=True):
                buffer[: len(values)].copy_(values)
            self._note(queries, bounds, pages, last, *sizes, causal=False, **rule)
            self.bounds, self.pages, self.last = buffers
            return
        self._note(queries, bounds, pages, last, *sizes, causal=False, **rule)
