"""Turns a Plan into numbers: tensors in, one forward pass, tokens out. No policy, no state between steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from services.executor.engine.decode_graphs import DecodeGraphs
from services.executor.engine.device_pool import DevicePool
from services.executor.engine.sampling import sample
from services.executor.engine.scoring import score_rows
from services.executor.kernels.dispatch import MERGED
from services.executor.kernels.layout import make_layout
from services.executor.model.attention import AttentionSpan, KvCache
from services.executor.model.interface import Adapters, Decoder, Packed
from services.executor.model.paged_attention import AttentionMaker
from services.executor.model.products import full_rows
from services.executor.plan import Plan, Row, RowResult, StepResult


class Runner:
    """Owned by the device thread."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        pool: DevicePool,
        cache: KvCache,
        attention: AttentionMaker,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.decoder = decoder
        self.pool = pool
        self.cache = cache
        self._attention = attention
        self._graphs = graphs
        self._device = cache.k.device
        # The revision that is in the base's weights, if one is: its rows need no adapter. See merging.py.
        self.merged: str | None = None

    def settle(self) -> None:
        """Called once by the thread that will call `run`."""
        if self.cache.step is not None:
            self.cache.step.settle()

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Compute one step. Writes keys and values of every row; samples the rows that ask for it."""
        self.cache.clear(plan.fresh_blocks)
        revisions = plan.revisions
        number = {revision: i for i, revision in enumerate(revisions)}
        owners = [None if row.revision_id in (None, self.merged) else number[row.revision_id] for row in plan.rows]
        replayed = self._graphs.run(plan.rows, owners, revisions) if self._graphs is not None else None
        if replayed is not None:
            logits, path = replayed
            results = tuple(sample(logits, plan.rows, eos_ids=self.decoder.info.eos_ids, step=self.cache.step))
            return StepResult(step=plan.step, rows=results, kernel_path=self._path(path))
        lora = self._arrange(owners, [len(row.tokens) for row in plan.rows], revisions)
        hidden = self.decoder.hidden(self._pack(plan.rows, lora))
        results = self._sample(plan.rows, owners, revisions, hidden, lora)
        if any(row.targets for row in plan.rows):
            scored = self._score(plan.rows, owners, revisions, hidden)
            results = tuple(scored.get(result.request_id, result) for result in results)
        return StepResult(step=plan.step, rows=results, kernel_path=self._path(lora.path))

    def _path(self, path: str) -> str:
        return path if self.merged is None else MERGED

    def _arrange(self, owners: Sequence[int | None], counts: Sequence[int], revisions: tuple[str, ...]) -> Adapters:
        return self.pool.arrange(make_layout(owners, counts), revisions)

    def _pack(self, rows: Sequence[Row], lora: Adapters) -> Packed:
        spans, position = [], 0
        for row in rows:
            spans.append(AttentionSpan(position, len(row.tokens), row.start, row.blocks))
            position += len(row.tokens)
        padding = [0] * (full_rows(position) - position) if self._device.type == "cpu" else []
        tokens = torch.tensor([token for row in rows for token in row.tokens] + padding, device=self._device)
        places = [position for row in rows for position in range(row.start, row.end)] + padding
        positions = torch.tensor(places, device=self._device)
        return Packed(tokens, positions, self._attention.step(spans), lora)

    def _sample(
        self,
        rows: Sequence[Row],
        owners: Sequence[int | None],
        revisions: tuple[str, ...],
        hidden: torch.Tensor,
        lora: Adapters,
    ) -> tuple[RowResult, ...]:
        chosen = [i for i, row in enumerate(rows) if row.sample]
        if not chosen:
            return tuple(RowResult(request_id=row.request_id) for row in rows)
        if not len(chosen) == len(rows) == len(hidden):  # else rows and adapters are those of the step
            last = list(accumulate((len(row.tokens) for row in rows), initial=-1))[1:]
            hidden = hidden.index_select(0, torch.tensor([last[i] for i in chosen], device=self._device))
            lora = self._arrange([owners[i] for i in chosen], [1] * len(chosen), revisions)
        logits = self.decoder.logits(hidden, lora)
        sampled = sample(logits, [rows[i] for i in chosen], eos_ids=self.decoder.info.eos_ids, step=self.cache.step)
        if len(sampled) == len(rows):
            return tuple(sampled)
        by_id = {result.request_id: result for result in sampled}
        return tuple(by_id.get(row.request_id) or RowResult(request_id=row.request_id) for row in rows)

    def _score(
        self, rows: Sequence[Row], owners: Sequence[int | None], revisions: tuple[str, ...], hidden: torch.Tensor
    ) -> dict[str, RowResult]:
        def logits_of(index: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
            lora = self._arrange([owners[number] for number in numbers], [1] * len(numbers), revisions)
            return self.decoder.logits(hidden.index_select(0, index.to(self._device)), lora)

        return score_rows(rows, logits_of, vocab_size=self.decoder.info.vocab_size)
