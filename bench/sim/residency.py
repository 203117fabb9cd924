"""What eviction costs: a sequence of calls through the executor's own adapter pool, one call at a time."""

from collections.abc import Sequence

from bench.sim.workloads import Call
from services.executor.adapter_pool import AdapterPool
from services.executor.eviction import EvictionPolicy

# A load: fixed, and per rank row.
LOAD_MS, RANK_MS = 20.0, 1.0
PAGE_ROWS = 8


def load_cost(rank: int) -> float:
    """Returns the milliseconds of one load."""
    return LOAD_MS + RANK_MS * rank


def replay(calls: Sequence[Call], policy: EvictionPolicy, *, slots: int, by_bytes: bool = False) -> float:
    """Returns the load cost of `calls`, in ms. A slot holds any adapter, or with `by_bytes` 32 rank rows."""
    rows = PAGE_ROWS if by_bytes else 128
    pool = AdapterPool(slots * 32 // PAGE_ROWS if by_bytes else slots, page_rows=rows, page_bytes=2**20, policy=policy)
    spent = 0.0
    for call in calls:
        if pool.state(call.adapter) is None:
            while pool.reserve(call.adapter, rank=call.rank, tenant=call.tenant) is None:
                pool.scrubbed(pool.take_dirty())
            spent += load_cost(call.rank)
            pool.ready(call.adapter, now=call.at, load_ms=load_cost(call.rank))
        lease = pool.lease(call.adapter, now=call.at)
        assert lease is not None
        pool.release(lease)
    return spent
