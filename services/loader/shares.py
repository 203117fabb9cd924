"""Who makes room for whom in a tier that many tenants share. Pure.

The story: a tier has a budget of bytes, and nobody bought a place in it. Each tenant that has something there, or asks
for room, has an equal part. A tenant may fill what the others leave empty, but not keep it from them: whoever has most
gives first, the one that asks included, with what it asks for counted as if it were there. So a tenant that goes round
many adapters pushes out its own, and whoever has no more than its part keeps it.

    1. What several tenants use is counted to each in equal parts, and leaves as late as what that one of them has that
       has least.
    2. An entry may leave when every tenant that uses it has more than its part, or is one of those that ask.
    3. Parts alone would keep a big adapter out for ever, where many others have a little: part after part adds up. So
       what others have within their parts leaves too, after all that rule 2 gives, as long as those that ask have no
       more under way, the newcomer counted, than one PUSHED_PART of the budget, or nothing but the newcomer.
    4. Under way is what cannot be taken back: room that is set aside, and what somebody holds. Where there are others,
       those that have something there or found no room a moment ago, a second newcomer leaves them a KEPT_PART of the
       budget, or as much as they found no room for up to a MOST_PART, however empty the tier is. Found no room: whoever
       was refused and had nothing under way.

What was used by nobody known, as after a restart, is nobody's part and leaves first.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import inf

PUSHED_PART, KEPT_PART, MOST_PART = 8, 4, 2
BY_RULE, PUSHED = 0, 1


@dataclass(frozen=True, slots=True)
class Held:
    """What lies in the tier under a digest, and the tenants that used it.

    Without `free` somebody holds it, and it stays. With `last` it leaves after what is not, as far as that may leave.
    """

    digest: str
    size_bytes: int
    tenants: frozenset[str]
    free: bool = True
    last: bool = False


def charges(held: Iterable[tuple[int, frozenset[str]]]) -> dict[str, float]:
    """Returns each tenant's bytes of (size, tenants that use it); those of nobody count for nobody."""
    found: defaultdict[str, float] = defaultdict(float)
    for size_bytes, tenants in held:
        for tenant in tenants:
            found[tenant] += size_bytes / len(tenants)
    return dict(found)


def may_hold(size_bytes: int, *, under_way: int, budget_bytes: int, wanted: int) -> bool:
    """Says whether a newcomer may come to what its tenants have under way, where there are others (rule 4).

    `wanted` is the most that one of the others found no room for.
    """
    kept = max(budget_bytes // KEPT_PART, min(wanted, budget_bytes // MOST_PART))
    return not under_way or under_way + size_bytes <= budget_bytes - kept


def victims(
    held: Sequence[Held],
    size_bytes: int,
    *,
    askers: frozenset[str],
    budget_bytes: int,
    reserved: Sequence[tuple[int, frozenset[str]]] = (),
    under_way: int = 0,
) -> list[str] | None:
    """Returns the digests that leave for a newcomer of `size_bytes`, in order; None when too few may leave.

    `held` begins with the least recently used; `reserved` is the room that is set aside, as (size, tenants);
    `under_way` is what the askers have under way, that one of them which has least. Of what one set of tenants uses the
    least recently used leaves first, and nothing leaves once there is room.
    """
    newcomer = (size_bytes, askers)
    charge = charges([*((entry.size_bytes, entry.tenants) for entry in held), *reserved, newcomer])
    part = budget_bytes / max(len(charge), 1)
    pushes = not under_way or (under_way + size_bytes) * PUSHED_PART <= budget_bytes
    missing = size_bytes + sum(entry.size_bytes for entry in held) + sum(size for size, _ in reserved) - budget_bytes
    queues: defaultdict[tuple[frozenset[str], bool], deque[tuple[int, Held]]] = defaultdict(deque)
    for age, entry in enumerate(held):
        if entry.free:
            queues[entry.tenants, entry.last].append((age, entry))
    # What a queue is worth leaving only falls while others leave, so an old place in the heap is never too late.
    heap = [(*_place(*key, charge=charge, part=part, askers=askers), queue[0][0], key) for key, queue in queues.items()]
    heapify(heap)
    leaving: list[str] = []
    while missing > 0:
        if not heap or not (heap[0][0] == BY_RULE or pushes):
            return None
        key = heap[0][-1]
        place = (*_place(*key, charge=charge, part=part, askers=askers), queues[key][0][0], key)
        if place != heap[0]:
            heapreplace(heap, place)
            continue
        _, entry = queues[key].popleft()
        for tenant in entry.tenants:
            charge[tenant] -= entry.size_bytes / len(entry.tenants)
        missing -= entry.size_bytes
        leaving.append(entry.digest)
        if not queues[key]:
            heappop(heap)
    return leaving


def _place(
    tenants: frozenset[str], last: bool, *, charge: Mapping[str, float], part: float, askers: frozenset[str]
) -> tuple[int, bool, float]:
    """Returns (whether it may leave by rule 2, whether it is last, what the least of its tenants has, negated)."""
    least = min((charge[tenant] for tenant in tenants), default=inf)
    return BY_RULE if least > part or tenants <= askers else PUSHED, last, -least
