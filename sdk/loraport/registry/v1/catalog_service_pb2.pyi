import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from loraport.registry.v1 import adapter_service_pb2 as _adapter_service_pb2
from loraport.registry.v1 import rollout_service_pb2 as _rollout_service_pb2
from loraport.registry.v1 import tenant_service_pb2 as _tenant_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("artefacts_only",)
    ARTEFACTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    artefacts_only: bool
    def __init__(self, artefacts_only: _Optional[bool] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("epoch", "items", "synced", "checkpoint")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    items: _containers.RepeatedCompositeFieldContainer[CatalogItem]
    synced: bool
    checkpoint: bytes
    def __init__(self, epoch: _Optional[int] = ..., items: _Optional[_Iterable[_Union[CatalogItem, _Mapping]]] = ..., synced: _Optional[bool] = ..., checkpoint: _Optional[bytes] = ...) -> None: ...

class CatalogItem(_message.Message):
    __slots__ = ("tenant", "key", "base_model", "revision", "alias", "trust_root", "rollout", "restriction")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    TRUST_ROOT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    RESTRICTION_FIELD_NUMBER: _ClassVar[int]
    tenant: CatalogTenant
    key: CatalogKey
    base_model: CatalogBaseModel
    revision: CatalogRevision
    alias: CatalogAlias
    trust_root: CatalogTrustRoot
    rollout: CatalogRollout
    restriction: CatalogRestriction
    def __init__(self, tenant: _Optional[_Union[CatalogTenant, _Mapping]] = ..., key: _Optional[_Union[CatalogKey, _Mapping]] = ..., base_model: _Optional[_Union[CatalogBaseModel, _Mapping]] = ..., revision: _Optional[_Union[CatalogRevision, _Mapping]] = ..., alias: _Optional[_Union[CatalogAlias, _Mapping]] = ..., trust_root: _Optional[_Union[CatalogTrustRoot, _Mapping]] = ..., rollout: _Optional[_Union[CatalogRollout, _Mapping]] = ..., restriction: _Optional[_Union[CatalogRestriction, _Mapping]] = ...) -> None: ...

class CatalogTenant(_message.Message):
    __slots__ = ("tenant", "weight", "base_allowed", "quota")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BASE_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    weight: float
    base_allowed: bool
    quota: _tenant_service_pb2.TenantQuota
    def __init__(self, tenant: _Optional[str] = ..., weight: _Optional[float] = ..., base_allowed: _Optional[bool] = ..., quota: _Optional[_Union[_tenant_service_pb2.TenantQuota, _Mapping]] = ...) -> None: ...

class CatalogKey(_message.Message):
    __slots__ = ("key_id", "tenant", "secret_hmac", "scopes", "expire_time", "revoked")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SECRET_HMAC_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    tenant: str
    secret_hmac: bytes
    scopes: _containers.RepeatedScalarFieldContainer[str]
    expire_time: _timestamp_pb2.Timestamp
    revoked: bool
    def __init__(self, key_id: _Optional[str] = ..., tenant: _Optional[str] = ..., secret_hmac: _Optional[bytes] = ..., scopes: _Optional[_Iterable[str]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., revoked: _Optional[bool] = ...) -> None: ...

class CatalogBaseModel(_message.Message):
    __slots__ = ("base_model", "base_id")
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    base_id: str
    def __init__(self, base_model: _Optional[str] = ..., base_id: _Optional[str] = ...) -> None: ...

class CatalogRevision(_message.Message):
    __slots__ = ("revision_id", "tenant", "adapter", "version", "state", "base_model", "weights_digest", "size_bytes", "max_rank", "record_envelope", "shared_tenants", "record_leaf")
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    RECORD_ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    SHARED_TENANTS_FIELD_NUMBER: _ClassVar[int]
    RECORD_LEAF_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    tenant: str
    adapter: str
    version: int
    state: _adapter_service_pb2.Revision.State
    base_model: str
    weights_digest: str
    size_bytes: int
    max_rank: int
    record_envelope: bytes
    shared_tenants: _containers.RepeatedScalarFieldContainer[str]
    record_leaf: int
    def __init__(self, revision_id: _Optional[str] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[_Union[_adapter_service_pb2.Revision.State, str]] = ..., base_model: _Optional[str] = ..., weights_digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., max_rank: _Optional[int] = ..., record_envelope: _Optional[bytes] = ..., shared_tenants: _Optional[_Iterable[str]] = ..., record_leaf: _Optional[int] = ...) -> None: ...

class CatalogRestriction(_message.Message):
    __slots__ = ("position", "body")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    position: int
    body: bytes
    def __init__(self, position: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class CatalogAlias(_message.Message):
    __slots__ = ("tenant", "adapter", "alias", "revision_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    adapter: str
    alias: str
    revision_id: str
    def __init__(self, tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., alias: _Optional[str] = ..., revision_id: _Optional[str] = ...) -> None: ...

class CatalogRollout(_message.Message):
    __slots__ = ("name", "tenant", "adapter", "alias", "salt", "from_revision_id", "to_revision_id", "base_model", "state", "share_basis_points", "step_index", "golden_prompts", "eval_prompts", "shadow_basis_points", "generation", "ended")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    FROM_REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    TO_REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SHARE_BASIS_POINTS_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    GOLDEN_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    EVAL_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_BASIS_POINTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    adapter: str
    alias: str
    salt: bytes
    from_revision_id: str
    to_revision_id: str
    base_model: str
    state: _rollout_service_pb2.Rollout.State
    share_basis_points: int
    step_index: int
    golden_prompts: _containers.RepeatedCompositeFieldContainer[_rollout_service_pb2.RolloutPrompt]
    eval_prompts: _containers.RepeatedCompositeFieldContainer[_rollout_service_pb2.RolloutPrompt]
    shadow_basis_points: int
    generation: int
    ended: bool
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., alias: _Optional[str] = ..., salt: _Optional[bytes] = ..., from_revision_id: _Optional[str] = ..., to_revision_id: _Optional[str] = ..., base_model: _Optional[str] = ..., state: _Optional[_Union[_rollout_service_pb2.Rollout.State, str]] = ..., share_basis_points: _Optional[int] = ..., step_index: _Optional[int] = ..., golden_prompts: _Optional[_Iterable[_Union[_rollout_service_pb2.RolloutPrompt, _Mapping]]] = ..., eval_prompts: _Optional[_Iterable[_Union[_rollout_service_pb2.RolloutPrompt, _Mapping]]] = ..., shadow_basis_points: _Optional[int] = ..., generation: _Optional[int] = ..., ended: _Optional[bool] = ...) -> None: ...

class CatalogTrustRoot(_message.Message):
    __slots__ = ("version", "envelope")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    version: int
    envelope: bytes
    def __init__(self, version: _Optional[int] = ..., envelope: _Optional[bytes] = ...) -> None: ...

class GetEpochRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEpochResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...
