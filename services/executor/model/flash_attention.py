"""Attention over paged keys and values by FlashInfer (docs/adr/0020): the GPU's implementation of `AttentionMaker`.

The cache is read as it lies: [blocks, block size, heads, head_dim] is FlashInfer's NHD layout, a block is its page.
Steps that only decode take its decode kernels, all others its prefill kernels, whose causal mask ends at each request's
last token, so that chunks and single tokens share one call. A kernel is planned once per step and rule (scale, window,
cap) on the host, and then runs in every layer of that rule.

The library is handed in, so that this needs neither FlashInfer nor a GPU to be imported or tested. FlashInfer compiles
its kernels at their first use: `prepare` in engine/backend.py uses them before the first request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.executor.kernels import streams
from services.executor.model.attention import AttentionSpan, KvCache
from services.executor.model.interface import Attention
from services.executor.model.paged_attention import FixedAttention, Refilled

# What FlashInfer's kernels are made for; anything else takes torch's products.
HEAD_DIMS, DTYPES = frozenset({64, 128, 256}), frozenset({torch.float16, torch.bfloat16})
_WORKSPACE_BYTES = 128 << 20  # the size that FlashInfer recommends for partial results
_MANY_QUERIES = 4  # query heads per key head from which its decode kernels use tensor cores


def fits(*, dtype: torch.dtype, head_dim: int) -> bool:
    """Say whether FlashInfer has kernels for such keys and values."""
    return dtype in DTYPES and head_dim in HEAD_DIMS


@dataclass(frozen=True, slots=True)
class _Rule:
    """A layer's own attention: see `AttentionBatch.attend`."""

    scale: float
    window: int | None
    softcap: float | None

    def arguments(self) -> dict[str, Any]:
        """Return the rule in FlashInfer's words: its window counts the tokens before a query's own."""
        left = -1 if self.window is None else self.window - 1
        return {"sm_scale": self.scale, "window_left": left, "logits_soft_cap": self.softcap}


@dataclass(frozen=True, slots=True)
class _Pages:
    """A step in FlashInfer's words: `queries` and `bounds` are starts [spans + 1] of each request's rows and pages."""

    queries: torch.Tensor
    bounds: torch.Tensor
    pages: torch.Tensor
    last: torch.Tensor
    slots: list[int]

    @property
    def decodes(self) -> bool:
        return len(self.slots) == len(self.last)


def _pages(spans: Sequence[AttentionSpan], size: int) -> _Pages:
    """Return the pages of spans that follow each other row by row."""
    queries, bounds, pages = [0], [0], list[int]()
    last, slots = list[int](), list[int]()
    for span in spans:
        end = span.start + span.count
        own = span.blocks[: -(-end // size)]
        pages += own
        queries.append(queries[-1] + span.count)
        bounds.append(len(pages))
        last.append((end - 1) % size + 1)
        slots += [own[at // size] * size + at % size for at in range(span.start, end)]
    queries_, bounds_, pages_, last_ = (torch.tensor(x, dtype=torch.int32) for x in (queries, bounds, pages, last))
    return _Pages(queries_, bounds_, pages_, last_, slots)


class FlashAttention:
    """Implements `AttentionMaker`. `library` is the module flashinfer; `max_context` counts tokens."""

    name = "flashinfer"

    def __init__(self, cache: KvCache, *, q_heads: int, kv_heads: int, max_context: int, library: Any) -> None:
        self.cache = cache
        self.max_blocks = -(-max_context // cache.block_size)
        self._heads = q_heads, kv_heads
        self._library = library
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=cache.k.device)
        self._wrappers: dict[tuple[bool, _Rule], Any] = {}
        self._copied: dict[Any, torch.cuda.Event] = {}

    def step(self, spans: Sequence[AttentionSpan]) -> Attention:
        """See `AttentionMaker`. Only the newest step's attention may be used: all share their kernels' plans."""
        return _FlashStep(self, _pages(spans, self.cache.block_size))

    def fixed(self, rows: int) -> FixedAttention:
        """See `AttentionMaker`."""
        return _FlashFixed(self, rows)

    def planned(self, pages: _Pages, rule: _Rule) -> Any:
        """Return kernels planned for a step."""
        key = (pages.decodes, rule)
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            made = self._decode if pages.decodes else self._library.BatchPrefillWithPagedKVCacheWrapper
            wrapper = self._wrappers[key] = made(self._workspace, "NHD")
        if pages.decodes:
            self.plan_decode(wrapper, pages, rule)
        else:
            self._plan(wrapper, pages.queries, pages.bounds, pages.pages, pages.last, rule=rule, causal=True)
        return wrapper

    def plan_decode(self, wrapper: Any, pages: _Pages, rule: _Rule) -> None:
        """Plan decode kernels for a step."""
        self._plan(wrapper, pages.bounds, pages.pages, pages.last, rule=rule)

    def _plan(self, wrapper: Any, *where: torch.Tensor, rule: _Rule, **more: bool) -> None:
        """Plan, once the wrapper's last plan has reached the device: FlashInfer overwrites the memory it lay in."""
        copied = self._copied.get(wrapper)
        if copied is not None:
            copied.synchronize()
        wrapper.plan(*where, *self._sizes(), **rule.arguments(), **self._dtypes(), **more)
        if streams.on_gpu(self.cache.k.device):
            self._copied[wrapper] = copied = copied or torch.cuda.Event()
            copied.record()

    def captured(self, rows: int) -> Any:
        """Return decode kernels that a graph may capture: their metadata keeps its place."""
        device = self.cache.k.device
        bounds, last, pages = (
            torch.zeros(count, dtype=torch.int32, device=device) for count in (rows + 1, rows, rows * self.max_blocks)
        )
        buffers = {"indptr": bounds, "indices": pages, "last_page_len": last}
        return self._decode(
            self._workspace, "NHD", use_cuda_graph=True, **{f"paged_kv_{k}_buffer": v for k, v in buffers.items()}
        )

    def _decode(self, *arguments: Any, **named: Any) -> Any:
        q_heads, kv_heads = self._heads
        tensor_cores = q_heads // kv_heads >= _MANY_QUERIES
        return self._library.BatchDecodeWithPagedKVCacheWrapper(*arguments, use_tensor_cores=tensor_cores, **named)

    def _sizes(self) -> tuple[int, int, int, int]:
        return (*self._heads, self.cache.k.shape[4], self.cache.block_size)

    def _dtypes(self) -> dict[str, torch.dtype]:
        return {"q_data_type": self.cache.k.dtype, "kv_data_type": self.cache.k.dtype}

    def run(
        self, wrapper: Any, slots: torch.Tensor, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write a layer's keys and values and run planned kernels over its cache."""
        keys, values = self.cache.k[layer], self.cache.v[layer]
        for cached, new in ((keys, k), (values, v)):
            cached.view(-1, *new.shape[1:]).index_copy_(0, slots, new)
        out: torch.Tensor = wrapper.run(q.contiguous(), (keys, values))
        return out.view(q.shape[0], -1)


class _FlashStep:
    """The attention of one step: each rule is planned at its first layer."""

    def __init__(self, maker: FlashAttention, pages: _Pages) -> None:
        self._maker = maker
        self._pages = pages
        self._slots = torch.tensor(pages.slots, device=maker.cache.k.device)
        self._planned: dict[_Rule, Any] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
        scale: float, window: int | None = None, softcap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `AttentionBatch.attend`."""
        rule = _Rule(scale, window, softcap)
        if rule not in self._planned:
            self._planned[rule] = self._maker.planned(self._pages, rule)
        return self._maker.run(self._planned[rule], self._slots, layer, q, k, v)


class _FlashFixed:
    """The attention of decode steps of `rows` rows. A rule is known from its first layer on, before any capture."""

    def __init__(self, maker: FlashAttention, rows: int) -> None:
        assert maker.cache.spare_block is not None, "padding rows need a block to write to"
        self._maker = maker
        self._padding = [AttentionSpan(row, 1, 0, (maker.cache.spare_block,)) for row in range(rows)]
        self._slots = Refilled(rows, dtype=torch.int64, device=maker.cache.k.device)
        self._wrappers: dict[_Rule, Any] = {}
        self._pages = _pages(self._padding, maker.cache.block_size)
        self.fill(())

    def fill(self, spans: Sequence[AttentionSpan]) -> None:
        """See `FixedAttention`."""
        rows = list(self._padding)
        for span in spans:
            rows[span.row] = span
        self._pages = _pages(rows, self._maker.cache.block_size)
        self._slots.fill(self._pages.slots)
        for rule, wrapper in self._wrappers.items():
            self._maker.plan_decode(wrapper, self._pages, rule)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
        scale: float, window: int | None = None, softcap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `AttentionBatch.attend`."""
        rule = _Rule(scale, window, softcap)
        if rule not in self._wrappers:
            wrapper = self._wrappers[rule] = self._maker.captured(len(self._padding))
            self._maker.plan_decode(wrapper, self._pages, rule)
        return self._maker.run(self._wrappers[rule], self._slots.tensor, layer, q, k, v)
