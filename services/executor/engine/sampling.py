"""From logits to tokens.

Order, per row: penalties, logit_bias, stopping tokens masked (min_tokens), then either argmax or temperature, top_k,
min_p, top_p and one draw. Log-probabilities are of the raw distribution, before any of that.

The draw is a function of (seed, number of tokens made) alone, hashed to a number in [0, 1) and looked up in the
row's own cumulative distribution: no generator state, so neither neighbours nor preemption change a row.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from services.executor.plan import Row, RowResult
from services.executor.request import FinishReason, Logprob, Sampling

_NUCLEUS_GUESS = 256  # top_p rarely needs more candidates; when it does, the whole row is sorted


def uniform(seed: int, step: int) -> float:
    """Return a number in [0, 1), the same for the same arguments everywhere. `seed` is a signed 64-bit integer."""
    digest = hashlib.blake2b(struct.pack(">qQ", seed, step), digest_size=8, person=b"loraport-draw").digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, rows: Sequence[Row], *, eos_ids: frozenset[int]) -> list[RowResult]:
    """Return one result per row. logits [rows, vocab], any float dtype; may be overwritten.

    A row with a NaN, or with any infinity, fails with NON_FINITE_LOGITS and no token; other rows are not affected.
    """
    finite = torch.isfinite(logits.sum(dim=-1, dtype=torch.float32)).tolist()
    if not all(finite):
        # A sum may overflow where no element does: look closely before a row is failed.
        finite = torch.isfinite(logits).all(dim=-1).tolist()
    greedy = _argmax(logits).tolist()
    results = []
    for i, row in enumerate(rows):
        if not finite[i]:
            results.append(RowResult(request_id=row.request_id, failure=FinishReason.NON_FINITE_LOGITS))
        elif row.sampling.is_plain_greedy and row.generated >= row.sampling.min_tokens:
            results.append(RowResult(request_id=row.request_id, token=greedy[i]))
        else:
            results.append(_sample_row(logits[i].float(), row, eos_ids))
    return results


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the first largest of each row. The maximum of pieces comes first: that is vectorised, argmax is not."""
    rows, size = logits.shape
    pieces = next((n for n in (256, 192, 128, 96, 64) if size % n == 0 and size > 8 * n), 1)
    if pieces == 1:
        return logits.argmax(dim=-1)
    cut = logits.view(rows, pieces, -1)
    piece = cut.amax(dim=-1).argmax(dim=-1)
    return cut[torch.arange(rows, device=logits.device), piece].argmax(dim=-1) + piece * cut.shape[2]


def _sample_row(logits: torch.Tensor, row: Row, eos_ids: frozenset[int]) -> RowResult:
    sampling = row.sampling
    raw = logits.log_softmax(dim=-1) if sampling.logprobs is not None else None
    adjusted = _adjust(logits, row, eos_ids)
    token = int(adjusted.argmax()) if sampling.temperature == 0 else _draw(adjusted, sampling, row.generated)
    return RowResult(request_id=row.request_id, token=token, logprob=_logprob(raw, token, sampling.logprobs))


def _adjust(logits: torch.Tensor, row: Row, eos_ids: frozenset[int]) -> torch.Tensor:
    sampling = row.sampling
    out = logits.clone()
    if row.history is not None:
        prompt, output = (torch.tensor(part, dtype=torch.int64, device=logits.device) for part in row.history)
        if sampling.repetition_penalty != 1.0:
            seen = torch.unique(torch.cat((prompt, output)))
            values = out[seen]
            penalty = sampling.repetition_penalty
            out[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if len(output):
            ids, counts = torch.unique(output, return_counts=True)
            out[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        out[token] += bias
    if row.generated < sampling.min_tokens:
        stopping = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_ids)
        out[list(stopping)] = float("-inf")
    return out


def _draw(logits: torch.Tensor, sampling: Sampling, step: int) -> int:
    weights = (logits.double() / sampling.temperature).softmax(dim=-1)
    if sampling.min_p > 0:
        weights = torch.where(weights >= sampling.min_p * weights.max(), weights, 0.0)
    ids: torch.Tensor | None = None
    if 0 < sampling.top_k < weights.shape[0]:
        weights, ids = weights.topk(sampling.top_k)
    if sampling.top_p < 1:
        weights, ids = _nucleus(weights, ids, sampling.top_p)
    cumulative = weights.cumsum(dim=0)
    target = uniform(sampling.seed, step) * float(cumulative[-1])
    index = min(int(torch.searchsorted(cumulative, target, right=True)), weights.shape[0] - 1)
    return index if ids is None else int(ids[index])


def _nucleus(weights: torch.Tensor, ids: torch.Tensor | None, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fewest most likely candidates that hold `top_p` of the mass, and their ids."""
    goal = top_p * float(weights.sum())
    if ids is None:
        best, ids = weights.topk(min(_NUCLEUS_GUESS, weights.shape[0]))
        if float(best.sum()) < goal:
            best, ids = weights.sort(descending=True, stable=True)
        weights = best
    keep = int(torch.searchsorted(weights.cumsum(dim=0), goal)) + 1
    return weights[:keep], ids[:keep]


def _logprob(raw: torch.Tensor | None, token: int, count: int | None) -> Logprob | None:
    if raw is None or count is None:
        return None
    if count == 0:
        return Logprob(chosen=float(raw[token]))
    values, ids = raw.topk(min(count, raw.shape[0]))
    return Logprob(chosen=float(raw[token]), top=tuple(zip(ids.tolist(), values.tolist(), strict=True)))
