"""Decode steps replayed from captured graphs: buckets, static buffers, padding rows.

A graph is captured for a bucket of rows, active adapters and kernels (`kernels/graphs.py`), from token ids to logits.
What changes between steps lies in buffers with fixed addresses: tokens, positions, the attention's tables, the adapter
kernels' work lists. So do the logits, in one buffer for all graphs, or each graph would keep its own. A step takes the
smallest bucket that holds it, on the kernels that it would take by itself where they were captured; spare rows come
first, as rows of the base whose keys go to a block that nobody reads. Sampling is not part of the graph. All else runs
eagerly: steps with prompts, with scores, with an adapter of the token embedding, and those that no bucket holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.executor.engine.device_pool import DevicePool
from services.executor.engine.graph_device import Graph, GraphDevice
from services.executor.kernels.dispatch import BASE, GRAPH
from services.executor.kernels.gpu_lora import GpuLora
from services.executor.kernels.graphs import Bucket, CaptureBudget, CaptureCost, choose_bucket, plan_captures
from services.executor.kernels.layout import RowLayout, Segment, make_layout
from services.executor.model.attention import AttentionSpan
from services.executor.model.interface import Adapters, Decoder, Packed
from services.executor.model.kernel_batch import KernelBatch
from services.executor.model.lora_linear import base_batch
from services.executor.model.paged_attention import AttentionMaker, FixedAttention, Refilled
from services.executor.plan import Row


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The static buffers of one number of rows, shared by its buckets."""

    tokens: Refilled
    positions: Refilled
    attention: FixedAttention


@dataclass(frozen=True, slots=True)
class _Captured:
    """One bucket's graph, and where it leaves its logits."""

    graph: Graph
    logits: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What capturing took, and which buckets were left out: over the budget, or not equal to eager."""

    captured: int
    seconds: float
    size_bytes: int
    over_budget: tuple[Bucket, ...]
    unequal: tuple[Bucket, ...]


class DecodeGraphs:
    """Owned by the device thread, which may be another thread until `capture` has returned."""

    def __init__(
        self,
        decoder: Decoder,
        pool: DevicePool,
        kernels: GpuLora,
        attention: AttentionMaker,
        *,
        device: GraphDevice,
        where: torch.device,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._kernels = kernels
        self._attention = attention
        self._device = device
        self._where = where
        self._inputs: dict[int, _Inputs] = {}
        self._captured: dict[Bucket, _Captured] = {}
        self._logits = torch.zeros(0)
        self.report: CaptureReport | None = None  # of the last `capture`

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets that have a graph."""
        return tuple(self._captured)

    @torch.inference_mode()
    def capture(
        self, *, max_rows: int, max_adapters: int, budget: CaptureBudget, clock: Callable[[], float]
    ) -> CaptureReport:
        """Capture the buckets of steps up to these sizes, large ones first, within the budget as it is measured."""
        info = self._decoder.info
        # The logits of a row are there twice: as the head leaves them, and in the buffer.
        cost = CaptureCost(layers=info.layers, row_bytes=2 * info.vocab_size * info.dtype.itemsize)
        todo = plan_captures(
            max_rows=max_rows,
            max_adapters=max_adapters,
            variants=self._kernels.usual_variants,
            cost=cost,
            budget=budget,
        )
        began, before = clock(), self._device.used_bytes()
        self._logits = torch.zeros(max_rows, info.vocab_size, dtype=info.dtype, device=self._where)
        over: list[Bucket] = []
        unequal: list[Bucket] = []
        for bucket in todo:
            if clock() - began > budget.seconds or self._device.used_bytes() - before > budget.bytes:
                over.append(bucket)
            elif not self._capture(bucket):
                unequal.append(bucket)
        self.report = CaptureReport(
            captured=len(self._captured),
            seconds=clock() - began,
            size_bytes=self._device.used_bytes() - before,
            over_budget=tuple(over),
            unequal=tuple(unequal),
        )
        return self.report

    def _capture(self, bucket: Bucket) -> bool:
        """Capture a bucket with padding rows alone; say whether replaying it gives the bits of an eager step."""
        inputs = self._inputs_of(bucket.rows)
        idle = RowLayout(bucket.rows, bucket.rows, ())
        lora: Adapters = base_batch(idle)
        if bucket.variant:
            lora = KernelBatch(self._kernels.arrange(idle, (), variant=bucket.variant), None)
        out = self._logits[: bucket.rows]

        def work() -> torch.Tensor:
            hidden = self._decoder.hidden(Packed(inputs.tokens.tensor, inputs.positions.tensor, inputs.attention, lora))
            return out.copy_(self._decoder.logits(hidden, lora))

        eager = work().clone()
        graph, logits = self._device.capture(work)
        logits.zero_()
        graph.replay()
        equal = torch.equal(logits, eager)
        if equal:
            self._captured[bucket] = _Captured(graph, logits)
        return equal

    def _inputs_of(self, rows: int) -> _Inputs:
        if rows not in self._inputs:
            tokens, positions = (Refilled(rows, dtype=torch.int64, device=self._where) for _ in range(2))
            self._inputs[rows] = _Inputs(tokens, positions, self._attention.fixed(rows))
        return self._inputs[rows]

    def run(
        self, rows: Sequence[Row], owners: Sequence[int | None], revisions: Sequence[str]
    ) -> tuple[torch.Tensor, str] | None:
        """Replay a step; return its logits [rows, vocab] until the next one, and its kernel path. None: run it eagerly.

        `owners[i]` is the number in `revisions` of row i's adapter, None for the base; rows of the base come first.
        """
        if any(len(row.tokens) != 1 or not row.sample or row.targets for row in rows):
            return None
        layout = make_layout(owners, [1] * len(rows))
        residents = self._pool.residents(revisions) if layout.segments else []
        if residents is None:
            return None
        own = self._kernels.own_variant(layout, residents) if residents else ""
        bucket = choose_bucket(self._captured, rows=len(rows), adapters=len(layout.segments), variant=own)
        if bucket is None:
            return None
        captured = self._captured[bucket]
        spare = bucket.rows - len(rows)
        if bucket.variant:
            self._kernels.arrange(_behind(layout, spare), residents, variant=bucket.variant)
        inputs = self._inputs_of(bucket.rows)
        inputs.tokens.fill([0] * spare + [row.tokens[0] for row in rows])
        inputs.positions.fill([0] * spare + [row.start for row in rows])
        inputs.attention.fill([AttentionSpan(spare + i, 1, row.start, row.blocks) for i, row in enumerate(rows)])
        captured.graph.replay()
        return captured.logits[spare:], bucket.variant + GRAPH if bucket.variant else BASE


def _behind(layout: RowLayout, spare: int) -> RowLayout:
    """Return the layout with `spare` more rows of the base before it."""
    segments = tuple(Segment(s.start + spare, s.end + spare, s.adapter) for s in layout.segments)
    return RowLayout(layout.row_count + spare, layout.base_rows + spare, segments)
