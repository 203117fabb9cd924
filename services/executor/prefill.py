"""How the prompts in a step share its tokens.

A sixteenth of them is divided equally, so every prompt advances; the rest goes to the prompt whose tenant will have had
least computed of late when it is done. So neither one long prompt nor many short ones of a tenant hold up another
tenant's. A tenant that had much more than its equal part computed of late fills a step only to the half: a step lasts
as long as its tokens, and whoever comes in the middle of it waits for its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

# One in so many of a step's tokens is divided equally.
EQUAL = 16
# In this time what was computed loses half of its weight.
HALF_LIFE_S = 10.0
# Who had nothing computed for so long comes back.
RETURNS_S = 1.0
# Who had nothing computed for so long is forgotten: what it had counts for less than a fiftieth by then.
KNOWN_S = 60.0
# Whoever had more than so many times its equal part, and one in so many of all tokens, fills a step to one in so many
# of its own, no further. Of a crowd that asks for one prompt each everybody had far more than the mean of a minute.
GREEDY, NOTABLE, FILL = 1.5, 4, 2
# Tokens of prompts in one step beside rows that generate: so many for each of those, or a part of the step's limit.
# The slowest gaps on two cores (p99, Poisson arrivals at 70 % of saturation) were 3.2 times the median one with 4 for
# each row, 2.4 to 4.1 times with 2 and an eighth, 1.4 to 2.2 times with 2 and a sixteenth (154 to 174 ms, before 250 to
# 310).
PER_DECODING_ROW = 2
PART_OF_STEP = 16
# More where prompts are cheap: as many as make a step so much longer than one without. Where a matrix unit computes
# prompts, 512 tokens take four times as long as 32 rows that generate, not nine times.
LENGTHEN = 1.0
# What the newest step counts for in how long one without prompts takes (the first ones count alike), and the most that
# one step changes about how many tokens prompts take: either may have been held up by something else.
NEWEST, CHANGE = 0.1, 1.25
# After so many steps with prompts, beside about so many rows, and none without, one has none: where prompts never end,
# what a step without them takes would not be known, or be that of other rows, and they would stay at the least.
UNSEEN = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request in prefill: whose it is, and how many of its tokens must be computed still."""

    tenant: Hashable
    left: int


def count_waiting(asking: Collection[Hashable], generating: Collection[Hashable]) -> int:
    """Return how many prompts count as waiting, given the tenant of each, and of each row that generates.

    A tenant's count for one, however many it has: it holds up others' rows with a heap of them no longer than with one.
    Where there is only one tenant all of them count.
    """
    tenants = set(asking)
    return len(asking) if len(tenants | set(generating)) == 1 else len(tenants)


class PromptPace:
    """How many tokens prompts may take in a step, by what steps took. Pure.

    Beside rows that generate, prompts make a step longer by LENGTHEN of one without at most, or by that for each prompt
    that waits for each of these rows, where more wait than generate: a burst is soon at work together. By more, or for
    fewer who wait, whoever comes later waits too long: with twice that a flood of prompts made the first tokens of
    others 1.61 times as late, not 1.49 (`make bench-policies`).

    A controller and not a model: what a step with prompts takes beyond their tokens is not the same on two machines, or
    with two sets of adapters.
    """

    def __init__(self) -> None:
        self._plain: dict[
            int, tuple[float, int]
        ] = {}  # steps without prompts by the bits of their rows: seconds, count
        self._unseen: dict[int, int] = {}  # steps with prompts since one without, by the bits of their rows
        self._tokens = 0.0  # that make a step longer by LENGTHEN
        self._stretch = 1.0  # of the step that was planned last

    def note(self, *, decoding: int, prompt_tokens: int, took_s: float) -> None:
        """Count a step of rows that generate, `decoding` of them, and of tokens of prompts."""
        if not decoding:
            return
        size = decoding.bit_length()
        if not prompt_tokens:
            known_s, count = self._plain.get(size, (0.0, 0))
            self._plain[size] = (known_s + (took_s - known_s) * max(NEWEST, 1 / (count + 1)), count + 1)
            self._unseen[size] = 0
            return
        self._unseen[size] = self._unseen.get(size, 0) + 1
        if not self._plain:
            return
        decode_s, _ = self._plain[min(self._plain, key=lambda known: (abs(known - size), known))]
        longer, allowed = took_s - decode_s, LENGTHEN * self._stretch * decode_s
        by = min(CHANGE, max(1 / CHANGE, allowed / longer if longer > 0 else CHANGE))
        tokens = prompt_tokens / self._stretch
        if by < 1:
            self._tokens *= by
        elif tokens >= self._tokens / CHANGE:  # with far fewer than they might have taken it says nothing
            self._tokens = tokens * by

    def beside(self, decoding: int, step_tokens: int, *, waiting: int = 0) -> int:
        """Return how many tokens prompts may take in a step of at most `step_tokens` in which `decoding` rows generate
        and `waiting` prompts count (`count_waiting`).

        A step lasts as long as its tokens: without a bound, who reads an answer waits for every prompt that came in.
        None in one step of UNSEEN, where prompts never end.
        """
        left, self._stretch = step_tokens - decoding, 1.0
        if not decoding:
            return left
        size = decoding.bit_length()
        if self._unseen.get(size, 0) >= UNSEEN:
            self._unseen[size] = 0
            return 0
        self._stretch = max(1.0, waiting / decoding)
        least = max(step_tokens // PART_OF_STEP, PER_DECODING_ROW * decoding)
        return min(left, max(least, int(self._tokens * self._stretch)))


class PrefillShares:
    """What each tenant had computed of late, in tokens. Pure: the caller brings the clock."""

    def __init__(self) -> None:
        # Tenant → what it had and when, least recent first; and the same of all tenants together.
        self._had: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        self._all: tuple[float, float] = (0.0, 0.0)

    def divide(self, prompts: Sequence[Prompt], budget: int, *, now: float) -> list[int]:
        """Return how many tokens each prompt gets, `budget` in all or what they need, and count them as computed.

        `prompts` are in the order in which equals go. What only a greedy tenant could use is left over in part.
        """
        if not prompts or budget < 1:
            return [0] * len(prompts)
        self._forget(now)
        for prompt in prompts:
            self._lift(prompt.tenant, now)
        spare = budget - max(1, budget // FILL)
        part = max(1, budget // (EQUAL * len(prompts)))
        shares = []
        for prompt in prompts:
            shares.append(min(prompt.left, part, budget))
            budget -= shares[-1]
        finish = self._finish(prompts, now)
        for index in sorted(range(len(prompts)), key=lambda index: (finish[index], index)):
            room = budget - spare if self._greedy(prompts[index].tenant, now) else budget
            more = max(0, min(prompts[index].left - shares[index], room))
            shares[index] += more
            budget -= more
        for prompt, share in zip(prompts, shares, strict=True):
            self._count(prompt.tenant, share, now)
        return shares

    def _count(self, tenant: Hashable, tokens: float, now: float) -> None:
        self._had[tenant] = (self._of_late(tenant, now) + tokens, now)
        self._had.move_to_end(tenant)
        self._all = (_decayed(self._all, now) + tokens, now)

    def _lift(self, tenant: Hashable, now: float) -> None:
        """Who comes back had no less than those at work on average: idle time is no credit."""
        if self._had.get(tenant, (0.0, -RETURNS_S))[1] > now - RETURNS_S:
            return
        at_work = []
        for other, (_, at) in reversed(self._had.items()):
            if at <= now - RETURNS_S:
                break
            at_work.append(self._of_late(other, now))
        missing = sum(at_work) / max(1, len(at_work)) - self._of_late(tenant, now)
        if missing > 0:
            self._count(tenant, missing, now)

    def _forget(self, now: float) -> None:
        while self._had and (oldest := next(iter(self._had.values())))[1] < now - KNOWN_S:
            self._had.popitem(last=False)
            self._all = (max(0.0, _decayed(self._all, now) - _decayed(oldest, now)), now)

    def _greedy(self, tenant: Hashable, now: float) -> bool:
        """Whether a tenant had much more than its equal part of late; one that is alone is not."""
        others = len(self._had) - (tenant in self._had)
        least = max(GREEDY / (others + 1), 1 / NOTABLE) * _decayed(self._all, now)
        return bool(others) and self._of_late(tenant, now) > least

    def _finish(self, prompts: Sequence[Prompt], now: float) -> list[float]:
        """Return what each prompt's tenant will have had when it is done: a tenant's shorter ones are before it."""
        finish, had = [0.0] * len(prompts), dict[Hashable, float]()
        for index in sorted(range(len(prompts)), key=lambda index: (prompts[index].left, index)):
            prompt = prompts[index]
            had[prompt.tenant] = had.get(prompt.tenant, self._of_late(prompt.tenant, now)) + prompt.left
            finish[index] = had[prompt.tenant]
        return finish

    def _of_late(self, tenant: Hashable, now: float) -> float:
        return _decayed(self._had.get(tenant, (0.0, now)), now)


def _decayed(had: tuple[float, float], now: float) -> float:
    return float(had[0] * 2.0 ** ((had[1] - now) / HALF_LIFE_S))
