"""How the prompts in a step share its tokens.

A sixteenth of them is divided equally, so every prompt advances; the rest goes to the prompt whose tenant will have had
least computed of late when it is done. So neither one long prompt nor many short ones of a tenant hold up another
tenant's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# One in so many of a step's tokens is divided equally.
EQUAL = 16
# In this time what was computed loses half of its weight.
HALF_LIFE_S = 10.0
MAX_KNOWN = 10_000
# Tokens of prompts in one step beside rows that generate: so many for each of those, or a part of the step's limit.
PER_DECODING_ROW = 4
PART_OF_STEP = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request in prefill: whose it is, and how many of its tokens must be computed still."""

    tenant: Hashable
    left: int


def beside(decoding: int, step_tokens: int) -> int:
    """Return how many tokens prompts may take in a step of at most `step_tokens` in which `decoding` rows generate.

    A step lasts as long as its tokens: without a bound, whoever reads an answer waits for every prompt that came in.
    """
    left = step_tokens - decoding
    return min(left, max(step_tokens // PART_OF_STEP, PER_DECODING_ROW * decoding)) if decoding else left


class PrefillShares:
    """What each tenant had computed of late, in tokens. Pure: the caller brings the clock."""

    def __init__(self) -> None:
        self._had: dict[Hashable, tuple[float, float]] = {}

    def divide(self, prompts: Sequence[Prompt], budget: int, *, now: float) -> list[int]:
        """Return how many tokens each prompt gets, `budget` in all or what they need, and count them as computed.

        `prompts` are in the order in which equals go.
        """
        if not prompts or budget < 1:
            return [0] * len(prompts)
        part = max(1, budget // (EQUAL * len(prompts)))
        shares = []
        for prompt in prompts:
            shares.append(min(prompt.left, part, budget))
            budget -= shares[-1]
        for index in sorted(range(len(prompts)), key=lambda index: (self._finish(prompts[index], now), index)):
            more = min(prompts[index].left - shares[index], budget)
            shares[index] += more
            budget -= more
        for prompt, share in zip(prompts, shares, strict=True):
            self._had[prompt.tenant] = (self._of_late(prompt.tenant, now) + share, now)
        if len(self._had) > MAX_KNOWN:
            self._had = {t: had for t, had in self._had.items() if now - had[1] < 10 * HALF_LIFE_S}
        return shares

    def _finish(self, prompt: Prompt, now: float) -> float:
        return self._of_late(prompt.tenant, now) + prompt.left

    def _of_late(self, tenant: Hashable, now: float) -> float:
        had, at = self._had.get(tenant, (0.0, now))
        return float(had * 2.0 ** ((at - now) / HALF_LIFE_S))
