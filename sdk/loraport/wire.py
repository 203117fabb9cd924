"""What both clients share: arguments to requests, responses to values, and how to reach a router."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import grpc

from loraport.bundle.manifest import is_name
from loraport.dev.layout import Layout, StackError, default_data, read_endpoints
from loraport.errors import InvalidArgumentError, UnauthenticatedError, UnavailableError
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.types.v1 import types_pb2
from loraport.values import (
    Adapter,
    AliasTarget,
    Event,
    Finished,
    FinishReason,
    PositionLogprobs,
    Score,
    Started,
    TokenCount,
    TokenLogprob,
    Tokens,
    Usage,
)

DEFAULT_TIMEOUT_S = 60.0
PAGE_SIZE = 500
REQUEST_ID_KEY = "x-request-id"
_REASONS: Mapping[int, FinishReason] = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}

T = TypeVar("T")
# An access token, or what gives one that is valid now: it is asked before every call, so it keeps one while it lasts.
Token = str | Callable[[], str]


class TargetOptions(TypedDict, total=False):
    """Which weights: an adapter (through `alias`, default `prod`), or exactly one revision, or a base model."""

    adapter: str | None
    alias: str | None
    revision_id: str | None
    base_model: str | None


class PromptOptions(TargetOptions, total=False):
    """The prompt where it is not plain text. `messages` are mappings with `role` and `content`."""

    messages: Sequence[Mapping[str, str]] | None


class GenerateOptions(PromptOptions, total=False):
    """Everything else of a generation; what is left out takes the router's default.

    `timeout` (seconds) replaces the client's; `first_token_timeout` (seconds) gives up earlier, while no token came.
    """

    prompt_token_ids: Sequence[int] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool
    n: int | None
    logprobs: int | None
    logit_bias: Mapping[int, float] | None
    session_id: str
    priority: int
    first_token_timeout: float | None
    timeout: float | None


class ScoreOptions(TargetOptions, total=False):
    """Which weights score, how many alternatives to report with each token, and the call's own timeout in seconds."""

    top_logprobs: int
    timeout: float | None


_SAMPLING = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach a router. `ca_certificate`: PEM, None for the system's own; `timeout`, `patience`: seconds."""

    endpoint: str
    credential: str | Callable[[], str]
    ca_certificate: bytes | None
    timeout: float | None
    tenant: str | None
    patience: float = 0.0

    def __repr__(self) -> str:
        return f"Settings({self.endpoint!r})"

    def metadata(self, request_id: str) -> tuple[tuple[str, str], ...]:
        """Returns what goes along with every call. Raises UnauthenticatedError."""
        secret = self.credential if isinstance(self.credential, str) else _checked(self.credential())
        return (("authorization", f"Bearer {secret}"), (REQUEST_ID_KEY, request_id))

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns TLS credentials."""
        return grpc.ssl_channel_credentials(self.ca_certificate)

    def options(self) -> list[tuple[str, int]]:
        """Returns channel options. A proxy of the environment is never asked for this machine's own addresses."""
        own = self.endpoint.rsplit(":", 1)[0] in ("127.0.0.1", "localhost", "[::1]")
        return [
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.ping_timeout_ms", 10_000),
            ("grpc.max_receive_message_length", 16 << 20),
            ("grpc.enable_retries", 0),
            # A router that comes back is found again soon.
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            ("grpc.enable_http_proxy", 0 if own else 1),
            ("grpc.use_local_subchannel_pool", 1),
        ]

    def adapter_name(self, adapter: str) -> str:
        """Returns the resource name of an adapter given by name, or by id where the tenant is known.

        Raises:
            InvalidArgumentError: it is an id and the tenant is not known.
        """
        if "/" in adapter:
            return adapter
        if self.tenant is None:
            raise InvalidArgumentError("give the full name, tenants/{tenant}/adapters/{adapter}", reason="INVALID_NAME")
        return f"tenants/{self.tenant}/adapters/{adapter}"


def make_settings(
    endpoint: str,
    *,
    api_key: str | None,
    token: Token | None = None,
    ca_certificate: str | Path | None,
    timeout: float | None,
    tenant: str | None,
    patience: float = 0.0,
) -> Settings:
    """Returns checked settings; `ca_certificate` is the path of a PEM file.

    Raises:
        InvalidArgumentError: the endpoint or the certificate file cannot be used.
        UnauthenticatedError: there is not exactly one credential, or it cannot be one.
    """
    if ":" not in endpoint or "://" in endpoint:
        raise InvalidArgumentError(f"the endpoint must look like host:port, not {endpoint!r}", reason="INVALID_REQUEST")
    if (api_key is None) == (token is None):
        raise UnauthenticatedError("give an api_key or a token, one of the two", reason="INVALID_CREDENTIAL")
    credential = api_key if api_key is not None else token
    assert credential is not None
    if isinstance(credential, str):
        credential = _checked(credential)
    pem = None
    if ca_certificate is not None:
        try:
            pem = Path(ca_certificate).read_bytes()
        except OSError as error:
            raise InvalidArgumentError(
                f"cannot read the CA certificate {ca_certificate}: {error.strerror}", reason="INVALID_REQUEST"
            ) from None
    return Settings(endpoint, credential, pem, timeout, tenant, patience)


def _read_token(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        raise UnauthenticatedError(f"there is no token in {path}", reason="INVALID_CREDENTIAL") from None


def _checked(secret: str) -> str:
    secret = secret.strip()
    if not secret or not secret.isascii() or not secret.isprintable():
        raise UnauthenticatedError("this is not an API key and no token", reason="INVALID_CREDENTIAL")
    return secret


def local_settings(
    data_dir: str | Path | None,
    *,
    tenant: str,
    token_file: str | Path | None = None,
    timeout: float | None,
    patience: float = 0.0,
) -> Settings:
    """Returns settings for the local stack at `data_dir`, with the key that the CLI made for `tenant`, or a token.

    Raises:
        UnavailableError: there is no stack there.
        UnauthenticatedError: there is no key of the tenant there.
    """
    data_dir = default_data() if data_dir is None else data_dir
    try:
        endpoints = read_endpoints(data_dir)
        endpoint, certificate = endpoints["router"], endpoints["credentials"]["ca"]
    except (StackError, KeyError) as error:
        raise UnavailableError(str(error), reason="NO_LOCAL_STACK") from None
    if not is_name(tenant):
        raise UnauthenticatedError(f"{tenant!r:.80} is no tenant's id", reason="NO_API_KEY")
    make = partial(
        make_settings, endpoint, ca_certificate=certificate, timeout=timeout, tenant=tenant, patience=patience
    )
    if token_file is not None:
        file = Path(token_file)
        return make(api_key=None, token=lambda: _read_token(file))
    path = Layout.at(data_dir).api_key(tenant)
    try:
        key = path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        raise UnauthenticatedError(
            f"no API key of tenant {tenant} at {path}; make one with: loraport key create {tenant}", reason="NO_API_KEY"
        ) from None
    return make(api_key=key)


def new_request_id() -> str:
    """Returns an id under which the services log a call."""
    return uuid.uuid4().hex


def generate_request(prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    """Returns the request that the arguments mean.

    Raises:
        InvalidArgumentError: the arguments contradict each other or have the wrong type.
    """
    known: dict[str, Any] = dict(options)
    try:
        request = pb.GenerateRequest(
            target=_target(known),
            session_id=known.pop("session_id", ""),
            priority=known.pop("priority", 0),
        )
        _set_input(request, prompt, known.pop("messages", None), known.pop("prompt_token_ids", None))
        timeout = known.pop("first_token_timeout", None)
        if timeout is not None:
            request.first_token_timeout.FromNanoseconds(int(timeout * 1e9))
        request.sampling.CopyFrom(_sampling(known))
    except (TypeError, ValueError, OverflowError, KeyError) as error:
        raise _wrong(f"an argument has the wrong type or range: {error}") from None
    return request


def count_request(prompt: str | None, options: PromptOptions) -> pb.CountTokensRequest:
    """Returns the request that the arguments mean. Raises as `generate_request`."""
    known: dict[str, Any] = dict(options)
    try:
        request = pb.CountTokensRequest(target=_target(known))
        _set_input(request, prompt, known.pop("messages", None), None)
    except (TypeError, ValueError, KeyError) as error:
        raise _wrong(f"an argument has the wrong type or range: {error}") from None
    _refuse_unknown(known)
    return request


def score_request(prompt: Sequence[int], continuation: Sequence[int], options: ScoreOptions) -> pb.ScoreRequest:
    """Returns the request that the arguments mean. Raises as `generate_request`."""
    known: dict[str, Any] = dict(options)
    try:
        request = pb.ScoreRequest(
            target=_target(known),
            prompt_token_ids=pb.TokenIds(ids=prompt),
            continuation_token_ids=pb.TokenIds(ids=continuation),
            top_logprobs=known.pop("top_logprobs", 0),
        )
    except (TypeError, ValueError) as error:
        raise _wrong(f"an argument has the wrong type or range: {error}") from None
    _refuse_unknown(known)
    return request


def _wrong(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(" ".join(message.split()), reason="INVALID_REQUEST")


def _refuse_unknown(rest: Mapping[str, Any]) -> None:
    if rest:
        raise _wrong(f"unknown argument {min(rest)}")


def _target(options: dict[str, Any]) -> pb.Target:
    """Takes the target's options out of `options`."""
    given = {name: options.pop(name, None) for name in ("adapter", "alias", "revision_id", "base_model")}
    if given["adapter"] is not None and given["revision_id"] is not None:
        raise _wrong("give an adapter or a revision_id, not both")
    return pb.Target(**{name: value for name, value in given.items() if value is not None})


def _set_input(request: Any, prompt: str | None, messages: Any, token_ids: Any) -> None:
    if [prompt, messages, token_ids].count(None) != 2:
        raise _wrong("give exactly one of prompt, messages and prompt_token_ids")
    if prompt is not None:
        request.prompt = prompt
    elif messages is not None:
        turns = [pb.ChatMessage(role=turn["role"], content=turn["content"]) for turn in messages]
        request.messages.CopyFrom(pb.ChatMessages(messages=turns))
    else:
        request.prompt_token_ids.CopyFrom(pb.TokenIds(ids=token_ids))


def _sampling(options: dict[str, Any]) -> types_pb2.SamplingParams:
    _refuse_unknown({name: value for name, value in options.items() if name not in _SAMPLING})
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return types_pb2.SamplingParams(**given)


def events_from_proto(response: pb.GenerateResponse, request_id: str) -> list[Event]:
    """Returns the events of a response, without those of a kind that this release does not know."""
    return [told for event in response.events if (told := _event(event, request_id)) is not None]


def _event(event: pb.GenerateResponse.Event, request_id: str) -> Event | None:
    match event.WhichOneof("event"):
        case "started":
            started = event.started
            return Started(
                revision_id=started.revision_id,
                version=started.version,
                base_id=started.base_id,
                executor=started.executor,
                queue_ms=started.queue_ms,
                load_ms=started.load_ms,
                prompt_token_ids=tuple(started.prompt_token_ids),
                rollout_arm=started.rollout_arm,
                request_id=request_id,
            )
        case "tokens":
            tokens = event.tokens
            logprobs = tuple(map(_position, tokens.logprobs))
            return Tokens(index=tokens.index, token_ids=tuple(tokens.token_ids), text=tokens.text, logprobs=logprobs)
        case "finished":
            finished = event.finished
            return Finished(
                index=finished.index,
                finish_reason=_REASONS.get(finished.finish_reason, "unknown"),
                usage=_usage(finished.usage),
                kernel_path=finished.kernel_path,
                max_batch_adapter_count=finished.max_batch_adapter_count,
                stop_match=finished.stop_match,
            )
        case _:
            return None


def _usage(usage: types_pb2.Usage) -> Usage:
    return Usage(usage.prompt_token_count, usage.completion_token_count, usage.cached_token_count)


def _position(position: types_pb2.PositionLogprobs) -> PositionLogprobs:
    top = tuple(TokenLogprob(entry.token_id, entry.logprob) for entry in position.top)
    return PositionLogprobs(TokenLogprob(position.chosen.token_id, position.chosen.logprob), top)


def adapter_from_proto(adapter: pb.Adapter) -> Adapter:
    """Returns an adapter as a value."""
    aliases = tuple(AliasTarget(alias.alias, alias.revision_id, alias.version) for alias in adapter.aliases)
    return Adapter(adapter.name, adapter.base_model, aliases)


def count_from_proto(response: pb.CountTokensResponse) -> TokenCount:
    """Returns a token count as a value."""
    return TokenCount(response.token_count, tuple(response.token_ids))


def score_from_proto(response: pb.ScoreResponse) -> Score:
    """Returns a score as a value."""
    return Score(
        logprobs=tuple(map(_position, response.logprobs)),
        revision_id=response.revision_id,
        version=response.version,
        base_id=response.base_id,
        executor=response.executor,
        kernel_path=response.kernel_path,
        usage=_usage(response.usage),
        queue_ms=response.queue_ms,
        load_ms=response.load_ms,
    )
