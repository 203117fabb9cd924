import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rollout(_message.Message):
    __slots__ = ("name", "alias", "from_revision_id", "to_revision_id", "state", "share_percent", "step_percents", "min_sample_count", "min_step_duration", "story", "etag", "create_time", "step_index", "hold_reason", "quorum_count", "golden_prompts", "eval_prompts", "shadow_percent", "gates", "retention_duration", "executors", "arms", "comparisons", "verdict", "plan", "update_time", "step_time")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Rollout.State]
        STATE_PRELOADING: _ClassVar[Rollout.State]
        STATE_PROBING: _ClassVar[Rollout.State]
        STATE_SPLITTING: _ClassVar[Rollout.State]
        STATE_PAUSED: _ClassVar[Rollout.State]
        STATE_RETAINING: _ClassVar[Rollout.State]
        STATE_SUCCEEDED: _ClassVar[Rollout.State]
        STATE_ROLLED_BACK: _ClassVar[Rollout.State]
        STATE_ABORTED: _ClassVar[Rollout.State]
        STATE_SHADOWING: _ClassVar[Rollout.State]
    STATE_UNSPECIFIED: Rollout.State
    STATE_PRELOADING: Rollout.State
    STATE_PROBING: Rollout.State
    STATE_SPLITTING: Rollout.State
    STATE_PAUSED: Rollout.State
    STATE_RETAINING: Rollout.State
    STATE_SUCCEEDED: Rollout.State
    STATE_ROLLED_BACK: Rollout.State
    STATE_ABORTED: Rollout.State
    STATE_SHADOWING: Rollout.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    FROM_REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    TO_REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SHARE_PERCENT_FIELD_NUMBER: _ClassVar[int]
    STEP_PERCENTS_FIELD_NUMBER: _ClassVar[int]
    MIN_SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MIN_STEP_DURATION_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    HOLD_REASON_FIELD_NUMBER: _ClassVar[int]
    QUORUM_COUNT_FIELD_NUMBER: _ClassVar[int]
    GOLDEN_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    EVAL_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_PERCENT_FIELD_NUMBER: _ClassVar[int]
    GATES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_DURATION_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    COMPARISONS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    alias: str
    from_revision_id: str
    to_revision_id: str
    state: Rollout.State
    share_percent: float
    step_percents: _containers.RepeatedScalarFieldContainer[float]
    min_sample_count: int
    min_step_duration: _duration_pb2.Duration
    story: _containers.RepeatedCompositeFieldContainer[StoryLine]
    etag: str
    create_time: _timestamp_pb2.Timestamp
    step_index: int
    hold_reason: str
    quorum_count: int
    golden_prompts: _containers.RepeatedCompositeFieldContainer[RolloutPrompt]
    eval_prompts: _containers.RepeatedCompositeFieldContainer[RolloutPrompt]
    shadow_percent: float
    gates: RolloutGates
    retention_duration: _duration_pb2.Duration
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorStatus]
    arms: _containers.RepeatedCompositeFieldContainer[ArmStatistics]
    comparisons: _containers.RepeatedCompositeFieldContainer[Comparison]
    verdict: str
    plan: _containers.RepeatedScalarFieldContainer[str]
    update_time: _timestamp_pb2.Timestamp
    step_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., alias: _Optional[str] = ..., from_revision_id: _Optional[str] = ..., to_revision_id: _Optional[str] = ..., state: _Optional[_Union[Rollout.State, str]] = ..., share_percent: _Optional[float] = ..., step_percents: _Optional[_Iterable[float]] = ..., min_sample_count: _Optional[int] = ..., min_step_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., story: _Optional[_Iterable[_Union[StoryLine, _Mapping]]] = ..., etag: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., step_index: _Optional[int] = ..., hold_reason: _Optional[str] = ..., quorum_count: _Optional[int] = ..., golden_prompts: _Optional[_Iterable[_Union[RolloutPrompt, _Mapping]]] = ..., eval_prompts: _Optional[_Iterable[_Union[RolloutPrompt, _Mapping]]] = ..., shadow_percent: _Optional[float] = ..., gates: _Optional[_Union[RolloutGates, _Mapping]] = ..., retention_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., executors: _Optional[_Iterable[_Union[ExecutorStatus, _Mapping]]] = ..., arms: _Optional[_Iterable[_Union[ArmStatistics, _Mapping]]] = ..., comparisons: _Optional[_Iterable[_Union[Comparison, _Mapping]]] = ..., verdict: _Optional[str] = ..., plan: _Optional[_Iterable[str]] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., step_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RolloutPrompt(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: RolloutTokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[RolloutTokenIds, _Mapping]] = ...) -> None: ...

class RolloutTokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RolloutGates(_message.Message):
    __slots__ = ("rollback_margin_percent", "advance_tolerance_percent", "max_sample_count", "max_mean_logprob_difference", "max_logprob_difference", "max_perplexity_ratio", "error_margin_percent", "preload_timeout", "shadow_duration")
    ROLLBACK_MARGIN_PERCENT_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_TOLERANCE_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_MEAN_LOGPROB_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROB_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    MAX_PERPLEXITY_RATIO_FIELD_NUMBER: _ClassVar[int]
    ERROR_MARGIN_PERCENT_FIELD_NUMBER: _ClassVar[int]
    PRELOAD_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    SHADOW_DURATION_FIELD_NUMBER: _ClassVar[int]
    rollback_margin_percent: float
    advance_tolerance_percent: float
    max_sample_count: int
    max_mean_logprob_difference: float
    max_logprob_difference: float
    max_perplexity_ratio: float
    error_margin_percent: float
    preload_timeout: _duration_pb2.Duration
    shadow_duration: _duration_pb2.Duration
    def __init__(self, rollback_margin_percent: _Optional[float] = ..., advance_tolerance_percent: _Optional[float] = ..., max_sample_count: _Optional[int] = ..., max_mean_logprob_difference: _Optional[float] = ..., max_logprob_difference: _Optional[float] = ..., max_perplexity_ratio: _Optional[float] = ..., error_margin_percent: _Optional[float] = ..., preload_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., shadow_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StoryLine(_message.Message):
    __slots__ = ("decide_time", "state", "actor", "sentence")
    DECIDE_TIME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    decide_time: _timestamp_pb2.Timestamp
    state: Rollout.State
    actor: str
    sentence: str
    def __init__(self, decide_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., state: _Optional[_Union[Rollout.State, str]] = ..., actor: _Optional[str] = ..., sentence: _Optional[str] = ...) -> None: ...

class ExecutorStatus(_message.Message):
    __slots__ = ("executor", "ready", "failure_reason", "mean_logprob_difference", "max_logprob_difference", "perplexity_ratio")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_REASON_FIELD_NUMBER: _ClassVar[int]
    MEAN_LOGPROB_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROB_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    PERPLEXITY_RATIO_FIELD_NUMBER: _ClassVar[int]
    executor: str
    ready: bool
    failure_reason: str
    mean_logprob_difference: float
    max_logprob_difference: float
    perplexity_ratio: float
    def __init__(self, executor: _Optional[str] = ..., ready: _Optional[bool] = ..., failure_reason: _Optional[str] = ..., mean_logprob_difference: _Optional[float] = ..., max_logprob_difference: _Optional[float] = ..., perplexity_ratio: _Optional[float] = ...) -> None: ...

class ArmStatistics(_message.Message):
    __slots__ = ("arm", "request_count", "error_count", "first_token_ms", "per_token_ms", "output_token_count", "repetition", "empty_count", "accepted_count", "rejected_count")
    ARM_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    ERROR_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    EMPTY_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REJECTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    arm: str
    request_count: int
    error_count: int
    first_token_ms: float
    per_token_ms: float
    output_token_count: float
    repetition: float
    empty_count: int
    accepted_count: int
    rejected_count: int
    def __init__(self, arm: _Optional[str] = ..., request_count: _Optional[int] = ..., error_count: _Optional[int] = ..., first_token_ms: _Optional[float] = ..., per_token_ms: _Optional[float] = ..., output_token_count: _Optional[float] = ..., repetition: _Optional[float] = ..., empty_count: _Optional[int] = ..., accepted_count: _Optional[int] = ..., rejected_count: _Optional[int] = ...) -> None: ...

class Comparison(_message.Message):
    __slots__ = ("metric", "estimate", "low", "high", "sample_count", "verdict")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    metric: str
    estimate: float
    low: float
    high: float
    sample_count: int
    verdict: str
    def __init__(self, metric: _Optional[str] = ..., estimate: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., sample_count: _Optional[int] = ..., verdict: _Optional[str] = ...) -> None: ...

class StartRolloutRequest(_message.Message):
    __slots__ = ("parent", "rollout", "validate_only", "request_id")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    parent: str
    rollout: Rollout
    validate_only: bool
    request_id: str
    def __init__(self, parent: _Optional[str] = ..., rollout: _Optional[_Union[Rollout, _Mapping]] = ..., validate_only: _Optional[bool] = ..., request_id: _Optional[str] = ...) -> None: ...

class GetRolloutRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListRolloutsRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRolloutsResponse(_message.Message):
    __slots__ = ("rollouts", "next_page_token")
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    next_page_token: str
    def __init__(self, rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class WatchRolloutRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ControlRolloutRequest(_message.Message):
    __slots__ = ("name", "action", "reason", "etag", "request_id")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[ControlRolloutRequest.Action]
        ACTION_PAUSE: _ClassVar[ControlRolloutRequest.Action]
        ACTION_RESUME: _ClassVar[ControlRolloutRequest.Action]
        ACTION_ADVANCE: _ClassVar[ControlRolloutRequest.Action]
        ACTION_ROLLBACK: _ClassVar[ControlRolloutRequest.Action]
        ACTION_ABORT: _ClassVar[ControlRolloutRequest.Action]
    ACTION_UNSPECIFIED: ControlRolloutRequest.Action
    ACTION_PAUSE: ControlRolloutRequest.Action
    ACTION_RESUME: ControlRolloutRequest.Action
    ACTION_ADVANCE: ControlRolloutRequest.Action
    ACTION_ROLLBACK: ControlRolloutRequest.Action
    ACTION_ABORT: ControlRolloutRequest.Action
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    action: ControlRolloutRequest.Action
    reason: str
    etag: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., action: _Optional[_Union[ControlRolloutRequest.Action, str]] = ..., reason: _Optional[str] = ..., etag: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReportReadinessRequest(_message.Message):
    __slots__ = ("name", "router", "executor", "revision_id", "ready", "failure_reason", "serving_executors", "lost_epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_REASON_FIELD_NUMBER: _ClassVar[int]
    SERVING_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    LOST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    router: str
    executor: str
    revision_id: str
    ready: bool
    failure_reason: str
    serving_executors: _containers.RepeatedScalarFieldContainer[str]
    lost_epoch: int
    def __init__(self, name: _Optional[str] = ..., router: _Optional[str] = ..., executor: _Optional[str] = ..., revision_id: _Optional[str] = ..., ready: _Optional[bool] = ..., failure_reason: _Optional[str] = ..., serving_executors: _Optional[_Iterable[str]] = ..., lost_epoch: _Optional[int] = ...) -> None: ...

class ReportReadinessResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: Rollout.State
    def __init__(self, state: _Optional[_Union[Rollout.State, str]] = ...) -> None: ...

class ReportProbeRequest(_message.Message):
    __slots__ = ("name", "router", "executor", "revision_id", "prompt_count", "token_count", "mean_logprob_difference", "max_logprob_difference", "nonfinite", "from_perplexity", "to_perplexity", "failure_reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEAN_LOGPROB_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROB_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    FROM_PERPLEXITY_FIELD_NUMBER: _ClassVar[int]
    TO_PERPLEXITY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    router: str
    executor: str
    revision_id: str
    prompt_count: int
    token_count: int
    mean_logprob_difference: float
    max_logprob_difference: float
    nonfinite: bool
    from_perplexity: float
    to_perplexity: float
    failure_reason: str
    def __init__(self, name: _Optional[str] = ..., router: _Optional[str] = ..., executor: _Optional[str] = ..., revision_id: _Optional[str] = ..., prompt_count: _Optional[int] = ..., token_count: _Optional[int] = ..., mean_logprob_difference: _Optional[float] = ..., max_logprob_difference: _Optional[float] = ..., nonfinite: _Optional[bool] = ..., from_perplexity: _Optional[float] = ..., to_perplexity: _Optional[float] = ..., failure_reason: _Optional[str] = ...) -> None: ...

class ReportProbeResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: Rollout.State
    def __init__(self, state: _Optional[_Union[Rollout.State, str]] = ...) -> None: ...

class ReportObservationsRequest(_message.Message):
    __slots__ = ("name", "router", "sequence", "observations", "step_index", "start_time", "outcomes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    name: str
    router: str
    sequence: int
    observations: _containers.RepeatedCompositeFieldContainer[Observation]
    step_index: int
    start_time: _timestamp_pb2.Timestamp
    outcomes: _containers.RepeatedCompositeFieldContainer[OutcomeCount]
    def __init__(self, name: _Optional[str] = ..., router: _Optional[str] = ..., sequence: _Optional[int] = ..., observations: _Optional[_Iterable[_Union[Observation, _Mapping]]] = ..., step_index: _Optional[int] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., outcomes: _Optional[_Iterable[_Union[OutcomeCount, _Mapping]]] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("arm", "first_token_ms", "per_token_ms", "ok", "error_reason", "output_token_count", "repetition", "cold", "bucket")
    ARM_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    arm: str
    first_token_ms: float
    per_token_ms: float
    ok: bool
    error_reason: str
    output_token_count: int
    repetition: float
    cold: bool
    bucket: int
    def __init__(self, arm: _Optional[str] = ..., first_token_ms: _Optional[float] = ..., per_token_ms: _Optional[float] = ..., ok: _Optional[bool] = ..., error_reason: _Optional[str] = ..., output_token_count: _Optional[int] = ..., repetition: _Optional[float] = ..., cold: _Optional[bool] = ..., bucket: _Optional[int] = ...) -> None: ...

class OutcomeCount(_message.Message):
    __slots__ = ("arm", "accepted_count", "rejected_count")
    ARM_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REJECTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    arm: str
    accepted_count: int
    rejected_count: int
    def __init__(self, arm: _Optional[str] = ..., accepted_count: _Optional[int] = ..., rejected_count: _Optional[int] = ...) -> None: ...

class ReportObservationsResponse(_message.Message):
    __slots__ = ("state", "sequence")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    state: Rollout.State
    sequence: int
    def __init__(self, state: _Optional[_Union[Rollout.State, str]] = ..., sequence: _Optional[int] = ...) -> None: ...
