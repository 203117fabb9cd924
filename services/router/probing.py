"""Probes a revision on one executor: each prompt as it is served, and in a second way that shares next to nothing.

A prompt is scored from its second token on. What was computed both ways is compared token by token; perplexity compares
the new revision with the old one on the tenant's own prompts.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from services.router.events import ExecutorScored
from services.shared.errors import LoraportError

# Tokens of a prompt that are used: the second way makes a number for every pair of them and head.
MAX_PROBE_TOKENS = 512

# Scores (revision, prompt, continuation, whether both ways).
Scorer = Callable[[str, Sequence[int], Sequence[int], bool], Awaitable[ExecutorScored]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What a probe has found; see `loraport.registry.v1.ReportProbeRequest`. Perplexities are None without prompts."""

    prompts: int = 0
    tokens: int = 0
    mean_difference: float = 0.0
    max_difference: float = 0.0
    nonfinite: bool = False
    from_perplexity: float | None = None
    to_perplexity: float | None = None
    failure: str = ""


async def probe(
    score: Scorer, *, old: str, new: str, golden: Iterable[Sequence[int]], evaluated: Sequence[Sequence[int]]
) -> ProbeResult:
    """Returns the result for prompts as token ids; those of fewer than two tokens are left out.

    Raises:
        LoraportError: an executor could not say; NON_FINITE_LOGITS is a result and no error.
    """
    differences: list[float] = []
    prompts = 0
    try:
        for ids in filter(_usable, golden):
            said = await score(new, ids[:1], ids[1:MAX_PROBE_TOKENS], True)
            if len(said.chosen) != len(said.reference) or not said.reference:
                raise LoraportError("INTERNAL", "the executor did not compute the prompt in both ways")
            differences += [abs(a - b) for a, b in zip(said.chosen, said.reference, strict=True)]
            prompts += 1
        to_perplexity = await _perplexity(score, new, evaluated)
    except LoraportError as error:
        if error.reason != "NON_FINITE_LOGITS":
            raise
        return ProbeResult(prompts=prompts, tokens=len(differences), nonfinite=True)
    if not all(map(math.isfinite, differences)):
        return ProbeResult(prompts=prompts, tokens=len(differences), nonfinite=True)
    return ProbeResult(
        prompts=prompts,
        tokens=len(differences),
        mean_difference=sum(differences) / len(differences) if differences else 0.0,
        max_difference=max(differences, default=0.0),
        from_perplexity=await _perplexity(score, old, evaluated),
        to_perplexity=to_perplexity,
    )


async def _perplexity(score: Scorer, revision: str, prompts: Sequence[Sequence[int]]) -> float | None:
    """Returns exp of the mean negative log-probability over all prompts' tokens, None without any."""
    total, count = 0.0, 0
    for ids in filter(_usable, prompts):
        said = await score(revision, ids[:1], ids[1:MAX_PROBE_TOKENS], False)
        total += sum(said.chosen)
        count += len(said.chosen)
    return math.exp(min(-total / count, 700.0)) if count else None


def _usable(ids: Sequence[int]) -> bool:
    return len(ids) > 1
