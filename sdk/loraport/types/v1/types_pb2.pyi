from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class LoadStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_STAGE_UNSPECIFIED: _ClassVar[LoadStage]
    LOAD_STAGE_RESOLVE: _ClassVar[LoadStage]
    LOAD_STAGE_FETCH: _ClassVar[LoadStage]
    LOAD_STAGE_VERIFY: _ClassVar[LoadStage]
    LOAD_STAGE_PROMOTE: _ClassVar[LoadStage]
    LOAD_STAGE_STAGE_HOST: _ClassVar[LoadStage]
    LOAD_STAGE_RESERVE: _ClassVar[LoadStage]
    LOAD_STAGE_TRANSFER: _ClassVar[LoadStage]
    LOAD_STAGE_INIT: _ClassVar[LoadStage]
    LOAD_STAGE_WARM: _ClassVar[LoadStage]
    LOAD_STAGE_READY: _ClassVar[LoadStage]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_STORE: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
LOAD_STAGE_UNSPECIFIED: LoadStage
LOAD_STAGE_RESOLVE: LoadStage
LOAD_STAGE_FETCH: LoadStage
LOAD_STAGE_VERIFY: LoadStage
LOAD_STAGE_PROMOTE: LoadStage
LOAD_STAGE_STAGE_HOST: LoadStage
LOAD_STAGE_RESERVE: LoadStage
LOAD_STAGE_TRANSFER: LoadStage
LOAD_STAGE_INIT: LoadStage
LOAD_STAGE_WARM: LoadStage
LOAD_STAGE_READY: LoadStage
TIER_UNSPECIFIED: Tier
TIER_STORE: Tier
TIER_DISK: Tier
TIER_HOST: Tier
TIER_DEVICE: Tier

class Violation(_message.Message):
    __slots__ = ("code", "detail", "subject")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    code: str
    detail: str
    subject: str
    def __init__(self, code: _Optional[str] = ..., detail: _Optional[str] = ..., subject: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "max_tokens", "min_tokens", "ignore_eos", "n", "logprobs", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    n: int
    logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_token_count", "completion_token_count", "cached_token_count")
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    prompt_token_count: int
    completion_token_count: int
    cached_token_count: int
    def __init__(self, prompt_token_count: _Optional[int] = ..., completion_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ...) -> None: ...

class StageReport(_message.Message):
    __slots__ = ("stage", "elapsed_ms", "size_bytes", "tier")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    stage: LoadStage
    elapsed_ms: float
    size_bytes: int
    tier: Tier
    def __init__(self, stage: _Optional[_Union[LoadStage, str]] = ..., elapsed_ms: _Optional[float] = ..., size_bytes: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class SeenCheckpoint(_message.Message):
    __slots__ = ("tree_size", "root_hash", "envelope")
    TREE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROOT_HASH_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    tree_size: int
    root_hash: str
    envelope: bytes
    def __init__(self, tree_size: _Optional[int] = ..., root_hash: _Optional[str] = ..., envelope: _Optional[bytes] = ...) -> None: ...
