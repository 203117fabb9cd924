import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from loraport.types.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Adapter(_message.Message):
    __slots__ = ("name", "base_model", "aliases")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    name: str
    base_model: str
    aliases: _containers.RepeatedCompositeFieldContainer[AliasTarget]
    def __init__(self, name: _Optional[str] = ..., base_model: _Optional[str] = ..., aliases: _Optional[_Iterable[_Union[AliasTarget, _Mapping]]] = ...) -> None: ...

class AliasTarget(_message.Message):
    __slots__ = ("alias", "revision_id", "version")
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    alias: str
    revision_id: str
    version: int
    def __init__(self, alias: _Optional[str] = ..., revision_id: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("adapter", "revision_id", "alias", "base_model")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    revision_id: str
    alias: str
    base_model: str
    def __init__(self, adapter: _Optional[str] = ..., revision_id: _Optional[str] = ..., alias: _Optional[str] = ..., base_model: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("target", "prompt", "messages", "prompt_token_ids", "sampling", "session_id", "priority", "first_token_timeout")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    target: Target
    prompt: str
    messages: ChatMessages
    prompt_token_ids: TokenIds
    sampling: _types_pb2.SamplingParams
    session_id: str
    priority: int
    first_token_timeout: _duration_pb2.Duration
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., prompt: _Optional[str] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., prompt_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., session_id: _Optional[str] = ..., priority: _Optional[int] = ..., first_token_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("events",)
    class Event(_message.Message):
        __slots__ = ("started", "tokens", "finished")
        STARTED_FIELD_NUMBER: _ClassVar[int]
        TOKENS_FIELD_NUMBER: _ClassVar[int]
        FINISHED_FIELD_NUMBER: _ClassVar[int]
        started: GenerateResponse.Started
        tokens: GenerateResponse.Tokens
        finished: GenerateResponse.Finished
        def __init__(self, started: _Optional[_Union[GenerateResponse.Started, _Mapping]] = ..., tokens: _Optional[_Union[GenerateResponse.Tokens, _Mapping]] = ..., finished: _Optional[_Union[GenerateResponse.Finished, _Mapping]] = ...) -> None: ...
    class Started(_message.Message):
        __slots__ = ("revision_id", "base_id", "executor", "queue_ms", "load_ms", "prompt_token_ids", "version", "rollout_arm")
        REVISION_ID_FIELD_NUMBER: _ClassVar[int]
        BASE_ID_FIELD_NUMBER: _ClassVar[int]
        EXECUTOR_FIELD_NUMBER: _ClassVar[int]
        QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
        LOAD_MS_FIELD_NUMBER: _ClassVar[int]
        PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        ROLLOUT_ARM_FIELD_NUMBER: _ClassVar[int]
        revision_id: str
        base_id: str
        executor: str
        queue_ms: float
        load_ms: float
        prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
        version: str
        rollout_arm: str
        def __init__(self, revision_id: _Optional[str] = ..., base_id: _Optional[str] = ..., executor: _Optional[str] = ..., queue_ms: _Optional[float] = ..., load_ms: _Optional[float] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., version: _Optional[str] = ..., rollout_arm: _Optional[str] = ...) -> None: ...
    class Tokens(_message.Message):
        __slots__ = ("index", "token_ids", "text", "logprobs")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        index: int
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        text: str
        logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
        def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...
    class Finished(_message.Message):
        __slots__ = ("index", "finish_reason", "usage", "kernel_path", "max_batch_adapter_count", "stop_match")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
        USAGE_FIELD_NUMBER: _ClassVar[int]
        KERNEL_PATH_FIELD_NUMBER: _ClassVar[int]
        MAX_BATCH_ADAPTER_COUNT_FIELD_NUMBER: _ClassVar[int]
        STOP_MATCH_FIELD_NUMBER: _ClassVar[int]
        index: int
        finish_reason: _types_pb2.FinishReason
        usage: _types_pb2.Usage
        kernel_path: str
        max_batch_adapter_count: int
        stop_match: str
        def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., kernel_path: _Optional[str] = ..., max_batch_adapter_count: _Optional[int] = ..., stop_match: _Optional[str] = ...) -> None: ...
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[GenerateResponse.Event]
    def __init__(self, events: _Optional[_Iterable[_Union[GenerateResponse.Event, _Mapping]]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("target", "prompt_token_ids", "continuation_token_ids", "top_logprobs")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    target: Target
    prompt_token_ids: TokenIds
    continuation_token_ids: TokenIds
    top_logprobs: int
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., prompt_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., continuation_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("revision_id", "logprobs", "version", "base_id", "executor", "kernel_path", "usage", "queue_ms", "load_ms")
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    KERNEL_PATH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
    version: str
    base_id: str
    executor: str
    kernel_path: str
    usage: _types_pb2.Usage
    queue_ms: float
    load_ms: float
    def __init__(self, revision_id: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ..., version: _Optional[str] = ..., base_id: _Optional[str] = ..., executor: _Optional[str] = ..., kernel_path: _Optional[str] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., queue_ms: _Optional[float] = ..., load_ms: _Optional[float] = ...) -> None: ...

class CountTokensRequest(_message.Message):
    __slots__ = ("target", "prompt", "messages")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    target: Target
    prompt: str
    messages: ChatMessages
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., prompt: _Optional[str] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ...) -> None: ...

class CountTokensResponse(_message.Message):
    __slots__ = ("token_count", "token_ids")
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_count: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_count: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "next_page_token")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    next_page_token: str
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReportOutcomeRequest(_message.Message):
    __slots__ = ("request_id", "outcome")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[ReportOutcomeRequest.Outcome]
        OUTCOME_ACCEPTED: _ClassVar[ReportOutcomeRequest.Outcome]
        OUTCOME_REJECTED: _ClassVar[ReportOutcomeRequest.Outcome]
    OUTCOME_UNSPECIFIED: ReportOutcomeRequest.Outcome
    OUTCOME_ACCEPTED: ReportOutcomeRequest.Outcome
    OUTCOME_REJECTED: ReportOutcomeRequest.Outcome
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outcome: ReportOutcomeRequest.Outcome
    def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[_Union[ReportOutcomeRequest.Outcome, str]] = ...) -> None: ...

class ReportOutcomeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
