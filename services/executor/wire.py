"""Protocol buffers to the engine's values and back. No rules beyond the contract's defaults and ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loraport.executor.v1 import executor_service_pb2 as pb
from loraport.types.v1 import types_pb2
from services.executor.adapter_pool import Residency
from services.executor.ports import Stage
from services.executor.request import (
    Ended,
    FinishReason,
    Logprob,
    RefusalReason,
    Refused,
    RequestSpec,
    Sampling,
    Score,
    Started,
    Tokens,
    Usage,
)
from services.executor.step_meter import StepTotals
from services.shared.errors import LoraportError
from services.shared.sampling import DEFAULT_MAX_TOKENS, MAX_ANSWERS, MAX_STOP_IDS

MAX_PRIORITY = 10
_MASK_63 = (1 << 63) - 1

_REFUSALS = {
    RefusalReason.PROMPT_TOO_LONG: "PROMPT_TOO_LONG",
    RefusalReason.MAX_TOKENS_TOO_LARGE: "PROMPT_TOO_LONG",
    RefusalReason.DUPLICATE_REQUEST: "REQUEST_EXISTS",
    RefusalReason.QUEUE_FULL: "OVERLOADED",
    RefusalReason.ADAPTER_POOL_FULL: "OVERLOADED",
    RefusalReason.NOT_RESIDENT: "OVERLOADED",
    RefusalReason.DRAINING: "DRAINING",
    RefusalReason.ADAPTER_TOO_LARGE: "POOL_TOO_SMALL",
    RefusalReason.ADAPTER_UNSUPPORTED: "ADAPTER_UNUSABLE",
    RefusalReason.ADAPTER_NOT_FINITE: "ADAPTER_UNUSABLE",
    RefusalReason.BYTES_DIGEST_MISMATCH: "DIGEST_MISMATCH",
    RefusalReason.BYTES_MALFORMED: "DIGEST_MISMATCH",
    RefusalReason.REVOKED: "REVISION_NOT_ACTIVE",
    RefusalReason.MERGED_MODE: "MERGED_MODE",
    RefusalReason.SHARED_EXECUTOR: "SHARED_EXECUTOR",
}
_FAILURES = {
    FinishReason.DEADLINE: "DEADLINE_EXCEEDED",
    FinishReason.REVOKED: "REVISION_NOT_ACTIVE",
    FinishReason.DRAINING: "DRAINING",
    FinishReason.NON_FINITE_LOGITS: "NON_FINITE_LOGITS",
}
_TIERS = {"": types_pb2.TIER_UNSPECIFIED, "STORE": types_pb2.TIER_STORE, "DISK": types_pb2.TIER_DISK}
_STAGES: dict[str, Any] = {name.removeprefix("LOAD_STAGE_"): value for name, value in types_pb2.LoadStage.items()}
_RETRY = frozenset({"OVERLOADED", "DRAINING"})


def refusal(error: Refused) -> LoraportError:
    """Return what a refusal of the engine is at the door."""
    reason = _REFUSALS.get(error.reason, "INVALID_REQUEST")
    return LoraportError(reason, error.detail, retry_after_s=1.0 if reason in _RETRY else None)


def failure(reason: FinishReason) -> LoraportError:
    """Return the status of a request that ended without an answer."""
    name = _FAILURES.get(reason, "INTERNAL")
    return LoraportError(name, retry_after_s=1.0 if name in _RETRY else None)


def specs_from_proto(
    request: pb.ExecuteRequest,
    *,
    request_id: str,
    salt: bytes,
    max_length: int,
    deadline: float | None,
    make_seed: Callable[[], int],
) -> list[RequestSpec]:
    """Return one spec per answer asked for; `make_seed` gives a seed where the request has none.

    Raises:
        LoraportError: INVALID_REQUEST for a field out of range that the engine does not check itself.
    """
    params = request.sampling
    count = params.n if params.HasField("n") else 1
    faults = (
        (not 1 <= count <= MAX_ANSWERS, "sampling.n", f"n is in [1, {MAX_ANSWERS}]"),
        (abs(request.priority) > MAX_PRIORITY, "priority", f"priority is in [-{MAX_PRIORITY}, {MAX_PRIORITY}]"),
        (len(params.stop_token_ids) > MAX_STOP_IDS, "sampling.stop_token_ids", f"at most {MAX_STOP_IDS} stop ids"),
        (params.seed < 0, "sampling.seed", "seed is not negative"),
    )
    for wrong, subject, detail in faults:
        if wrong:
            raise LoraportError("INVALID_REQUEST", detail, subject=subject)
    prompt = tuple(request.prompt_token_ids)
    seed = params.seed if params.HasField("seed") else make_seed()
    left = max(1, max_length - len(prompt))
    return [
        RequestSpec(
            request_id=f"{request_id}/{index}",
            prompt=prompt,
            sampling=_sampling(params, seed=(seed + index) & _MASK_63, left=left),
            revision_id=request.revision_id or None,
            salt=salt,
            priority=request.priority,
            deadline=deadline,
        )
        for index in range(count)
    ]


def score_from_proto(
    request: pb.ProbeRequest, *, request_id: str, salt: bytes, owner: bytes, deadline: float | None
) -> RequestSpec:
    """Return the spec of a score; the engine checks it."""
    return RequestSpec(
        request_id=request_id,
        prompt=tuple(request.prompt_token_ids),
        sampling=Sampling(),
        revision_id=request.revision_id or None,
        salt=salt,
        owner=owner,
        deadline=deadline,
        score=Score(tuple(request.continuation_token_ids), request.top_logprobs),
    )


def _sampling(params: types_pb2.SamplingParams, *, seed: int, left: int) -> Sampling:
    return Sampling(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else min(DEFAULT_MAX_TOKENS, left),
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=seed,
        stop_token_ids=tuple(params.stop_token_ids),
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        logit_bias=tuple(sorted(params.logit_bias.items())),
    )


def started_to_proto(event: Started, revision_id: str, base_id: str, *, load_ms: float) -> pb.ExecuteResponse.Event:
    """Return the beginning of a request of which all weights are named."""
    return pb.ExecuteResponse.Event(
        started=pb.ExecuteResponse.Started(
            revision_id=revision_id,
            base_id=base_id,
            load_ms=load_ms,
            queue_ms=event.queue_s * 1000,
            cached_token_count=event.prefix_hit_tokens,
        )
    )


def tokens_to_proto(index: int, event: Tokens) -> pb.ExecuteResponse.Event:
    """Return new tokens of answer `index`."""
    logprobs = logprobs_to_proto(event)
    return pb.ExecuteResponse.Event(
        tokens=pb.ExecuteResponse.Tokens(
            index=index,
            token_ids=event.token_ids,
            logprobs=logprobs,
            kernel_path=event.kernel_path,
            max_batch_adapter_count=event.distinct_adapters,
        )
    )


def logprobs_to_proto(event: Tokens) -> list[types_pb2.PositionLogprobs]:
    """Return one entry per token, none where no log-probabilities were asked for."""
    return [_logprob(token, value) for token, value in zip(event.token_ids, event.logprobs, strict=False)]


def _usage(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_token_count=usage.prompt_tokens,
        completion_token_count=usage.output_tokens,
        cached_token_count=usage.prefix_hit_tokens,
    )


def finished_to_proto(index: int, event: Ended) -> pb.ExecuteResponse.Event:
    """Return the end of answer `index`, which is an answer."""
    length = event.reason is FinishReason.LENGTH
    finished = pb.ExecuteResponse.Finished(
        index=index,
        finish_reason=types_pb2.FINISH_REASON_LENGTH if length else types_pb2.FINISH_REASON_STOP,
        usage=_usage(event.usage),
        kernel_path=event.kernel_path,
        max_batch_adapter_count=event.distinct_adapters,
    )
    if event.stop_token_id is not None:
        finished.stop_token_id = event.stop_token_id
    return pb.ExecuteResponse.Event(finished=finished)


def scored_to_proto(
    logprobs: list[types_pb2.PositionLogprobs],
    event: Ended,
    *,
    revision_id: str,
    base_id: str,
    load_ms: float,
    reference: Sequence[float] = (),
) -> pb.ProbeResponse:
    """Return a whole score."""
    return pb.ProbeResponse(
        logprobs=logprobs,
        revision_id=revision_id,
        base_id=base_id,
        load_ms=load_ms,
        kernel_path=event.kernel_path,
        usage=_usage(event.usage),
        reference_logprobs=reference,
    )


def _logprob(token: int, value: Logprob) -> types_pb2.PositionLogprobs:
    return types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(token_id=token, logprob=value.chosen),
        top=[types_pb2.TokenLogprob(token_id=t, logprob=p) for t, p in value.top],
    )


def totals_to_proto(totals: StepTotals) -> pb.StepTotals:
    """Return what the steps took and computed."""
    return pb.StepTotals(
        step_count=totals.steps,
        busy_ms=totals.busy_ms,
        prefill_token_count=totals.prefill_tokens,
        decode_row_count=totals.decode_rows,
        context_token_count=totals.context_tokens,
        adapter_read_bytes=totals.adapter_bytes,
    )


def resident_to_proto(resident: Residency, stages: Sequence[Stage]) -> pb.DeviceRevision:
    """Return a revision on the device, with the stages of its load."""
    return pb.DeviceRevision(
        revision_id=resident.revision_id,
        state=resident.state.name,
        size_bytes=resident.size_bytes,
        lease_count=resident.leases,
        stages=map(stage_to_proto, stages),
    )


def stage_to_proto(stage: Stage) -> types_pb2.StageReport:
    """Return a stage report."""
    return types_pb2.StageReport(
        stage=_STAGES[stage.name],
        elapsed_ms=stage.elapsed_ms,
        size_bytes=stage.size_bytes,
        tier=_TIERS[stage.tier],
    )
