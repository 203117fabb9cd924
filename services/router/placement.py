"""Where a request goes: a frozen view of the fleet and a request in, a decision with its reasons out.

The cost is the predicted milliseconds to the first token. Its terms are nominal: what counts is their order. An
executor that holds the revision beats one that must load it unless it is some `LOAD_MS / REQUEST_MS` requests busier.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.router.fleet_view import ExecutorView, FleetView

# A request ahead of this one, a load from host memory, and a load that has begun already.
REQUEST_MS = 20.0
LOAD_MS = 1000.0
LOADING_MS = 500.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be placed. `revision_id` is empty for the base model; `rank` is the revision's highest, 0 for none."""

    base_model: str
    revision_id: str
    rank: int
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidate:
    """An executor of the right base model. `reasons` has one entry per term of `cost_ms`, or says why it is out."""

    executor: str
    eligible: bool
    cost_ms: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """`executor` is empty when none can take the request now. Candidates are in order: eligible and cheap first."""

    executor: str
    candidates: tuple[Candidate, ...]


def choose(view: FleetView, wish: Wish) -> Decision:
    """Returns the cheapest executor that may take the request, and why. Ties go to the lower name."""
    candidates = [_candidate(executor, wish) for executor in view.of_base(wish.base_model)]
    candidates.sort(key=lambda candidate: (not candidate.eligible, candidate.cost_ms, candidate.executor))
    best = candidates[0] if candidates and candidates[0].eligible else None
    return Decision(best.executor if best else "", tuple(candidates))


def too_large(view: FleetView, wish: Wish) -> bool:
    """Says whether executors of this base model serve, and none of them could ever hold the revision."""
    serving = [executor for executor in view.of_base(wish.base_model) if executor.serving]
    return bool(serving) and all(0 < executor.max_rank < wish.rank for executor in serving)


def _candidate(executor: ExecutorView, wish: Wish) -> Candidate:
    queue_ms = executor.in_flight * REQUEST_MS
    load_ms, load_reason = _load(executor, wish)
    reasons = (f"{executor.in_flight} requests in flight: {queue_ms:.0f} ms", f"{load_reason}: {load_ms:.0f} ms")
    against = _against(executor, wish, excluded=wish.excluded)
    return Candidate(executor.name, not against, queue_ms + load_ms, (against, *reasons) if against else reasons)


def _load(executor: ExecutorView, wish: Wish) -> tuple[float, str]:
    if not wish.revision_id:
        return 0.0, "base model, nothing to load"
    resident = executor.resident.get(wish.revision_id)
    if resident is not None and resident.state == "READY":
        return 0.0, "revision is resident"
    if resident is not None and resident.state == "LOADING":
        return LOADING_MS, "revision is loading"
    if wish.revision_id in executor.expected:
        return LOADING_MS, "revision was asked for already"
    return LOAD_MS, "revision must be loaded"


def _against(executor: ExecutorView, wish: Wish, *, excluded: Collection[str]) -> str:
    if executor.name in excluded:
        return "failed this request before"
    if not executor.serving:
        return executor.why_not
    if executor.max_rank and wish.rank > executor.max_rank:
        return f"holds ranks up to {executor.max_rank}, the revision has {wish.rank}"
    if not executor.has_room:
        return f"has its {executor.window} requests"
    return ""
