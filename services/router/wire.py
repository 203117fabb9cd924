"""Protobuf to the router's own values and back. No rules."""

from loraport.router.v1 import inference_service_pb2 as pb
from loraport.types.v1 import types_pb2
from services.router.catalog_view import AdapterSummary, Target
from services.router.door import Ask, ScoreAsk
from services.router.events import Event, Finished, Scored, Started, Tokens, Usage
from services.router.validate import Message, Prompt, Sampling
from services.shared import names

_REASONS = {"stop": types_pb2.FINISH_REASON_STOP, "length": types_pb2.FINISH_REASON_LENGTH}
_OPTIONAL = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
        "max_tokens", "min_tokens", "n", "logprobs",
    }
)  # fmt: skip


def ask_from_proto(request: pb.GenerateRequest, *, user: str = "") -> Ask:
    """Returns a Generate request of a user as values."""
    timeout = request.first_token_timeout
    return Ask(
        target=target_from_proto(request.target),
        prompt=prompt_from_proto(request),
        sampling=sampling_from_proto(request.sampling),
        session_id=request.session_id,
        user=user,
        priority=request.priority,
        first_token_timeout_s=timeout.ToNanoseconds() / 1e9 if request.HasField("first_token_timeout") else None,
    )


def target_from_proto(target: pb.Target) -> Target:
    """Returns which weights are meant; a selector that is set but empty stays a selector."""
    selector = target.WhichOneof("selector")
    return Target(
        adapter=target.adapter if selector == "adapter" else None,
        revision_id=target.revision_id if selector == "revision_id" else None,
        alias=target.alias,
        base_model=target.base_model,
    )


def prompt_from_proto(request: pb.GenerateRequest | pb.CountTokensRequest) -> Prompt:
    """Returns the input in its one form."""
    match request.WhichOneof("input"):
        case "prompt":
            return Prompt(text=request.prompt)
        case "messages":
            return Prompt(messages=tuple(Message(m.role, m.content) for m in request.messages.messages))
        case "prompt_token_ids" if isinstance(request, pb.GenerateRequest):
            return Prompt(token_ids=tuple(request.prompt_token_ids.ids))
        case _:
            return Prompt()


def sampling_from_proto(params: types_pb2.SamplingParams) -> Sampling:
    """Returns sampling parameters; unset fields are None."""
    return Sampling(
        **{field.name: value for field, value in params.ListFields() if field.name in _OPTIONAL},
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logit_bias=dict(params.logit_bias),
    )


def sampling_to_proto(sampling: Sampling) -> types_pb2.SamplingParams:
    """Returns what an executor is told; stop strings stay here."""
    return types_pb2.SamplingParams(
        **{name: value for name in _OPTIONAL if (value := getattr(sampling, name)) is not None},
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logit_bias=dict(sampling.logit_bias),
    )


def event_to_proto(event: Event) -> pb.GenerateResponse.Event:
    """Returns an event as the caller gets it."""
    match event:
        case Started():
            started = pb.GenerateResponse.Started(
                revision_id=event.revision_id,
                base_id=event.base_id,
                executor=event.executor,
                queue_ms=event.queue_ms,
                load_ms=event.load_ms,
                prompt_token_ids=event.prompt_token_ids,
                version=f"v{event.version}" if event.version else "",
                rollout_arm=event.rollout_arm,
            )
            return pb.GenerateResponse.Event(started=started)
        case Tokens():
            tokens = pb.GenerateResponse.Tokens(
                index=event.index, token_ids=event.token_ids, text=event.text, logprobs=event.logprobs
            )
            return pb.GenerateResponse.Event(tokens=tokens)
        case Finished():
            finished = pb.GenerateResponse.Finished(
                index=event.index,
                finish_reason=_REASONS[event.reason],
                usage=_usage(event.usage),
                kernel_path=event.kernel_path,
                max_batch_adapter_count=event.max_batch_adapter_count,
                stop_match=event.stop_match,
            )
            return pb.GenerateResponse.Event(finished=finished)


def score_ask_from_proto(request: pb.ScoreRequest) -> ScoreAsk:
    """Returns a Score request as values."""
    return ScoreAsk(
        target=target_from_proto(request.target),
        prompt_token_ids=tuple(request.prompt_token_ids.ids),
        continuation_token_ids=tuple(request.continuation_token_ids.ids),
        top_logprobs=request.top_logprobs,
    )


def scored_to_proto(scored: Scored) -> pb.ScoreResponse:
    """Returns a score as the caller gets it."""
    return pb.ScoreResponse(
        revision_id=scored.revision_id,
        logprobs=scored.logprobs,
        version=f"v{scored.version}" if scored.version else "",
        base_id=scored.base_id,
        executor=scored.executor,
        kernel_path=scored.kernel_path,
        usage=_usage(scored.usage),
        queue_ms=scored.queue_ms,
        load_ms=scored.load_ms,
    )


def _usage(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_token_count=usage.prompt_tokens,
        completion_token_count=usage.completion_tokens,
        cached_token_count=usage.cached_tokens,
    )


def adapter_to_proto(tenant: str, adapter: AdapterSummary) -> pb.Adapter:
    """Returns an adapter as its tenant sees it."""
    return pb.Adapter(
        name=str(names.AdapterName(tenant, adapter.adapter)),
        base_model=names.base_model_name(adapter.base_model),
        aliases=[
            pb.AliasTarget(alias=alias, revision_id=revision_id, version=version)
            for alias, revision_id, version in adapter.aliases
        ],
    )
