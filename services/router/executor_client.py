"""An executor over gRPC."""

import grpc

from loraport.executor.v1 import executor_service_pb2 as pb
from loraport.executor.v1 import executor_service_pb2_grpc as stubs
from loraport.types.v1 import types_pb2
from services.router import wire
from services.router.events import (
    ExecutorEvent,
    ExecutorFinished,
    ExecutorScored,
    ExecutorStarted,
    ExecutorTokens,
    Order,
    ScoreOrder,
    Usage,
)
from services.router.executor_link import Link, LinkedRequest
from services.router.members import Shape
from services.router.ports import ExecutorState
from services.router.prices import StepTotals
from services.shared import tracing
from services.shared.errors import LoraportError
from services.shared.residency import Notice, Resident
from services.shared.rpc.status import from_rpc_error


class ExecutorClient:
    """See `services.router.ports.Executor`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = stubs.ExecutorServiceStub(channel)
        self._link = Link(self._stub.ExecuteMany)

    async def state(self, timeout_s: float) -> ExecutorState:
        try:
            state = await self._stub.State(pb.StateRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, unavailable="EXECUTOR_UNAVAILABLE") from None
        return _state(state)

    def execute(self, order: Order, *, timeout_s: float) -> "LinkedExecution":
        request = pb.ExecuteRequest(
            request_id=order.request_id,
            ticket=order.ticket,
            revision_id=order.revision_id,
            prompt_token_ids=order.prompt_token_ids,
            sampling=wire.sampling_to_proto(order.sampling),
            priority=order.priority,
        )
        return LinkedExecution(self._link.begin(request, timeout_s=timeout_s, traceparent=tracing.traceparent()))

    async def score(self, order: ScoreOrder, *, timeout_s: float) -> ExecutorScored:
        request = pb.ProbeRequest(
            request_id=order.request_id,
            ticket=order.ticket,
            revision_id=order.revision_id,
            prompt_token_ids=order.prompt_token_ids,
            continuation_token_ids=order.continuation_token_ids,
            top_logprobs=order.top_logprobs,
            reference=order.reference,
        )
        try:
            answer = await self._stub.Probe(request, timeout=timeout_s, metadata=tracing.outgoing())
        except grpc.RpcError as error:
            raise from_rpc_error(error, unavailable="EXECUTOR_UNAVAILABLE") from None
        return ExecutorScored(
            logprobs=tuple(answer.logprobs),
            revision_id=answer.revision_id,
            base_id=answer.base_id,
            load_ms=answer.load_ms,
            kernel_path=answer.kernel_path,
            usage=_usage(answer.usage),
            chosen=tuple(entry.chosen.logprob for entry in answer.logprobs),
            reference=tuple(answer.reference_logprobs),
        )

    async def preload(self, ticket: bytes, revision_id: str, *, timeout_s: float) -> str:
        request = pb.PreloadRequest(ticket=ticket, revision_id=revision_id)
        try:
            answer = await self._stub.Preload(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, unavailable="EXECUTOR_UNAVAILABLE") from None
        return str(answer.revision_id)


class LinkedExecution:
    """See `services.router.ports.Execution`."""

    def __init__(self, request: LinkedRequest) -> None:
        self._request = request
        self.cancel, self.leave = request.cancel, request.leave

    async def next(self) -> list[ExecutorEvent]:
        return [_event(event) for event in await self._request.next()]


def _event(event: pb.ExecuteResponse.Event) -> ExecutorEvent:
    match event.WhichOneof("event"):
        case "started":
            started = event.started
            return ExecutorStarted(
                started.revision_id, started.base_id, started.load_ms, started.queue_ms, started.cached_token_count
            )
        case "tokens":
            tokens = event.tokens
            return ExecutorTokens(
                tokens.index,
                tuple(tokens.token_ids),
                tuple(tokens.logprobs),
                tokens.kernel_path,
                tokens.max_batch_adapter_count,
            )
        case "finished":
            finished = event.finished
            return ExecutorFinished(
                finished.index,
                "length" if finished.finish_reason == types_pb2.FINISH_REASON_LENGTH else "stop",
                _usage(finished.usage),
                finished.kernel_path,
                finished.max_batch_adapter_count,
                finished.stop_token_id if finished.HasField("stop_token_id") else None,
            )
        case _:
            raise LoraportError("INTERNAL", "the executor sent an empty event")


def _usage(usage: types_pb2.Usage) -> Usage:
    return Usage(usage.prompt_token_count, usage.completion_token_count, usage.cached_token_count)


def _state(state: pb.StateResponse) -> ExecutorState:
    revisions = tuple(Resident(r.revision_id, r.state, r.size_bytes, r.lease_count) for r in state.revisions)
    report = Notice(
        executor=state.executor,
        base_id=state.base_id,
        epoch=state.epoch,
        sequence=state.sequence,
        time_ms=0,
        queued_count=state.queued_count,
        running_count=state.running_count,
        pool_used_bytes=state.pool_used_bytes,
        pool_size_bytes=state.pool_size_bytes,
        revisions=revisions,
    )
    shape = Shape(state.max_rank, state.max_context_tokens, state.page_rank_count, state.page_size_bytes)
    totals = StepTotals(
        steps=state.totals.step_count,
        busy_ms=state.totals.busy_ms,
        prefill_tokens=state.totals.prefill_token_count,
        decode_rows=state.totals.decode_row_count,
        context_tokens=state.totals.context_token_count,
        adapter_mib=state.totals.adapter_read_bytes / 2**20,
    )
    return ExecutorState(state.base_id, state.state, shape, report, totals)
