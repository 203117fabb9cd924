"""Log-probabilities of given tokens, read off hidden states a bounded number of positions at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from services.executor.plan import Row, RowResult
from services.executor.request import FinishReason, Logprob

# Numbers of one chunk of logits. In float32 they take 16 MiB, whatever a prompt's length: a whole chunk of a prompt
# (512 positions of a 152,000-word vocabulary) would take 300 MiB.
CHUNK_LOGITS = 1 << 22

Logits = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


def score_rows(rows: Sequence[Row], logits_of: Logits, *, vocab_size: int) -> dict[str, RowResult]:
    """Return a result for every row that has targets.

    Semantics: scores[i] = log_softmax(logits at the position before targets[i])[targets[i]], in float32.
    `logits_of(index, numbers)` gives logits [len(index), vocab] of packed positions; numbers[j] is the row of index[j].
    A row with a NaN or an infinity fails with NON_FINITE_LOGITS; other rows are not affected.
    """
    asked: list[tuple[int, int, int]] = []  # packed position, row, target
    end = 0
    for number, row in enumerate(rows):
        end += len(row.tokens)
        first = end - len(row.targets)
        asked += [(first + i, number, target) for i, target in enumerate(row.targets)]
    found: dict[int, list[Logprob]] = {number: [] for number, row in enumerate(rows) if row.targets}
    failed: set[int] = set()
    size = max(1, CHUNK_LOGITS // vocab_size)
    for start in range(0, len(asked), size):
        chunk = asked[start : start + size]
        numbers = [number for _, number, _ in chunk]
        logits = logits_of(torch.tensor([position for position, _, _ in chunk]), numbers)
        values = _logprobs(logits, [t for _, _, t in chunk], [rows[number].top for number in numbers])
        for number, value in zip(numbers, values, strict=True):
            if value is None:
                failed.add(number)
            else:
                found[number].append(value)
    return {
        rows[number].request_id: RowResult(request_id=rows[number].request_id, failure=FinishReason.NON_FINITE_LOGITS)
        if number in failed
        else RowResult(request_id=rows[number].request_id, scores=tuple(scores))
        for number, scores in found.items()
    }


def _logprobs(logits: torch.Tensor, targets: Sequence[int], tops: Sequence[int]) -> list[Logprob | None]:
    """Return one value per row of logits [rows, vocab], None where a logit is not finite."""
    logits = logits.float()
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    mass = logits.logsumexp(dim=-1)
    chosen = (logits.gather(1, torch.tensor(targets, device=logits.device)[:, None])[:, 0] - mass).tolist()
    most = min(max(tops), logits.shape[1])
    ids: list[list[int]] = [[]] * len(targets)
    values: list[list[float]] = [[]] * len(targets)
    if most:
        best, order = logits.topk(most, dim=-1)
        ids, values = order.tolist(), (best - mass[:, None]).tolist()
    return [
        Logprob(chosen=chosen[i], top=tuple(zip(ids[i][:top], values[i][:top], strict=True))) if finite[i] else None
        for i, top in enumerate(tops)
    ]
