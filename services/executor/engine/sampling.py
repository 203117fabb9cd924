"""From logits to tokens.

Order, per row: penalties, logit_bias, stopping tokens masked (min_tokens), then either argmax or temperature, top_k,
min_p, top_p and one draw. Log-probabilities are of the raw distribution, before any of that.

The draw is a function of (seed, number of tokens made) alone, hashed to a number in [0, 1) and looked up in the
row's own cumulative distribution: no generator state, so neither neighbours nor preemption change a row.

A GPU draws the rows together that are cut alike: it is asked for tokens a few times a step, not for each row.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from services.executor.kernels.cpu_step import CpuStep
from services.executor.plan import Row, RowResult
from services.executor.request import FinishReason, Logprob

_MOST_NUMBERS = 1 << 24  # of the rows that a GPU draws together
_NUCLEUS_GUESS = 256  # top_p rarely needs more candidates; when it does, the whole row is sorted


def uniform(seed: int, step: int) -> float:
    """Return a number in [0, 1), the same for the same arguments everywhere. `seed` is a signed 64-bit integer."""
    digest = hashlib.blake2b(struct.pack(">qQ", seed, step), digest_size=8, person=b"loraport-draw").digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor, rows: Sequence[Row], *, eos_ids: frozenset[int], step: CpuStep | None = None
) -> list[RowResult]:
    """Return one result per row. logits [rows, vocab], any float dtype; may be overwritten. `step` may be given on a
    CPU.

    A row with a NaN, or with any infinity, fails with NON_FINITE_LOGITS and no token; other rows are not affected.
    """
    if step is not None and logits.dtype in (torch.float32, torch.bfloat16) and logits.is_contiguous():
        greedy = step.largest(logits).tolist()
        finite = [token >= 0 for token in greedy]
    else:
        finite = _finite(logits)
        greedy = _argmax(logits).tolist()
    results = [
        RowResult(request_id=row.request_id, token=greedy[i])
        if finite[i]
        else RowResult(request_id=row.request_id, failure=FinishReason.NON_FINITE_LOGITS)
        for i, row in enumerate(rows)
    ]
    special = [i for i, row in enumerate(rows) if finite[i] and not _is_plain(row)]
    if special:
        some = logits.index_select(0, torch.tensor(special, device=logits.device)).float()
        for i, result in zip(special, _sample_rows(some, [rows[i] for i in special], eos_ids), strict=True):
            results[i] = result
    return results


def _finite(logits: torch.Tensor) -> list[bool]:
    finite: list[bool] = torch.isfinite(logits.sum(dim=-1, dtype=torch.float32)).tolist()
    if not all(finite):
        # A sum may overflow where no element does: look closely before a row is failed.
        finite = torch.isfinite(logits).all(dim=-1).tolist()
    return finite


def _is_plain(row: Row) -> bool:
    return row.sampling.is_plain_greedy and row.generated >= row.sampling.min_tokens


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the first largest of each row. The maximum of pieces comes first: that is vectorised, argmax is not."""
    rows, size = logits.shape
    pieces = next((n for n in (256, 192, 128, 96, 64) if size % n == 0 and size > 8 * n), 1)
    if pieces == 1:
        return logits.argmax(dim=-1)
    cut = logits.view(rows, pieces, -1)
    piece = cut.amax(dim=-1).argmax(dim=-1)
    return cut[torch.arange(rows, device=logits.device), piece].argmax(dim=-1) + piece * cut.shape[2]


def _answers_at_once(device: torch.device) -> bool:
    """Say whether a device can be asked for a number at no cost. Then rows are drawn one by one: a cache holds one."""
    return device.type == "cpu"


def _sample_rows(logits: torch.Tensor, rows: Sequence[Row], eos_ids: frozenset[int]) -> list[RowResult]:
    """Return a result for every row of float32 logits [rows, vocab]."""
    adjusted = logits.clone()
    for own, row in zip(adjusted, rows, strict=True):
        _adjust(own, row, eos_ids)
    at_once = 1 if _answers_at_once(logits.device) else max(1, _MOST_NUMBERS // logits.shape[1])
    alike: dict[tuple[int, bool] | None, list[int]] = {}
    for i, row in enumerate(rows):
        sampling = row.sampling
        alike.setdefault((sampling.top_k, sampling.top_p < 1) if sampling.temperature else None, []).append(i)
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)

    def draw(members: list[int], *, guess: bool) -> None:
        for at in range(0, len(members), at_once):
            part = members[at : at + at_once]
            index = torch.tensor(part, device=logits.device)
            tokens.index_copy_(0, index, _draw(adjusted.index_select(0, index), [rows[i] for i in part], guess=guess))

    for members in alike.values():
        draw(members, guess=True)
    draw([i for i, token in enumerate(tokens.tolist()) if token < 0], guess=False)
    found = _logprobs(logits, tokens, [row.sampling.logprobs for row in rows])
    return [
        RowResult(request_id=row.request_id, token=token, logprob=found.get(i))
        for i, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True))
    ]


def _adjust(out: torch.Tensor, row: Row, eos_ids: frozenset[int]) -> None:
    """Apply penalties, biases and the masks of stopping tokens to the logits of one row, in place."""
    sampling = row.sampling
    if row.history is not None:
        prompt, output = row.history
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(list({*prompt, *output}), dtype=torch.int64, device=out.device)
            values = out[seen]
            penalty = sampling.repetition_penalty
            out[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if output:
            found = Counter(output)
            ids, counts = (torch.tensor(list(part), device=out.device) for part in (found, found.values()))
            out[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        out[token] += bias
    if row.generated < sampling.min_tokens:
        stopping = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_ids)
        out[list(stopping)] = float("-inf")


def _draw(logits: torch.Tensor, rows: Sequence[Row], *, guess: bool) -> torch.Tensor:
    """Return a token for every row of adjusted logits [rows, vocab]; all have one top_k, and a top_p of 1 or none has.
    All have a temperature of 0, or none has.

    With `guess` the nucleus is looked for among the most likely candidates only; -1 where they do not hold it.
    Every operation takes a row by itself.
    """
    cut = rows[0].sampling
    if not cut.temperature:
        return logits.argmax(dim=-1)

    def column(values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float64, device=logits.device)[:, None]

    weights = (logits.double() / column(row.sampling.temperature for row in rows)).softmax(dim=-1)
    if any(row.sampling.min_p for row in rows):
        least = column(row.sampling.min_p for row in rows) * weights.amax(dim=-1, keepdim=True)
        weights = torch.where(weights >= least, weights, 0.0)
    ids: torch.Tensor | None = None
    if 0 < cut.top_k < weights.shape[1]:
        weights, ids = weights.topk(cut.top_k)
    held = last = None
    if cut.top_p < 1:
        goal = column(row.sampling.top_p for row in rows) * weights.sum(dim=-1, keepdim=True)
        guess = guess and ids is None
        if guess:
            best, some = weights.topk(min(_NUCLEUS_GUESS, weights.shape[1]))
            guess = not (_answers_at_once(logits.device) and bool((best.sum(dim=-1, keepdim=True) < goal).any()))
            weights, ids = (best, some) if guess else (weights, None)
        if ids is None:
            weights, ids = weights.sort(dim=-1, descending=True, stable=True)
        cumulative = weights.cumsum(dim=-1)
        held = cumulative[:, -1:] >= goal if guess else None
        last = torch.searchsorted(cumulative, goal).clamp_(max=weights.shape[1] - 1)
        total = cumulative.gather(1, last)
    else:
        cumulative = weights.cumsum(dim=-1)
        total = cumulative[:, -1:]
    target = column(uniform(row.sampling.seed, row.generated) for row in rows) * total
    place = torch.searchsorted(cumulative, target, right=True)
    place = place.clamp_(max=weights.shape[1] - 1) if last is None else torch.minimum(place, last)
    token = place if ids is None else ids.gather(1, place)
    if held is not None:
        token = torch.where(held, token, -1)
    return token[:, 0]


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int | None]) -> dict[int, Logprob]:
    """Return, for the rows of logits [rows, vocab] that ask for them, log-probabilities of the raw distribution."""
    asked = [i for i, count in enumerate(counts) if count is not None]
    if not asked:
        return {}
    index = torch.tensor(asked, device=logits.device)
    raw = logits.index_select(0, index).log_softmax(dim=-1)
    chosen = raw.gather(1, tokens.index_select(0, index)[:, None])[:, 0].tolist()
    best = {}
    for most in {counts[i] for i in asked} - {0}:
        assert most is not None
        values, ids = (part.tolist() for part in raw.topk(min(most, raw.shape[1])))
        best[most] = [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    return {
        i: Logprob(chosen=chosen[place], top=best[counts[i]][place] if counts[i] else ())
        for place, i in enumerate(asked)
    }
