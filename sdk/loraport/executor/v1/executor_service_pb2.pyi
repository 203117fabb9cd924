from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.rpc import status_pb2 as _status_pb2
from loraport.types.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExecuteRequest(_message.Message):
    __slots__ = ("ticket", "revision_id", "prompt_token_ids", "sampling", "priority", "request_id")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    revision_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    priority: int
    request_id: str
    def __init__(self, ticket: _Optional[bytes] = ..., revision_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("events",)
    class Event(_message.Message):
        __slots__ = ("started", "tokens", "finished")
        STARTED_FIELD_NUMBER: _ClassVar[int]
        TOKENS_FIELD_NUMBER: _ClassVar[int]
        FINISHED_FIELD_NUMBER: _ClassVar[int]
        started: ExecuteResponse.Started
        tokens: ExecuteResponse.Tokens
        finished: ExecuteResponse.Finished
        def __init__(self, started: _Optional[_Union[ExecuteResponse.Started, _Mapping]] = ..., tokens: _Optional[_Union[ExecuteResponse.Tokens, _Mapping]] = ..., finished: _Optional[_Union[ExecuteResponse.Finished, _Mapping]] = ...) -> None: ...
    class Started(_message.Message):
        __slots__ = ("revision_id", "base_id", "load_ms", "queue_ms", "cached_token_count")
        REVISION_ID_FIELD_NUMBER: _ClassVar[int]
        BASE_ID_FIELD_NUMBER: _ClassVar[int]
        LOAD_MS_FIELD_NUMBER: _ClassVar[int]
        QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
        CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
        revision_id: str
        base_id: str
        load_ms: float
        queue_ms: float
        cached_token_count: int
        def __init__(self, revision_id: _Optional[str] = ..., base_id: _Optional[str] = ..., load_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., cached_token_count: _Optional[int] = ...) -> None: ...
    class Tokens(_message.Message):
        __slots__ = ("index", "token_ids", "logprobs", "kernel_path", "max_batch_adapter_count")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        KERNEL_PATH_FIELD_NUMBER: _ClassVar[int]
        MAX_BATCH_ADAPTER_COUNT_FIELD_NUMBER: _ClassVar[int]
        index: int
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
        kernel_path: str
        max_batch_adapter_count: int
        def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ..., kernel_path: _Optional[str] = ..., max_batch_adapter_count: _Optional[int] = ...) -> None: ...
    class Finished(_message.Message):
        __slots__ = ("index", "finish_reason", "usage", "kernel_path", "max_batch_adapter_count", "stop_token_id")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
        USAGE_FIELD_NUMBER: _ClassVar[int]
        KERNEL_PATH_FIELD_NUMBER: _ClassVar[int]
        MAX_BATCH_ADAPTER_COUNT_FIELD_NUMBER: _ClassVar[int]
        STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
        index: int
        finish_reason: _types_pb2.FinishReason
        usage: _types_pb2.Usage
        kernel_path: str
        max_batch_adapter_count: int
        stop_token_id: int
        def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., kernel_path: _Optional[str] = ..., max_batch_adapter_count: _Optional[int] = ..., stop_token_id: _Optional[int] = ...) -> None: ...
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[ExecuteResponse.Event]
    def __init__(self, events: _Optional[_Iterable[_Union[ExecuteResponse.Event, _Mapping]]] = ...) -> None: ...

class ExecuteManyRequest(_message.Message):
    __slots__ = ("items",)
    class Item(_message.Message):
        __slots__ = ("key", "begin", "cancel", "hold")
        KEY_FIELD_NUMBER: _ClassVar[int]
        BEGIN_FIELD_NUMBER: _ClassVar[int]
        CANCEL_FIELD_NUMBER: _ClassVar[int]
        HOLD_FIELD_NUMBER: _ClassVar[int]
        key: int
        begin: ExecuteManyRequest.Begin
        cancel: _empty_pb2.Empty
        hold: bool
        def __init__(self, key: _Optional[int] = ..., begin: _Optional[_Union[ExecuteManyRequest.Begin, _Mapping]] = ..., cancel: _Optional[_Union[_empty_pb2.Empty, _Mapping]] = ..., hold: _Optional[bool] = ...) -> None: ...
    class Begin(_message.Message):
        __slots__ = ("request", "timeout_s", "traceparent")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
        TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
        request: ExecuteRequest
        timeout_s: float
        traceparent: str
        def __init__(self, request: _Optional[_Union[ExecuteRequest, _Mapping]] = ..., timeout_s: _Optional[float] = ..., traceparent: _Optional[str] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ExecuteManyRequest.Item]
    def __init__(self, items: _Optional[_Iterable[_Union[ExecuteManyRequest.Item, _Mapping]]] = ...) -> None: ...

class ExecuteManyResponse(_message.Message):
    __slots__ = ("parts", "ending")
    class Part(_message.Message):
        __slots__ = ("key", "events", "end")
        KEY_FIELD_NUMBER: _ClassVar[int]
        EVENTS_FIELD_NUMBER: _ClassVar[int]
        END_FIELD_NUMBER: _ClassVar[int]
        key: int
        events: _containers.RepeatedCompositeFieldContainer[ExecuteResponse.Event]
        end: _status_pb2.Status
        def __init__(self, key: _Optional[int] = ..., events: _Optional[_Iterable[_Union[ExecuteResponse.Event, _Mapping]]] = ..., end: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[ExecuteManyResponse.Part]
    ending: bool
    def __init__(self, parts: _Optional[_Iterable[_Union[ExecuteManyResponse.Part, _Mapping]]] = ..., ending: _Optional[bool] = ...) -> None: ...

class EnsureDeviceRequest(_message.Message):
    __slots__ = ("revision_id",)
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    def __init__(self, revision_id: _Optional[str] = ...) -> None: ...

class EnsureDeviceResponse(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: _types_pb2.StageReport
    def __init__(self, stage: _Optional[_Union[_types_pb2.StageReport, _Mapping]] = ...) -> None: ...

class PreloadRequest(_message.Message):
    __slots__ = ("ticket", "revision_id")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    revision_id: str
    def __init__(self, ticket: _Optional[bytes] = ..., revision_id: _Optional[str] = ...) -> None: ...

class PreloadResponse(_message.Message):
    __slots__ = ("revision_id", "load_ms", "pinned")
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    load_ms: float
    pinned: bool
    def __init__(self, revision_id: _Optional[str] = ..., load_ms: _Optional[float] = ..., pinned: _Optional[bool] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("revision_id",)
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    def __init__(self, revision_id: _Optional[str] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("evicted", "lease_count")
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    evicted: bool
    lease_count: int
    def __init__(self, evicted: _Optional[bool] = ..., lease_count: _Optional[int] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("ticket", "revision_id", "prompt_token_ids", "continuation_token_ids", "top_logprobs", "reference", "request_id")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    revision_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    continuation_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    reference: bool
    request_id: str
    def __init__(self, ticket: _Optional[bytes] = ..., revision_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., continuation_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ..., reference: _Optional[bool] = ..., request_id: _Optional[str] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("logprobs", "revision_id", "base_id", "load_ms", "kernel_path", "usage", "reference_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_PATH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
    revision_id: str
    base_id: str
    load_ms: float
    kernel_path: str
    usage: _types_pb2.Usage
    reference_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ..., revision_id: _Optional[str] = ..., base_id: _Optional[str] = ..., load_ms: _Optional[float] = ..., kernel_path: _Optional[str] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., reference_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StateResponse(_message.Message):
    __slots__ = ("executor", "base_id", "base_model", "epoch", "sequence", "state", "revisions", "queued_count", "running_count", "kv_used_block_count", "kv_block_count", "pool_used_bytes", "pool_size_bytes", "max_rank", "dtype", "max_context_tokens", "step_count", "kv_cached_block_count", "kv_revision_block_counts", "totals", "page_size_bytes", "page_rank_count", "load_count", "thrash_count", "mode", "merged_revision_id", "decoder", "checkpoint")
    class KvRevisionBlockCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_USED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    POOL_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_CACHED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_REVISION_BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_RANK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    THRASH_COUNT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MERGED_REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    DECODER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    executor: str
    base_id: str
    base_model: str
    epoch: int
    sequence: int
    state: str
    revisions: _containers.RepeatedCompositeFieldContainer[DeviceRevision]
    queued_count: int
    running_count: int
    kv_used_block_count: int
    kv_block_count: int
    pool_used_bytes: int
    pool_size_bytes: int
    max_rank: int
    dtype: str
    max_context_tokens: int
    step_count: int
    kv_cached_block_count: int
    kv_revision_block_counts: _containers.ScalarMap[str, int]
    totals: StepTotals
    page_size_bytes: int
    page_rank_count: int
    load_count: int
    thrash_count: int
    mode: str
    merged_revision_id: str
    decoder: str
    checkpoint: _types_pb2.SeenCheckpoint
    def __init__(self, executor: _Optional[str] = ..., base_id: _Optional[str] = ..., base_model: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., state: _Optional[str] = ..., revisions: _Optional[_Iterable[_Union[DeviceRevision, _Mapping]]] = ..., queued_count: _Optional[int] = ..., running_count: _Optional[int] = ..., kv_used_block_count: _Optional[int] = ..., kv_block_count: _Optional[int] = ..., pool_used_bytes: _Optional[int] = ..., pool_size_bytes: _Optional[int] = ..., max_rank: _Optional[int] = ..., dtype: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., step_count: _Optional[int] = ..., kv_cached_block_count: _Optional[int] = ..., kv_revision_block_counts: _Optional[_Mapping[str, int]] = ..., totals: _Optional[_Union[StepTotals, _Mapping]] = ..., page_size_bytes: _Optional[int] = ..., page_rank_count: _Optional[int] = ..., load_count: _Optional[int] = ..., thrash_count: _Optional[int] = ..., mode: _Optional[str] = ..., merged_revision_id: _Optional[str] = ..., decoder: _Optional[str] = ..., checkpoint: _Optional[_Union[_types_pb2.SeenCheckpoint, _Mapping]] = ...) -> None: ...

class StepTotals(_message.Message):
    __slots__ = ("step_count", "busy_ms", "prefill_token_count", "decode_row_count", "context_token_count", "adapter_read_bytes")
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    BUSY_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    step_count: int
    busy_ms: float
    prefill_token_count: int
    decode_row_count: int
    context_token_count: int
    adapter_read_bytes: int
    def __init__(self, step_count: _Optional[int] = ..., busy_ms: _Optional[float] = ..., prefill_token_count: _Optional[int] = ..., decode_row_count: _Optional[int] = ..., context_token_count: _Optional[int] = ..., adapter_read_bytes: _Optional[int] = ...) -> None: ...

class DeviceRevision(_message.Message):
    __slots__ = ("revision_id", "state", "size_bytes", "lease_count", "stages")
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    state: str
    size_bytes: int
    lease_count: int
    stages: _containers.RepeatedCompositeFieldContainer[_types_pb2.StageReport]
    def __init__(self, revision_id: _Optional[str] = ..., state: _Optional[str] = ..., size_bytes: _Optional[int] = ..., lease_count: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[_types_pb2.StageReport, _Mapping]]] = ...) -> None: ...

class SetModeRequest(_message.Message):
    __slots__ = ("revision_id",)
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    def __init__(self, revision_id: _Optional[str] = ...) -> None: ...

class SetModeResponse(_message.Message):
    __slots__ = ("mode", "revision_id")
    MODE_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    mode: str
    revision_id: str
    def __init__(self, mode: _Optional[str] = ..., revision_id: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("undrain", "at_once")
    UNDRAIN_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    undrain: bool
    at_once: bool
    def __init__(self, undrain: _Optional[bool] = ..., at_once: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running_count",)
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    running_count: int
    def __init__(self, running_count: _Optional[int] = ...) -> None: ...
