"""Stands in for the module flashinfer: the two wrappers that we use, computing in plain torch what their documents say.

`SIGNATURES` are the parameters of FlashInfer `VERSION`, and every call here is bound to them as Python would bind it:
a name that the library does not know is a TypeError here too. Where FlashInfer is installed a test holds the table to
it. What is computed follows the documents of `plan` and `run`: page tables as starts, indices and the length of the last
page; `window_left` counts keys before a query's own; the causal mask ends at a request's last key; with
`use_cuda_graph` the batch keeps its size and the tables are copied to the buffers that were given.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

VERSION = "0.7.4"
DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
_RULE = "pos_encoding_mode= window_left= logits_soft_cap= q_data_type= kv_data_type= o_data_type= sm_scale="
_ROPE = "rope_scale= rope_theta= non_blocking= block_tables= seq_lens= fixed_split_size= disable_split_kv="
_RUN = "q_scale= k_scale= v_scale= out= lse= return_lse= enable_pdl= window_left= sinks="
# Names in order; `=` has a default, what follows `*` goes by name only. Of parameters that are never passed by place the
# order says nothing.
SIGNATURES = {
    (DECODE, "__init__"): "float_workspace_buffer kv_layout= use_cuda_graph= use_tensor_cores= paged_kv_indptr_buffer="
    " paged_kv_indices_buffer= paged_kv_last_page_len_buffer= backend= jit_args= jit_kwargs=",
    (DECODE, "plan"): "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size * window_right="
    f" data_type= q_len_per_req= is_causal= use_token_head_sf= {_RULE} {_ROPE}",
    (DECODE, "run"): f"q paged_kv_cache * {_RUN} q_len_per_req= skip_softmax_threshold_scale_factor= kv_cache_sf=",
    (PREFILL, "__init__"): "float_workspace_buffer kv_layout= use_cuda_graph= qo_indptr_buf= paged_kv_indptr_buf="
    " paged_kv_indices_buf= paged_kv_last_page_len_buf= custom_mask_buf= mask_indptr_buf= backend= jit_args="
    " jit_kwargs= variant_owns_mask= max_total_num_rows=",
    (PREFILL, "plan"): "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads"
    f" head_dim_qk page_size * head_dim_vo= custom_mask= packed_custom_mask= causal= {_RULE} {_ROPE}"
    " use_fp16_qk_reduction= prefix_len_ptr= token_pos_in_items_ptr= token_pos_in_items_len= max_item_len_ptr="
    " seq_lens_q= max_token_per_sequence= max_sequence_kv= uniform_q_len= use_token_head_sf=",
    (PREFILL, "run"): f"q paged_kv_cache * {_RUN} kv_cache_sf= skip_softmax_threshold_scale_factor="
    " lse_base= lse_layout= use_fp16_softmax= uses_spcompress=",
}


def signature_of(owner: str, method: str) -> inspect.Signature:
    """Return the table's entry as Python's own signature, without `self`."""
    kind, found = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for word in SIGNATURES[owner, method].split():
        if word == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            default = None if word.endswith("=") else inspect.Parameter.empty
            found.append(inspect.Parameter(word.rstrip("="), kind, default=default))
    return inspect.Signature(found)


def attend(
    q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, queries: torch.Tensor, bounds: torch.Tensor,
    pages: torch.Tensor, last: torch.Tensor, scale: float, window: int, cap: float,
) -> torch.Tensor:  # fmt: skip
    """Return attention over pages in float64. Shapes: q [rows, heads, size]; cache 2 x [pages, page, kv heads, size]."""
    page, kv_heads = cache[0].shape[1:3]
    out = torch.empty_like(q)
    for i in range(len(last)):
        own = pages[int(bounds[i]) : int(bounds[i + 1])].long()
        length = (len(own) - 1) * page + int(last[i])
        k, v = (t[own].reshape(-1, kv_heads, q.shape[2])[:length].double() for t in cache)
        k, v = (t.repeat_interleave(q.shape[1] // kv_heads, dim=1) for t in (k, v))
        rows = slice(int(queries[i]), int(queries[i + 1]))
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * scale
        if cap:
            scores = torch.tanh(scores / cap) * cap
        at = torch.arange(length)[None, :]
        ends = length - (rows.stop - rows.start) + torch.arange(rows.stop - rows.start)[:, None]
        seen = at <= ends
        if window >= 0:
            seen &= at >= ends - window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


class _Wrapper:
    made = 0
    where: tuple[str, str, str, str]  # what `plan` calls starts of rows, starts of pages, pages, lengths of last pages

    def __init__(self, *given: Any, **named: Any) -> None:
        type(self).made += 1
        self.named = self._bind("__init__", given, named)
        workspace = self.named["float_workspace_buffer"]
        assert workspace.dtype is torch.uint8
        assert workspace.data_ptr() % 16 == 0
        assert not workspace[:64].any(), "zero at its first use"
        assert self.named["kv_layout"] == "NHD"
        self.plans = 0
        # A plan is made in pinned memory; its copy runs in order with the stream, some time after `plan` has returned.
        self.pinned, self.planned = torch.zeros(4), torch.zeros(4)
        self._buffers: list[torch.Tensor] = []

    def _bind(self, method: str, given: Any, named: Any) -> dict[str, Any]:
        bound = signature_of(type(self).__name__, method).bind(*given, **named)
        bound.apply_defaults()
        return bound.arguments

    def plan(self, *given: Any, **named: Any) -> None:
        say = self._bind("plan", given, named)
        bounds, pages, last = (say[name] for name in self.where[1:])
        queries = say[self.where[0]] if self.where[0] else torch.arange(len(last) + 1, dtype=torch.int32)
        tables = queries, bounds, pages, last
        assert {(t.dtype, t.dim(), t.is_contiguous()) for t in tables} == {(torch.int32, 1, True)}
        assert len(queries) == len(bounds) == len(last) + 1
        assert queries[0] == bounds[0] == 0
        assert len(pages) == bounds[-1]
        assert bool((bounds.diff() >= 1).all()), "a request without a page"
        assert bool((queries.diff() >= 1).all()), "a request without a row"
        assert bool(((last >= 1) & (last <= say["page_size"])).all())
        assert say["num_qo_heads"] % say["num_kv_heads"] == 0
        assert (say["pos_encoding_mode"], say["o_data_type"]) == (None, None)
        self.plans += 1
        self.pinned.fill_(self.plans)
        self.planned.copy_(self.pinned, non_blocking=True)
        self.say = say
        self.tables = self._kept(tables)

    def _kept(self, tables: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tables

    def run(self, *given: Any, **named: Any) -> torch.Tensor:
        asked = self._bind("run", given, named)
        say, q, cache = self.say, asked["q"], asked["paged_kv_cache"]
        self.planned.clone()
        queries, bounds, pages, last = self.tables
        head_dim = say.get("head_dim") or say["head_dim_qk"]
        assert q.is_contiguous()
        assert q.shape == (int(queries[-1]), say["num_qo_heads"], head_dim)
        assert all(t.shape[1:] == (say["page_size"], say["num_kv_heads"], head_dim) for t in cache)
        assert cache[0].stride() == cache[1].stride(), "another kernel is compiled for other strides"
        assert (q.dtype, cache[0].dtype) == (say["q_data_type"], say["kv_data_type"])
        assert int(pages[: int(bounds[-1])].max()) < len(cache[0])
        window = -1 if say["window_left"] is None else say["window_left"]
        return attend(
            q, cache, queries=queries, bounds=bounds, pages=pages, last=last, scale=say["sm_scale"], window=window,
            cap=say["logits_soft_cap"] or 0.0,
        )  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    where = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")

    def plan(self, *given: Any, **named: Any) -> None:
        super().plan(*given, **named)
        assert self.say["causal"] is True


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    where = ("", "indptr", "indices", "last_page_len")

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.named["use_cuda_graph"]:
            self._buffers = [self.named[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
            assert {b.dtype for b in self._buffers} == {torch.int32}
            assert len(self._buffers[0]) == len(self._buffers[2]) + 1

    def plan(self, *given: Any, **named: Any) -> None:
        super().plan(*given, **named)
        group = self.say["num_qo_heads"] // self.say["num_kv_heads"]
        assert self.named["use_tensor_cores"] or group in (1, 2, 3, 4, 6, 8, 16), "no kernel on plain cores"

    def _kept(self, tables: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        queries, *changing = tables
        if not self._buffers:
            return tables
        assert len(self._buffers[0]) == len(changing[0]), "the batch keeps its size"
        assert len(changing[1]) <= len(self._buffers[1])
        for buffer, values in zip(self._buffers, changing, strict=True):
            buffer[: len(values)].copy_(values)
        return queries, *self._buffers
