"""What a request may ask of an engine, whatever the state it is in. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.executor.request import RefusalReason, Refused, RequestSpec, Score
from services.shared.sampling import MAX_LOGPROBS


def check_spec(spec: RequestSpec, *, vocab_size: int, max_length: int) -> None:
    """Check that a request could be served by an engine that holds `max_length` tokens of one request.

    Raises:
        Refused: EMPTY_PROMPT, BAD_TOKEN, BAD_SAMPLING, PROMPT_TOO_LONG, MAX_TOKENS_TOO_LARGE.
    """
    if not spec.prompt:
        raise Refused(RefusalReason.EMPTY_PROMPT, "the prompt has no tokens")
    _check_tokens(spec.prompt, vocab_size)
    spec.sampling.check(vocab_size=vocab_size)
    if spec.score is not None:
        _check_score(spec, spec.score, vocab_size=vocab_size, max_length=max_length)
        return
    if len(spec.prompt) >= max_length:
        raise Refused(
            RefusalReason.PROMPT_TOO_LONG,
            f"the prompt has {len(spec.prompt)} tokens; prompt and output share {max_length}",
        )
    if len(spec.prompt) + spec.sampling.max_tokens > max_length:
        raise Refused(
            RefusalReason.MAX_TOKENS_TOO_LARGE,
            f"{len(spec.prompt)} prompt tokens and max_tokens {spec.sampling.max_tokens} exceed {max_length}",
        )


def _check_score(spec: RequestSpec, score: Score, *, vocab_size: int, max_length: int) -> None:
    if not score.targets:
        raise Refused(RefusalReason.EMPTY_PROMPT, "no tokens to score")
    _check_tokens(score.targets, vocab_size)
    if not 0 <= score.top <= MAX_LOGPROBS:
        raise Refused(RefusalReason.BAD_SAMPLING, f"top_logprobs is in [0, {MAX_LOGPROBS}]")
    if len(spec.prompt) + len(score.targets) > max_length:
        raise Refused(
            RefusalReason.PROMPT_TOO_LONG,
            f"{len(spec.prompt)} prompt tokens and {len(score.targets)} to score exceed {max_length}",
        )


def _check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise Refused(RefusalReason.BAD_TOKEN, f"token ids are in [0, {vocab_size})")
