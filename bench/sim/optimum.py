"""What no policy can beat: bounds on load cost and on shares of service.

Unit slots (exact). Between two uses of an adapter it may be kept or not; keeping it saves the cost of its next load:
    maximize sum c_j x_j   with, at every moment, no more than K - 1 kept besides the one in use,   0 <= x <= 1
Intervals over time give a totally unimodular matrix, so the linear program has an integral optimum.

Bytes. The same with sizes is NP-hard; filling the total space-time with the intervals that save most per byte and
moment (PFOO-L) can only be too optimistic.
"""

from collections.abc import Mapping, Sequence

import numpy as np


def _intervals(keys: Sequence[str]) -> list[tuple[int, int, str]]:
    """Returns (use, next use, key) of every pair of consecutive uses of a key."""
    last: dict[str, int] = {}
    found = []
    for at, key in enumerate(keys):
        if key in last:
            found.append((last[key], at, key))
        last[key] = at
    return found


def least_cost(keys: Sequence[str], cost: Mapping[str, float], slots: int) -> float:
    """Returns the least load cost of serving `keys` in order with so many slots, each holding one adapter.

    Raises:
        RuntimeError: the solver gave up.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    total = sum(cost[key] for key in keys)
    kept = [(start, end, key) for start, end, key in _intervals(keys)]
    adjacent = sum(cost[key] for start, end, key in kept if end == start + 1)
    kept = [(start, end, key) for start, end, key in kept if end > start + 1]
    if not kept:
        return total - adjacent
    # s_t: what is kept at moment t besides the adapter in use.  s_t - s_(t-1) + ended - begun = 0,  s_t <= K - 1.
    moments, count = len(keys), len(kept)
    rows, columns, values = [], [], []
    for column, (start, end, _key) in enumerate(kept):
        rows += [start + 1, end]
        columns += [column, column]
        values += [-1.0, 1.0]
    for moment in range(moments):
        rows.append(moment)
        columns.append(count + moment)
        values.append(1.0)
        if moment:
            rows.append(moment)
            columns.append(count + moment - 1)
            values.append(-1.0)
    matrix = coo_matrix((values, (rows, columns)), shape=(moments, count + moments)).tocsr()
    objective = np.concatenate([[-cost[key] for _, _, key in kept], np.zeros(moments)])
    bounds = [(0, 1)] * count + [(0, slots - 1)] * moments
    solved = linprog(objective, A_eq=matrix, b_eq=np.zeros(moments), bounds=bounds, method="highs")
    if not solved.success:
        raise RuntimeError(f"the linear program has no answer: {solved.message}")
    return total - adjacent + float(solved.fun)


def least_cost_bytes(
    keys: Sequence[str], cost: Mapping[str, float], size: Mapping[str, float], capacity: float
) -> float:
    """Returns a lower bound on the load cost with adapters of these sizes in `capacity` (PFOO-L)."""
    saved, room = 0.0, len(keys) * capacity
    worth = sorted(
        ((cost[key] / (size[key] * (end - start)), cost[key], size[key] * (end - start))
         for start, end, key in _intervals(keys)),
        reverse=True,
    )  # fmt: skip
    for _, gain, space in worth:
        if space > room:
            saved += gain * room / space
            break
        saved += gain
        room -= space
    return sum(cost[key] for key in keys) - saved


def max_min(demands: Mapping[str, float], weights: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Returns the weighted max-min fair division of `capacity`: nobody gets more than its demand, and nobody could get
    more without somebody with less for its weight getting less."""
    got: dict[str, float] = {}
    open_, left = dict(demands), capacity
    while open_:
        level = left / sum(weights[name] for name in open_)
        filled = [name for name, demand in open_.items() if demand <= level * weights[name]]
        if not filled:
            return got | {name: level * weights[name] for name in open_}
        for name in filled:
            got[name] = open_.pop(name)
            left -= got[name]
    return got
