"""The admin plane: what the router knows, as protobuf."""

from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from loraport.router.v1 import router_admin_service_pb2 as pb
from loraport.router.v1 import router_admin_service_pb2_grpc as stubs
from services.router.catalog_view import not_found
from services.router.fair_queue import FairQueue
from services.router.fleet import Fleet
from services.router.fleet_view import ExecutorView
from services.router.ledger import Ledger
from services.router.placement import Wish, choose
from services.router.ports import Catalog
from services.shared import names
from services.shared.clock import Clock


class RouterAdminServicer(stubs.RouterAdminServiceServicer):
    """Serves operators. `limits` are the arguments of the ledger's published bound."""

    def __init__(
        self, catalog: Catalog, fleet: Fleet, queue: FairQueue, ledger: Ledger, *, limits: dict[str, int], clock: Clock
    ) -> None:
        self._catalog = catalog
        self._fleet = fleet
        self._queue = queue
        self._ledger = ledger
        self._limits = limits
        self._clock = clock

    async def ListQueues(self, request: pb.ListQueuesRequest, context: Any) -> pb.ListQueuesResponse:
        return pb.ListQueuesResponse(
            queues=[
                pb.TenantQueue(
                    tenant=names.tenant_name(state.tenant),
                    queued_count=state.queued,
                    running_count=state.running,
                    oldest_wait_ms=state.oldest_wait_s * 1000,
                )
                for state in self._queue.states(self._clock.monotonic())
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
                )
                for tenant, account in sorted(self._ledger.accounts.items())
            ],
            bound_ms=self._ledger.bound_ms(**self._limits),
        )

    async def ExplainPlacement(self, request: pb.ExplainPlacementRequest, context: Any) -> pb.ExplainPlacementResponse:
        decision = choose(self._fleet.view(), self._wish(request))
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

    def _wish(self, request: pb.ExplainPlacementRequest) -> Wish:
        if not request.revision_id:
            return Wish(names.parse_base_model(request.base_model, "base_model"), "", 0)
        item = self._catalog.view.revisions.get(request.revision_id)
        if item is None:
            raise not_found()
        return Wish(item.base_model, item.revision_id, item.max_rank)

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
