"""Capacity as the admin plane shows it, as protobuf."""

from loraport.router.v1 import router_admin_service_pb2 as pb
from services.router.capacity import WINDOW_S, Pool, verdict
from services.router.dispatch import Dispatch
from services.router.fleet_view import ExecutorView
from services.shared import names


def capacity_to_proto(dispatch: Dispatch, now: float) -> pb.Capacity:
    """Returns what was asked of every pool within the window. `now` is on the monotonic clock, in seconds."""
    executors = {executor.name: executor for executor in dispatch.members.view().executors}
    pools = dispatch.pools(now)
    bases = sorted({pool.base_model for pool in pools})
    return pb.Capacity(
        window_s=WINDOW_S,
        bases=[
            _base(base, [pool for pool in pools if pool.base_model == base], executors, dispatch, now) for base in bases
        ],
        executors=[_executor(pool, executors[pool.executor]) for pool in pools],
    )


def _base(
    base_model: str, pools: list[Pool], executors: dict[str, ExecutorView], dispatch: Dispatch, now: float
) -> pb.BaseCapacity:
    serving = [pool for pool in pools if executors[pool.executor].serving]
    # What was sent to an executor that has gone is in use all the same.
    count, active = dispatch.needs.active_pages(frozenset(pool.executor for pool in pools), now)
    fits, words = verdict(serving, active)
    page_bytes = max((_page_bytes(executors[pool.executor]) for pool in pools), default=0)
    return pb.BaseCapacity(
        base_model=names.base_model_name(base_model),
        active_count=count,
        active_bytes=active * page_bytes,
        pool_bytes=sum(_pool_bytes(executors[pool.executor]) for pool in serving),
        fits=fits,
        verdict=words,
    )


def _executor(pool: Pool, executor: ExecutorView) -> pb.ExecutorCapacity:
    size, need = _pool_bytes(executor), pool.need.pages * _page_bytes(executor)
    thrashing = sorted(pool.need.thrashing.items(), key=lambda item: (-item[1], item[0]))
    return pb.ExecutorCapacity(
        executor=pool.executor,
        base_model=names.base_model_name(pool.base_model),
        pool_bytes=size,
        working_set_count=len(pool.need.revisions),
        working_set_bytes=need,
        headroom_bytes=size - need,
        load_count=pool.need.loads,
        reload_count=pool.need.reloads,
        thrashing=[
            pb.TenantReloads(tenant=names.tenant_name(tenant), reload_count=count) for tenant, count in thrashing
        ],
    )


def _pool_bytes(executor: ExecutorView) -> int:
    return executor.report.pool_size_bytes if executor.report is not None else 0


def _page_bytes(executor: ExecutorView) -> int:
    return _pool_bytes(executor) // executor.page_count if executor.page_count else 0
