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
    __slots__ = ("name", "alias", "from_revision_id", "to_revision_id", "state", "share_percent", "step_percents", "min_sample_count", "min_step_duration", "story", "etag", "create_time")
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
    STATE_UNSPECIFIED: Rollout.State
    STATE_PRELOADING: Rollout.State
    STATE_PROBING: Rollout.State
    STATE_SPLITTING: Rollout.State
    STATE_PAUSED: Rollout.State
    STATE_RETAINING: Rollout.State
    STATE_SUCCEEDED: Rollout.State
    STATE_ROLLED_BACK: Rollout.State
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
    name: str
    alias: str
    from_revision_id: str
    to_revision_id: str
    state: Rollout.State
    share_percent: float
    step_percents: _containers.RepeatedScalarFieldContainer[float]
    min_sample_count: int
    min_step_duration: _duration_pb2.Duration
    story: _containers.RepeatedScalarFieldContainer[str]
    etag: str
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., alias: _Optional[str] = ..., from_revision_id: _Optional[str] = ..., to_revision_id: _Optional[str] = ..., state: _Optional[_Union[Rollout.State, str]] = ..., share_percent: _Optional[float] = ..., step_percents: _Optional[_Iterable[float]] = ..., min_sample_count: _Optional[int] = ..., min_step_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., story: _Optional[_Iterable[str]] = ..., etag: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

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

class ReportObservationsRequest(_message.Message):
    __slots__ = ("name", "router", "sequence", "observations")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    router: str
    sequence: int
    observations: _containers.RepeatedCompositeFieldContainer[Observation]
    def __init__(self, name: _Optional[str] = ..., router: _Optional[str] = ..., sequence: _Optional[int] = ..., observations: _Optional[_Iterable[_Union[Observation, _Mapping]]] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("arm", "first_token_ms", "per_token_ms", "ok")
    ARM_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    arm: str
    first_token_ms: float
    per_token_ms: float
    ok: bool
    def __init__(self, arm: _Optional[str] = ..., first_token_ms: _Optional[float] = ..., per_token_ms: _Optional[float] = ..., ok: _Optional[bool] = ...) -> None: ...

class ReportObservationsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
