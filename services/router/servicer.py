"""The user plane: protobuf to values and back, no rules."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from services.router import wire
from services.router.auth import still_opens
from services.router.catalog_view import AdapterSummary, list_adapters, not_found
from services.router.door import Door, Job
from services.router.events import Started, Tokens
from services.router.measure import Meter
from services.router.observing import Observer
from services.router.passage import RelayParts
from services.router.ports import Catalog
from services.router.quota import Entry, Quotas
from services.router.relay import Relay
from services.router.scoring import score
from services.router.shadows import Shadows
from services.shared import names, tracing
from services.shared.clock import Clock
from services.shared.errors import FaultList, LoraportError
from services.shared.paging import PageTokens, page_size
from services.shared.rpc.guard import current_call


class InferenceServicer(stubs.InferenceServiceServicer):
    """Serves end users. The tenant is the credential's, always."""

    def __init__(
        self,
        door: Door,
        relays: RelayParts,
        catalog: Catalog,
        quotas: Quotas,
        *,
        tokens: PageTokens,
        clock: Clock,
        meter: Meter,
        observer: Observer,
        shadows: Shadows,
    ) -> None:
        self._door = door
        self._relays = relays
        self._catalog = catalog
        self._quotas = quotas
        self._tokens = tokens
        self._clock = clock
        self._meter = meter
        self._observer = observer
        self._shadows = shadows

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        call, principal = current_call(), current_call().principal
        # An API key is a program's, which has many users; a token is one user's.
        user = principal.label if principal.expires is not None else ""
        with self._meter.watch("generate", principal.role) as watched, self._enter(principal.role) as entry:
            with tracing.part("router.admit"):
                job = await self._door.admit(principal.role, wire.ask_from_proto(request, user=user))
            watched.admitted(job)
            self._count(entry, job)
            job = self._shadows.copy(job)
            left = context.time_remaining()
            relay = Relay(job, self._relays, timeout_s=left)

            def ended(_context: object) -> None:
                # It may be that nobody reads this generator to its end.
                relay.close()
                watched.end()
                entry.close()

            context.add_done_callback(ended)
            with self._observer.watch(job, timeout_s=left) as observed:
                async with aclosing(relay.events()) as events:
                    async for told in events:
                        # A stream may outlive the key that opened it by minutes: it ends with the key.
                        if not still_opens(self._catalog.view, principal, now=self._clock.now()):
                            raise LoraportError("INVALID_CREDENTIAL")
                        entry.began()
                        for event in told:
                            watched.saw(event)
                            observed.saw(event)
                            if isinstance(event, Tokens):
                                entry.tokens(len(event.token_ids))
                            elif isinstance(event, Started):
                                self._observer.answered(principal.role, call.request_id, job)
                        yield pb.GenerateResponse(events=map(wire.event_to_proto, told))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        with self._meter.watch("score", _tenant()) as watched, self._enter(_tenant()) as entry:
            with tracing.part("router.admit"):
                job = await self._door.admit_score(_tenant(), wire.score_ask_from_proto(request))
            watched.admitted(job)
            self._count(entry, job)
            scored = await score(job, self._relays, timeout_s=context.time_remaining())
            watched.scored(scored)
            return wire.scored_to_proto(scored)

    async def CountTokens(self, request: pb.CountTokensRequest, context: Any) -> pb.CountTokensResponse:
        target, prompt = wire.target_from_proto(request.target), wire.prompt_from_proto(request)
        with self._enter(_tenant()):
            token_ids = await self._door.count_tokens(_tenant(), target, prompt)
        return pb.CountTokensResponse(token_count=len(token_ids), token_ids=token_ids)

    async def ReportOutcome(self, request: pb.ReportOutcomeRequest, context: Any) -> pb.ReportOutcomeResponse:
        faults = FaultList()
        known = (pb.ReportOutcomeRequest.OUTCOME_ACCEPTED, pb.ReportOutcomeRequest.OUTCOME_REJECTED)
        faults.require(request.outcome in known, "outcome", "must be OUTCOME_ACCEPTED or OUTCOME_REJECTED")
        faults.require(bool(request.request_id), "request_id", "must be the x-request-id of a Generate call")
        faults.raise_if_any()
        self._observer.outcome(_tenant(), request.request_id, accepted=request.outcome == known[0])
        return pb.ReportOutcomeResponse()

    def _enter(self, tenant: str) -> Entry:
        """Before anything that the call names is looked at. Raises LoraportError (QUOTA_EXCEEDED)."""
        return self._quotas.enter(tenant, self._catalog.view.quota_of(tenant))

    def _count(self, entry: Entry, job: Job) -> None:
        """Counts what a call uses that was found to be the tenant's to use. Raises LoraportError (QUOTA_EXCEEDED)."""
        if job.revision is not None:
            executors = self._relays.fleet.view().of_base(job.base.base_model)
            resident = any(job.revision_id in executor.resident for executor in executors if executor.serving)
            entry.use(job.revision_id, job.revision.size_bytes, resident=resident)
        entry.tokens(len(job.prompt_token_ids) + len(job.continuation_token_ids))

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Any) -> pb.ListAdaptersResponse:
        tenant, size = _tenant(), page_size(request.page_size)
        scope = ("adapters", tenant)
        after = self._tokens.open(request.page_token, scope=scope, kinds=(str,))
        last = str(after[0]) if after else ""
        with self._enter(tenant):
            # A list is as new as the registry too: who has just registered an adapter looks for it here.
            await self._catalog.catch_up()
            found = [adapter for adapter in list_adapters(self._catalog.view, tenant) if adapter.adapter > last]
        page = found[:size]
        more = len(found) > size
        return pb.ListAdaptersResponse(
            adapters=[wire.adapter_to_proto(tenant, adapter) for adapter in page],
            next_page_token=self._tokens.seal((page[-1].adapter,), scope=scope) if more else "",
        )

    async def GetAdapter(self, request: pb.GetAdapterRequest, context: Any) -> pb.Adapter:
        tenant = _tenant()
        name = names.parse_adapter(request.name)
        with self._enter(tenant):
            found = self._find(tenant, name)
            if found is None:
                await self._catalog.catch_up()
                found = self._find(tenant, name)
        if found is None:
            raise not_found()
        return wire.adapter_to_proto(tenant, found)

    def _find(self, tenant: str, name: names.AdapterName) -> AdapterSummary | None:
        found = list_adapters(self._catalog.view, tenant, only=name.adapter) if name.tenant == tenant else []
        return found[0] if found else None


def _tenant() -> str:
    return current_call().principal.role
