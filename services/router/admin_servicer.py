"""The admin plane: what the router knows, as protobuf."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from loraport.router.v1 import router_admin_service_pb2 as pb
from loraport.router.v1 import router_admin_service_pb2_grpc as stubs
from services.router.capacity_view import capacity_to_proto
from services.router.catalog_view import not_found
from services.router.dispatch import Dispatch
from services.router.fleet import Fleet
from services.router.fleet_view import ExecutorView
from services.router.ledger import is_rollout
from services.router.placement import Wish, choose
from services.router.ports import Catalog
from services.router.quota import Quotas
from services.shared import names
from services.shared.clock import Clock
from services.shared.errors import LoraportError


class RouterAdminServicer(stubs.RouterAdminServiceServicer):
    """Serves operators. `max_running` is the most requests of a tenant that run at once, `key_uses` are the last
    times that keys opened by their ids, seconds since the epoch."""

    def __init__(
        self,
        catalog: Catalog,
        fleet: Fleet,
        dispatch: Dispatch,
        quotas: Quotas,
        *,
        max_running: int,
        key_uses: Mapping[str, float],
        clock: Clock,
    ) -> None:
        self._catalog = catalog
        self._fleet = fleet
        self._dispatch = dispatch
        self._quotas = quotas
        self._key_uses = key_uses
        self._max_running = max_running
        self._clock = clock

    async def ListQueues(self, request: pb.ListQueuesRequest, context: Any) -> pb.ListQueuesResponse:
        return pb.ListQueuesResponse(
            queues=[
                pb.TenantQueue(
                    tenant=_account_name(state.tenant),
                    queued_count=state.queued,
                    running_count=state.running,
                    oldest_wait_ms=state.oldest_wait_s * 1000,
                )
                for state in self._dispatch.queue.states(self._clock.monotonic())
            ]
        )

    async def GetFairness(self, request: pb.GetFairnessRequest, context: Any) -> pb.GetFairnessResponse:
        return pb.GetFairnessResponse(
            tenants=[
                pb.TenantWork(
                    tenant=names.tenant_name(tenant),
                    weight=account.weight,
                    counter_ms=account.counter,
                    prefill_ms=account.prefill,
                    decode_ms=account.decode,
                    load_ms=account.load,
                    hold_ms=account.hold,
                    elsewhere_ms=account.elsewhere,
                )
                for tenant, account in sorted(self._dispatch.ledger.accounts.items())
                if not is_rollout(tenant)
            ],
            bound_ms=self._dispatch.ledger.bound_ms(running=self._max_running),
            admissions=[
                pb.Admission(
                    tenant=_account_name(story.tenant),
                    revision_id=story.revision_id,
                    executor=story.executor,
                    wait_ms=story.waited_s * 1000,
                    why=story.text(),
                )
                for story in self._dispatch.stories
            ],
        )

    async def GetCapacity(self, request: pb.GetCapacityRequest, context: Any) -> pb.Capacity:
        return capacity_to_proto(self._dispatch, self._clock.monotonic())

    async def ExplainPlacement(self, request: pb.ExplainPlacementRequest, context: Any) -> pb.ExplainPlacementResponse:
        wish = self._wish(request)
        decision = choose(self._fleet.view(), wish, self._dispatch.prices.of(wish.base_model))
        return pb.ExplainPlacementResponse(
            executor=decision.executor,
            candidates=[
                pb.PlacementCandidate(
                    executor=candidate.executor,
                    cost_ms=candidate.cost_ms,
                    reasons=candidate.reasons,
                    eligible=candidate.eligible,
                )
                for candidate in decision.candidates
            ],
        )

    async def ListResidency(self, request: pb.ListResidencyRequest, context: Any) -> pb.ListResidencyResponse:
        return pb.ListResidencyResponse(executors=[self._residency(e) for e in self._fleet.view().executors])

    async def DrainExecutor(self, request: pb.DrainExecutorRequest, context: Any) -> pb.DrainExecutorResponse:
        executor = self._fleet.set_drained(request.executor, not request.undrain)
        return pb.DrainExecutorResponse(
            executor=executor.name, serving=executor.serving, running_count=executor.in_flight
        )

    async def GetQuotaUsage(self, request: pb.GetQuotaUsageRequest, context: Any) -> pb.QuotaUsage:
        tenant = names.parse_tenant(request.tenant, "tenant")
        owner = self._catalog.view.tenants.get(tenant)
        if owner is None:
            raise LoraportError("TENANT_NOT_FOUND", f"there is no tenant {tenant}")
        view = self._catalog.view
        used = sorted((key, at) for key, at in self._key_uses.items() if key in view.keys)
        return pb.QuotaUsage(
            tenant=names.tenant_name(tenant),
            quotas=[
                pb.QuotaLine(
                    quota=line.quota, limit=line.limit, used=line.used, total=line.total, refused_count=line.refused
                )
                for line in self._quotas.lines(tenant, owner.quota)
            ],
            router_count=self._quotas.routers,
            shared=self._quotas.linked,
            keys=[
                pb.ApiKeyUse(key=key, last_use_time=Timestamp(seconds=int(at)))
                for key, at in used
                if view.keys[key].tenant == tenant
            ],
        )

    def _wish(self, request: pb.ExplainPlacementRequest) -> Wish:
        view, now = self._catalog.view, self._clock.monotonic()
        if not request.revision_id:
            return Wish(names.parse_base_model(request.base_model, "base_model"), "", 0, now=now)
        item = view.revisions.get(request.revision_id)
        if item is None:
            raise not_found()
        owner = view.tenants.get(item.tenant)
        return Wish(
            item.base_model,
            item.revision_id,
            item.max_rank,
            tenant=item.tenant,
            weight=owner.weight if owner is not None else 1.0,
            mib=item.size_bytes / 2**20,
            replicas=self._dispatch.popularity.replicas(item.revision_id, now),
            now=now,
        )

    def _residency(self, executor: ExecutorView) -> pb.ExecutorResidency:
        report, time = executor.report, Timestamp()
        time.FromMilliseconds(report.time_ms if report else 0)
        return pb.ExecutorResidency(
            executor=executor.name,
            base_model=names.base_model_name(executor.base_model),
            serving=executor.serving,
            report_time=time if report else None,
            epoch=report.epoch if report else 0,
            revisions=[self._resident(revision_id, executor) for revision_id in sorted(executor.resident)],
            pool_used_bytes=report.pool_used_bytes if report else 0,
            pool_size_bytes=report.pool_size_bytes if report else 0,
            fault=executor.why_not,
        )

    def _resident(self, revision_id: str, executor: ExecutorView) -> pb.ResidentRevision:
        held = executor.resident[revision_id]
        item = self._catalog.view.revisions.get(revision_id)
        return pb.ResidentRevision(
            revision_id=revision_id,
            adapter=str(names.AdapterName(item.tenant, item.adapter)) if item else "",
            version=item.version if item else 0,
            size_bytes=held.size_bytes,
            lease_count=held.lease_count,
            state=held.state,
        )


def _account_name(account: str) -> str:
    return account if is_rollout(account) else names.tenant_name(account)
