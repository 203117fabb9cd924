"""`ExecutorService`: tickets and protocol buffers at the door, plain values inside."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import structlog

from loraport.bundle.digest import is_digest
from loraport.executor.v1 import executor_service_pb2 as pb
from loraport.executor.v1.executor_service_pb2_grpc import ExecutorServiceServicer
from services.executor import wire
from services.executor.adapter_pool import may_keep
from services.executor.berths import Berths
from services.executor.engine.build import Device
from services.executor.engine.state import EngineState
from services.executor.execution import Execution
from services.executor.many import Events, Many
from services.executor.ports import Registry
from services.executor.reference_path import ReferencePath
from services.executor.request import Ended, RefusalReason, Refused, RequestSpec, Started, Tokens
from services.shared import metrics, telemetry, tracing
from services.shared.checkpoint import told
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.prefix_hash import tenant_salt
from services.shared.statements import StatementError, Ticket, TrustedKeys, open_ticket

log = structlog.get_logger()

# A device call is answered this long before its deadline, so that the answer still arrives.
MARGIN_S = 0.2
POLL_S = 0.05
MAX_RANK = 256
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this executor is: its names, the id of its base, the process's start counter."""

    name: str
    base_model: str
    base_id: str
    epoch: int
    dtype: str


class ExecutorServicer(ExecutorServiceServicer):
    """The executor's calls."""

    def __init__(
        self,
        device: Device,
        berths: Berths,
        *,
        reference: ReferencePath,
        registry: Registry,
        routers: TrustedKeys,
        identity: Identity,
        clock: Clock,
    ) -> None:
        self._device = device
        self._engine = device.engine
        self._berths = berths
        self._reference = reference
        self._registry = registry
        self._routers = routers
        self._identity = identity
        self._clock = clock
        self._many = Many(self._execute)

    async def Execute(self, request: pb.ExecuteRequest, context: Any) -> AsyncIterator[pb.ExecuteResponse]:
        async with contextlib.aclosing(self._execute(request, context.time_remaining())) as told:
            async for events in told:
                yield pb.ExecuteResponse(events=events)

    def ExecuteMany(
        self, messages: AsyncIterator[pb.ExecuteManyRequest], context: Any
    ) -> AsyncIterator[pb.ExecuteManyResponse]:
        return self._many.responses(messages)

    def ask_to_end(self) -> None:
        """Asks routers to end their streams: the process stops."""
        self._many.ask_to_end()

    async def _execute(self, request: pb.ExecuteRequest, remaining: float | None) -> AsyncGenerator[Events, None]:
        ticket = await self._admit(request)
        execution = Execution(self._engine, self._specs(request, ticket, remaining))
        try:
            load_ms = await self._submit(execution, request.revision_id)
            async with contextlib.aclosing(self._answer(execution, request.revision_id, load_ms)) as answer:
                async for events in answer:
                    yield events
        finally:
            execution.close()

    async def _admit(self, request: pb.ExecuteRequest | pb.ProbeRequest | pb.PreloadRequest) -> Ticket:
        """The ticket must be of a router, of now, and of exactly this revision, base and tenant."""
        try:
            ticket = open_ticket(request.ticket, self._routers, now=self._clock.now())
        except StatementError as error:
            raise LoraportError("INVALID_TICKET", f"the ticket is not valid: {error}") from None
        if ticket.revision_id != request.revision_id:
            raise LoraportError("INVALID_TICKET", "the ticket is for another revision")
        if ticket.base_id != self._identity.base_id:
            raise LoraportError("WRONG_BASE", "the ticket is for another base model")
        if request.revision_id:
            standing = await self._registry.standing(_revision_id(request.revision_id), ticket.tenant)
            if not standing.serves(ticket.tenant):
                # The router may know of a share that is no more; its ticket is good all the same.
                raise LoraportError("REVISION_NOT_ACTIVE", "the revision is not one of the ticket's tenant")
            if standing.record.base_id != self._identity.base_id:
                raise LoraportError("WRONG_BASE")
        return ticket

    def _specs(self, request: pb.ExecuteRequest, ticket: Ticket, remaining: float | None) -> list[RequestSpec]:
        """Everything that can be refused is refused before anything is loaded."""
        specs = wire.specs_from_proto(
            request,
            request_id=_request_id(request),
            salt=tenant_salt(ticket.tenant),
            max_length=self._engine.max_length,
            deadline=self._deadline(remaining),
            make_seed=lambda: secrets.randbits(63),
        )
        self._validate(specs)
        return specs

    def _deadline(self, remaining: float | None) -> float | None:
        return None if remaining is None else self._clock.monotonic() + remaining

    def _validate(self, specs: list[RequestSpec]) -> None:
        try:
            for spec in specs:
                self._engine.validate(spec)
        except Refused as error:
            raise wire.refusal(error) from None

    async def _submit(self, execution: Execution, revision_id: str) -> float:
        """Bring the revision here, then hand the answers in. Returns the milliseconds of the load."""
        spent = 0.0
        for last in (False, True):
            lease = None
            try:
                if revision_id:
                    lease, load_ms = await self._berths.hold(revision_id)
                    spent += load_ms
                execution.submit()
                return spent
            except Refused as error:
                # Evicted by hand between its load and its use: load it once more.
                if last or error.reason is not RefusalReason.NOT_RESIDENT:
                    raise wire.refusal(error) from None
                await execution.withdraw()
            finally:
                if lease is not None:
                    lease.release()
        raise AssertionError("unreachable")

    async def _answer(self, execution: Execution, revision_id: str, load_ms: float) -> AsyncGenerator[Events, None]:
        begun, failed = False, None
        async for happened in execution.batches():
            told = []
            for index, event in happened:
                match event:
                    case Started() if not begun:
                        begun = True
                        telemetry.observe(metrics.EXECUTOR_QUEUE, event.queue_s)
                        tracing.note(executor=self._identity.name, queue_ms=event.queue_s * 1000)
                        base_id = self._identity.base_id
                        told.append(wire.started_to_proto(event, revision_id, base_id, load_ms=load_ms))
                    case Tokens():
                        told.append(wire.tokens_to_proto(index, event))
                    case Ended():
                        _note_end(event)
                        if not event.reason.is_answer:
                            failed = event.reason
                            break
                        told.append(wire.finished_to_proto(index, event))
            if told:
                yield told
            if failed is not None:
                raise wire.failure(failed)

    async def EnsureDevice(
        self, request: pb.EnsureDeviceRequest, context: Any
    ) -> AsyncIterator[pb.EnsureDeviceResponse]:
        async with contextlib.aclosing(self._berths.ensure(_revision_id(request.revision_id))) as stages:
            async for stage in stages:
                yield pb.EnsureDeviceResponse(stage=wire.stage_to_proto(stage))

    async def Preload(self, request: pb.PreloadRequest, context: Any) -> pb.PreloadResponse:
        revision_id = _revision_id(request.revision_id)
        await self._admit(request)
        # Before it is loaded: what would not be kept must not push out what others use, again and again.
        await self._require_room_to_keep(revision_id)
        lease, load_ms = await self._berths.hold(revision_id)
        try:
            self._engine.keep(self._registry.needed())
            pinned = any(r.revision_id == revision_id and r.pinned for r in self._engine.state().residents)
            if not pinned:
                await self._require_room_to_keep(revision_id)
        finally:
            lease.release()
        return pb.PreloadResponse(revision_id=revision_id, load_ms=load_ms, pinned=pinned)

    async def _require_room_to_keep(self, revision_id: str) -> None:
        """Raises LoraportError (PIN_BUDGET) where a rollout needs a revision that there is no room to keep."""
        needed = self._registry.needed()
        if revision_id not in needed:
            return
        self._engine.keep(needed)
        state = self._engine.state()
        pages = -(-(await self._registry.standing(revision_id)).max_rank // state.page_rows)
        if not may_keep(state.residents, revision_id, pages=pages, page_count=state.page_count):
            raise LoraportError("PIN_BUDGET")

    async def Evict(self, request: pb.EvictRequest, context: Any) -> pb.EvictResponse:
        try:
            held = await asyncio.wrap_future(self._engine.evict(_revision_id(request.revision_id)))
        except Refused as error:
            raise wire.refusal(error) from None
        if held is None:
            raise LoraportError("REVISION_NOT_RESIDENT")
        telemetry.count(metrics.EVICTIONS, reason="operator")
        return pb.EvictResponse(evicted=held == 0, lease_count=held)

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> pb.ProbeResponse:
        ticket = await self._admit(request)
        owner = tenant_salt(ticket.tenant)
        spec = wire.score_from_proto(
            request,
            request_id=f"{_request_id(request)}/score",
            # What is compared with the reference is computed on the pages as they are, not found in the prefix cache.
            salt=secrets.token_bytes(16) if request.reference else owner,
            owner=owner,
            deadline=self._deadline(context.time_remaining()),
        )
        self._validate([spec])
        reference: list[float] = []
        if request.reference:
            reference = await self._reference.logprobs(
                request.revision_id, prompt=request.prompt_token_ids, continuation=request.continuation_token_ids
            )
        execution = Execution(self._engine, [spec])
        context.add_done_callback(lambda _: execution.close())
        logprobs = []
        try:
            load_ms = await self._submit(execution, request.revision_id)
            async for _, event in execution.events():
                if isinstance(event, Tokens):
                    logprobs += wire.logprobs_to_proto(event)
                elif isinstance(event, Ended):
                    if not event.reason.is_answer:
                        raise wire.failure(event.reason)
                    base = self._identity.base_id
                    return wire.scored_to_proto(
                        logprobs,
                        event,
                        revision_id=request.revision_id,
                        base_id=base,
                        load_ms=load_ms,
                        reference=reference,
                    )
        finally:
            execution.close()
        raise AssertionError("a request ends with an Ended event")

    async def State(self, request: pb.StateRequest, context: Any) -> pb.StateResponse:
        state = self._engine.state()
        return pb.StateResponse(
            executor=self._identity.name,
            base_id=self._identity.base_id,
            base_model=f"baseModels/{self._identity.base_model}",
            epoch=self._identity.epoch,
            sequence=state.changes,
            state=_state_word(state),
            revisions=[wire.resident_to_proto(r, self._berths.stages(r.revision_id)) for r in state.residents],
            queued_count=state.waiting,
            running_count=state.running,
            kv_used_block_count=state.kv_total - state.kv_free - state.kv_cached,
            kv_block_count=state.kv_total,
            kv_cached_block_count=state.kv_cached,
            kv_revision_block_counts=state.kv_named,
            pool_used_bytes=(state.page_count - state.free_pages) * state.page_bytes,
            pool_size_bytes=state.page_count * state.page_bytes,
            max_rank=min(MAX_RANK, self._device.max_rank),
            dtype=self._identity.dtype,
            mode=state.mode,
            merged_revision_id=state.merged_revision_id or "",
            decoder=self._device.model.path,
            max_context_tokens=self._engine.max_length,
            step_count=state.totals.steps,
            totals=wire.totals_to_proto(state.totals),
            page_size_bytes=state.page_bytes,
            page_rank_count=state.page_rows,
            load_count=state.loads_done,
            thrash_count=state.thrashes,
            checkpoint=told(self._registry.seen()),
        )

    async def SetMode(self, request: pb.SetModeRequest, context: Any) -> pb.SetModeResponse:
        revision_id = _revision_id(request.revision_id) if request.revision_id else None
        lease = None
        try:
            if revision_id is not None:
                lease, _ = await self._berths.hold(revision_id)
            change = self._engine.merge(revision_id)
        except Refused as error:
            raise wire.refusal(error) from None
        finally:
            if lease is not None:
                lease.release()
        try:
            async with asyncio.timeout(context.time_remaining() - MARGIN_S):
                await asyncio.shield(asyncio.wrap_future(change))
        except asyncio.CancelledError:
            self._take_back(revision_id)
            raise
        except TimeoutError:
            self._take_back(revision_id)
            raise LoraportError("DEADLINE_EXCEEDED", "something still runs or holds a revision") from None
        except Refused as error:
            raise wire.refusal(error) from None
        state = self._engine.state()
        return pb.SetModeResponse(mode=state.mode, revision_id=state.merged_revision_id or "")

    def _take_back(self, revision_id: str | None) -> None:
        """Nobody waits for this merging any more: it must not refuse everybody until nothing runs, and happen after
        all."""
        if revision_id is not None:
            self._engine.merge(None)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self._engine.drain(not request.undrain)
        log.info("in service again" if request.undrain else "drained by an operator")
        waits = not (request.undrain or request.at_once)
        while waits and self._engine.state().open_requests and context.time_remaining() > MARGIN_S:
            await asyncio.sleep(POLL_S)
        return pb.DrainResponse(running_count=self._engine.state().open_requests)


def _note_end(event: Ended) -> None:
    tracing.note(
        finish_reason=event.reason.value,
        kernel_path=event.kernel_path,
        batch_rows=event.batch_rows,
        distinct_adapters=event.distinct_adapters,
        cached_tokens=event.usage.prefix_hit_tokens,
        tokens=event.usage.output_tokens,
        preemptions=event.usage.preemptions,
    )


def _state_word(state: EngineState) -> str:
    if state.failed:
        return "FAILED"
    return "DRAINING" if state.draining else "SERVING"


def _request_id(request: pb.ExecuteRequest | pb.ProbeRequest) -> str:
    if _REQUEST_ID.fullmatch(request.request_id) is None:
        raise LoraportError(
            "INVALID_REQUEST", "request_id must be 1 to 64 letters, digits, '-', '_' and '.'", subject="request_id"
        )
    return request.request_id


def _revision_id(value: str) -> str:
    if not is_digest(value):
        raise LoraportError("INVALID_REQUEST", "revision_id must be sha256:<64 hex>", subject="revision_id")
    return value
