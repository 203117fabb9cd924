import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListQueuesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQueuesResponse(_message.Message):
    __slots__ = ("queues",)
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedCompositeFieldContainer[TenantQueue]
    def __init__(self, queues: _Optional[_Iterable[_Union[TenantQueue, _Mapping]]] = ...) -> None: ...

class TenantQueue(_message.Message):
    __slots__ = ("tenant", "queued_count", "running_count", "oldest_wait_ms")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    queued_count: int
    running_count: int
    oldest_wait_ms: float
    def __init__(self, tenant: _Optional[str] = ..., queued_count: _Optional[int] = ..., running_count: _Optional[int] = ..., oldest_wait_ms: _Optional[float] = ...) -> None: ...

class GetFairnessRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFairnessResponse(_message.Message):
    __slots__ = ("tenants", "bound_ms", "admissions")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    BOUND_MS_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantWork]
    bound_ms: float
    admissions: _containers.RepeatedCompositeFieldContainer[Admission]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantWork, _Mapping]]] = ..., bound_ms: _Optional[float] = ..., admissions: _Optional[_Iterable[_Union[Admission, _Mapping]]] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("tenant", "revision_id", "executor", "wait_ms", "why")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    revision_id: str
    executor: str
    wait_ms: float
    why: str
    def __init__(self, tenant: _Optional[str] = ..., revision_id: _Optional[str] = ..., executor: _Optional[str] = ..., wait_ms: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class TenantWork(_message.Message):
    __slots__ = ("tenant", "weight", "counter_ms", "prefill_ms", "decode_ms", "load_ms", "hold_ms", "elsewhere_ms")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    COUNTER_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_MS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    weight: float
    counter_ms: float
    prefill_ms: float
    decode_ms: float
    load_ms: float
    hold_ms: float
    elsewhere_ms: float
    def __init__(self, tenant: _Optional[str] = ..., weight: _Optional[float] = ..., counter_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., load_ms: _Optional[float] = ..., hold_ms: _Optional[float] = ..., elsewhere_ms: _Optional[float] = ...) -> None: ...

class ExplainPlacementRequest(_message.Message):
    __slots__ = ("revision_id", "base_model")
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    base_model: str
    def __init__(self, revision_id: _Optional[str] = ..., base_model: _Optional[str] = ...) -> None: ...

class ExplainPlacementResponse(_message.Message):
    __slots__ = ("executor", "candidates")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    executor: str
    candidates: _containers.RepeatedCompositeFieldContainer[PlacementCandidate]
    def __init__(self, executor: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[PlacementCandidate, _Mapping]]] = ...) -> None: ...

class PlacementCandidate(_message.Message):
    __slots__ = ("executor", "cost_ms", "reasons", "eligible")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    COST_MS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    executor: str
    cost_ms: float
    reasons: _containers.RepeatedScalarFieldContainer[str]
    eligible: bool
    def __init__(self, executor: _Optional[str] = ..., cost_ms: _Optional[float] = ..., reasons: _Optional[_Iterable[str]] = ..., eligible: _Optional[bool] = ...) -> None: ...

class ListResidencyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListResidencyResponse(_message.Message):
    __slots__ = ("executors",)
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorResidency]
    def __init__(self, executors: _Optional[_Iterable[_Union[ExecutorResidency, _Mapping]]] = ...) -> None: ...

class ExecutorResidency(_message.Message):
    __slots__ = ("executor", "base_model", "serving", "report_time", "epoch", "revisions", "pool_used_bytes", "pool_size_bytes", "fault")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    REPORT_TIME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    POOL_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    executor: str
    base_model: str
    serving: bool
    report_time: _timestamp_pb2.Timestamp
    epoch: int
    revisions: _containers.RepeatedCompositeFieldContainer[ResidentRevision]
    pool_used_bytes: int
    pool_size_bytes: int
    fault: str
    def __init__(self, executor: _Optional[str] = ..., base_model: _Optional[str] = ..., serving: _Optional[bool] = ..., report_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., epoch: _Optional[int] = ..., revisions: _Optional[_Iterable[_Union[ResidentRevision, _Mapping]]] = ..., pool_used_bytes: _Optional[int] = ..., pool_size_bytes: _Optional[int] = ..., fault: _Optional[str] = ...) -> None: ...

class ResidentRevision(_message.Message):
    __slots__ = ("revision_id", "adapter", "version", "size_bytes", "lease_count", "state")
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    adapter: str
    version: int
    size_bytes: int
    lease_count: int
    state: str
    def __init__(self, revision_id: _Optional[str] = ..., adapter: _Optional[str] = ..., version: _Optional[int] = ..., size_bytes: _Optional[int] = ..., lease_count: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class DrainExecutorRequest(_message.Message):
    __slots__ = ("executor", "undrain")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_FIELD_NUMBER: _ClassVar[int]
    executor: str
    undrain: bool
    def __init__(self, executor: _Optional[str] = ..., undrain: _Optional[bool] = ...) -> None: ...

class DrainExecutorResponse(_message.Message):
    __slots__ = ("executor", "serving", "running_count")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    executor: str
    serving: bool
    running_count: int
    def __init__(self, executor: _Optional[str] = ..., serving: _Optional[bool] = ..., running_count: _Optional[int] = ...) -> None: ...

class GetQuotaUsageRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class QuotaUsage(_message.Message):
    __slots__ = ("tenant", "quotas", "router_count", "shared", "keys")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_COUNT_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    quotas: _containers.RepeatedCompositeFieldContainer[QuotaLine]
    router_count: int
    shared: bool
    keys: _containers.RepeatedCompositeFieldContainer[ApiKeyUse]
    def __init__(self, tenant: _Optional[str] = ..., quotas: _Optional[_Iterable[_Union[QuotaLine, _Mapping]]] = ..., router_count: _Optional[int] = ..., shared: _Optional[bool] = ..., keys: _Optional[_Iterable[_Union[ApiKeyUse, _Mapping]]] = ...) -> None: ...

class QuotaLine(_message.Message):
    __slots__ = ("quota", "limit", "used", "total", "refused_count")
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    quota: str
    limit: int
    used: int
    total: int
    refused_count: int
    def __init__(self, quota: _Optional[str] = ..., limit: _Optional[int] = ..., used: _Optional[int] = ..., total: _Optional[int] = ..., refused_count: _Optional[int] = ...) -> None: ...

class ApiKeyUse(_message.Message):
    __slots__ = ("key", "last_use_time")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_TIME_FIELD_NUMBER: _ClassVar[int]
    key: str
    last_use_time: _timestamp_pb2.Timestamp
    def __init__(self, key: _Optional[str] = ..., last_use_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetCapacityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("window_s", "bases", "executors")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    bases: _containers.RepeatedCompositeFieldContainer[BaseCapacity]
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorCapacity]
    def __init__(self, window_s: _Optional[float] = ..., bases: _Optional[_Iterable[_Union[BaseCapacity, _Mapping]]] = ..., executors: _Optional[_Iterable[_Union[ExecutorCapacity, _Mapping]]] = ...) -> None: ...

class BaseCapacity(_message.Message):
    __slots__ = ("base_model", "active_count", "active_bytes", "pool_bytes", "fits", "verdict")
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    active_count: int
    active_bytes: int
    pool_bytes: int
    fits: bool
    verdict: str
    def __init__(self, base_model: _Optional[str] = ..., active_count: _Optional[int] = ..., active_bytes: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., fits: _Optional[bool] = ..., verdict: _Optional[str] = ...) -> None: ...

class ExecutorCapacity(_message.Message):
    __slots__ = ("executor", "base_model", "pool_bytes", "working_set_count", "working_set_bytes", "headroom_bytes", "load_count", "reload_count", "thrashing")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKING_SET_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORKING_SET_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    RELOAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    THRASHING_FIELD_NUMBER: _ClassVar[int]
    executor: str
    base_model: str
    pool_bytes: int
    working_set_count: int
    working_set_bytes: int
    headroom_bytes: int
    load_count: int
    reload_count: int
    thrashing: _containers.RepeatedCompositeFieldContainer[TenantReloads]
    def __init__(self, executor: _Optional[str] = ..., base_model: _Optional[str] = ..., pool_bytes: _Optional[int] = ..., working_set_count: _Optional[int] = ..., working_set_bytes: _Optional[int] = ..., headroom_bytes: _Optional[int] = ..., load_count: _Optional[int] = ..., reload_count: _Optional[int] = ..., thrashing: _Optional[_Iterable[_Union[TenantReloads, _Mapping]]] = ...) -> None: ...

class TenantReloads(_message.Message):
    __slots__ = ("tenant", "reload_count")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RELOAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    reload_count: int
    def __init__(self, tenant: _Optional[str] = ..., reload_count: _Optional[int] = ...) -> None: ...
