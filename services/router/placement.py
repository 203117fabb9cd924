"""Where a request goes: a frozen view of the fleet and a request in, a decision with its reasons out.

The cost is the predicted milliseconds to the first token and what the choice costs later:

    work that waits there + the rows there + the part of the prompt whose keys are not there
    + 0 if the revision is there | half a load if it is under way | a load, those before it, and what must leave for it

Who may be chosen: whoever has the revision, and its homes. Homes are the first executors in an order that only the
revision and the names decide (highest random weight), leaving out those that have a quarter more than their part of the
requests; so a revision that nobody has goes where it went before, and a new executor takes over only its own part.

A request stays where its session was, or where its revision is, unless going elsewhere gains more than a fifth of the
cost, and more than half a load where one would be needed.
"""

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from services.router.fleet_view import ExecutorView, FleetView
from services.router.prices import Prices

# What a home may have beyond its part of the requests.
HEADROOM, SPARE = 1.25, 2
HOMES = 2
# A gain below this part of the cost does not move a request.
STAY = 0.2
# What an eviction is expected to cost, in loads: the victim is the revision that is least likely to come back.
EVICTION = 0.25
NOMINAL = Prices()


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be placed. `revision_id` is empty for the base model; `rank` is the revision's highest, 0 for none.

    `length` is what prompt and answer may take together in tokens, 0 when that is not known.
    `matches` says how many of the prompt's tokens each executor likely has, `doubted` where that is not to be counted
    on; `last` where the session was served; `replicas` how many homes the revision should have; `now` is on the
    router's clock, in seconds.
    """

    base_model: str
    revision_id: str
    rank: int
    excluded: frozenset[str] = frozenset()
    tenant: str = ""
    weight: float = 1.0
    prompt_tokens: int = 0
    length: int = 0
    mib: float = 0.0
    matches: Mapping[str, int] = field(default_factory=dict)
    doubted: Collection[str] = ()
    last: str = ""
    replicas: int = 1
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """An executor of the right base model. `reasons` has one entry per term of `cost_ms`, or says why it is out."""

    executor: str
    eligible: bool
    cost_ms: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """`executor` is empty when none can take the request now. Candidates are in order: eligible and cheap first.

    `why` is what decided between the eligible.
    """

    executor: str
    candidates: tuple[Candidate, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Option:
    executor: ExecutorView
    cost_ms: float
    cold: bool


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request goes, whether a load must begin there, and why there. Of its prompt, `matched_tokens` are likely
    there, and `tokens` are to be computed there as far as can be counted on."""

    executor: str
    cold: bool
    matched_tokens: int
    tokens: int
    why: str


def place(view: FleetView, wish: Wish, prices: Prices = NOMINAL) -> Placed | None:
    """Returns the executor that takes the request; None when none can now. Ties go to the better home."""
    executors = view.of_base(wish.base_model)
    open_ = [executor for executor in executors if not _against(executor, wish)]
    if not open_:
        return None
    homes = _homes(open_, wish, executors)
    options = [
        _Option(executor, sum(_cost(executor, wish, prices)), cold)
        for executor in open_
        if not (cold := _is_cold(executor, wish)) or executor.name in homes
    ]
    options.sort(key=lambda option: (option.cost_ms, homes.get(option.executor.name, HOMES), option.executor.name))
    chosen, why = _settle(options, wish, prices)
    name, tokens = chosen.executor.name, _to_compute(chosen.executor, wish)
    return Placed(name, chosen.cold, wish.matches.get(name, 0), tokens, why)


def choose(view: FleetView, wish: Wish, prices: Prices = NOMINAL) -> Decision:
    """Returns what `place` decides, with every candidate and its reasons."""
    executors = view.of_base(wish.base_model)
    against = {executor.name: _against(executor, wish) for executor in executors}
    homes = _homes([executor for executor in executors if not against[executor.name]], wish, executors)
    candidates = [_candidate(executor, wish, prices, against[executor.name], homes) for executor in executors]
    candidates.sort(key=lambda candidate: (not candidate.eligible, candidate.cost_ms, candidate.executor))
    placed = place(view, wish, prices)
    if placed is None:
        return Decision("", tuple(candidates), "no executor can take it now")
    return Decision(placed.executor, tuple(candidates), placed.why)


def too_large(view: FleetView, base_model: str, rank: int) -> bool:
    """Says whether executors of this base model serve, and none of them could ever hold a revision of this
    rank."""
    serving = [executor for executor in view.of_base(base_model) if executor.serving]
    return bool(serving) and all(0 < executor.max_rank < rank for executor in serving)


@lru_cache(maxsize=65536)
def order(revision_id: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the executors in the order in which a revision prefers them as its home."""
    return tuple(
        sorted(names, key=lambda name: hashlib.sha256(f"{revision_id}\x00{name}".encode()).digest(), reverse=True)
    )


def _homes(open_: list[ExecutorView], wish: Wish, executors: tuple[ExecutorView, ...]) -> dict[str, int]:
    """Returns the homes that can take the request now, with their rank: the next in order stand in for those that
    cannot."""
    if not wish.revision_id:
        return {executor.name: 0 for executor in open_}
    part = (sum(executor.in_flight for executor in executors) + 1) / max(1, len(executors))
    most = math.ceil(HEADROOM * part) + SPARE
    by_name = {executor.name: executor for executor in open_}
    ranked = [name for name in order(wish.revision_id, tuple(e.name for e in executors)) if name in by_name]
    light = [name for name in ranked if by_name[name].in_flight < most]
    return {name: rank for rank, name in enumerate((light or ranked)[: max(HOMES, wish.replicas)])}


def _settle(options: list[_Option], wish: Wish, prices: Prices) -> tuple[_Option, str]:
    """Chooses among options in order of cost: the cheapest, unless staying costs little more. There is one: whoever is
    open has the revision, or is a home, or stands in for one."""
    best = options[0]
    stay = next((option for option in options if option.executor.name == wish.last), None)
    if stay is None and best.cold:
        stay = next((option for option in options if not option.cold), None)
    if stay is not None and stay is not best:
        gain = stay.cost_ms - best.cost_ms
        least = max(STAY * stay.cost_ms, prices.load_ms(wish.mib) / 2 if best.cold else 0.0)
        if gain <= least:
            return stay, f"stays: elsewhere would gain {gain:.0f} ms, which is not more than {least:.0f}"
    return best, "cheapest"


def _is_cold(executor: ExecutorView, wish: Wish) -> bool:
    return bool(wish.revision_id) and not executor.holds(wish.revision_id)


def _cost(executor: ExecutorView, wish: Wish, prices: Prices) -> tuple[float, float, float]:
    """Returns what waits there, what of the prompt is to be computed, and the load, in ms."""
    wait_ms = executor.in_flight * prices.row + prices.prefill_ms(_ahead(executor))
    return wait_ms, prices.prefill_ms(_missing(executor, wish)), _load(executor, wish, prices)[0]


def _reasons(executor: ExecutorView, wish: Wish, prices: Prices) -> tuple[str, ...]:
    wait_ms, prompt_ms, load_ms = _cost(executor, wish, prices)
    ahead = _ahead(executor)
    return (
        f"{executor.in_flight} answers in flight, {ahead} prompt tokens ahead: {wait_ms:.0f} ms",
        f"{_missing(executor, wish)} of {wish.prompt_tokens} prompt tokens to compute: {prompt_ms:.0f} ms",
        f"{_load(executor, wish, prices)[1]}: {load_ms:.0f} ms",
    )


def _missing(executor: ExecutorView, wish: Wish) -> int:
    return max(0, wish.prompt_tokens - wish.matches.get(executor.name, 0))


def _to_compute(executor: ExecutorView, wish: Wish) -> int:
    """Returns how much of the prompt is to be computed there, as far as that can be counted on."""
    return wish.prompt_tokens if executor.name in wish.doubted else _missing(executor, wish)


def _load(executor: ExecutorView, wish: Wish, prices: Prices) -> tuple[float, str]:
    if not wish.revision_id:
        return 0.0, "base model, nothing to load"
    one = prices.load_ms(wish.mib)
    resident = executor.resident.get(wish.revision_id)
    if resident is not None and resident.state == "READY":
        return 0.0, "revision is resident"
    if resident is not None and resident.state == "LOADING":
        return one / 2, "revision is loading"
    if wish.revision_id in executor.expected:
        return one / 2, "revision was asked for already"
    full = executor.page_rows > 0 and executor.pages_for(wish.rank) > executor.free_pages
    loads = 1 + len(executor.loading) + (EVICTION if full else 0.0)
    behind = f", behind {len(executor.loading)} others" if executor.loading else ""
    return one * loads, f"revision must be loaded{behind}{', and another evicted' if full else ''}"


def _against(executor: ExecutorView, wish: Wish) -> str:
    if executor.name in wish.excluded:
        return "failed this request before"
    if not executor.serving:
        return executor.why_not
    if executor.max_rank and wish.rank > executor.max_rank:
        return f"holds ranks up to {executor.max_rank}, the revision has {wish.rank}"
    if executor.max_context and wish.length > executor.max_context:
        return f"takes up to {executor.max_context} tokens, the request may need {wish.length}"
    tokens = _to_compute(executor, wish)
    if not executor.has_place(wish.tenant, wish.weight, tokens):
        if executor.is_ahead(wish.tenant, tokens):
            return f"has {sum(executor.ahead[wish.tenant])} prompt tokens of this tenant to compute"
        if executor.has_room:
            return "keeps its free places for other tenants: this one has its part"
        return f"has its {executor.window + executor.reserve} requests"
    if wish.revision_id in executor.draining:
        return "gives no further request to this revision: another one starves for its room"
    if _is_cold(executor, wish):
        if not executor.may_load(wish.tenant):
            return f"has {len(executor.loading)} loads under way"
        if executor.must_wait(wish.revision_id, wish.rank, tenant=wish.tenant, weight=wish.weight, now=wish.now):
            return "has no room but that of what others use, and this tenant took some a moment ago"
        if executor.page_rows and executor.pages_for(wish.rank) > executor.free_pages + executor.idle_pages:
            return "has no room in its adapter pool: all of it is in use"
    return ""


def _ahead(executor: ExecutorView) -> int:
    return sum(map(sum, executor.ahead.values()))


def _candidate(executor: ExecutorView, wish: Wish, prices: Prices, against: str, homes: Mapping[str, int]) -> Candidate:
    cost_ms, reasons = sum(_cost(executor, wish, prices)), _reasons(executor, wish, prices)
    if not against and _is_cold(executor, wish) and executor.name not in homes:
        against = "is not a home of the revision"
    return Candidate(executor.name, not against, cost_ms, (against, *reasons) if against else reasons)
