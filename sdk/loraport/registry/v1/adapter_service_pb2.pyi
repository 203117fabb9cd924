import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from loraport.types.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Adapter(_message.Message):
    __slots__ = ("name", "base_model", "aliases", "latest_version", "shared_tenants", "create_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    LATEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARED_TENANTS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    base_model: str
    aliases: _containers.RepeatedCompositeFieldContainer[Alias]
    latest_version: int
    shared_tenants: _containers.RepeatedScalarFieldContainer[str]
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., base_model: _Optional[str] = ..., aliases: _Optional[_Iterable[_Union[Alias, _Mapping]]] = ..., latest_version: _Optional[int] = ..., shared_tenants: _Optional[_Iterable[str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Revision(_message.Message):
    __slots__ = ("name", "revision_id", "version", "state", "reasons", "warnings", "base_model", "weights_digest", "size_bytes", "max_rank", "module_count", "manifest_envelope", "record_envelope", "etag", "create_time", "update_time")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Revision.State]
        STATE_PENDING: _ClassVar[Revision.State]
        STATE_VERIFIED: _ClassVar[Revision.State]
        STATE_ACTIVE: _ClassVar[Revision.State]
        STATE_QUARANTINED: _ClassVar[Revision.State]
        STATE_REVOKED: _ClassVar[Revision.State]
    STATE_UNSPECIFIED: Revision.State
    STATE_PENDING: Revision.State
    STATE_VERIFIED: Revision.State
    STATE_ACTIVE: Revision.State
    STATE_QUARANTINED: Revision.State
    STATE_REVOKED: Revision.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    MODULE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    RECORD_ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision_id: str
    version: int
    state: Revision.State
    reasons: _containers.RepeatedCompositeFieldContainer[_types_pb2.Violation]
    warnings: _containers.RepeatedCompositeFieldContainer[_types_pb2.Violation]
    base_model: str
    weights_digest: str
    size_bytes: int
    max_rank: int
    module_count: int
    manifest_envelope: bytes
    record_envelope: bytes
    etag: str
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., revision_id: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[_Union[Revision.State, str]] = ..., reasons: _Optional[_Iterable[_Union[_types_pb2.Violation, _Mapping]]] = ..., warnings: _Optional[_Iterable[_Union[_types_pb2.Violation, _Mapping]]] = ..., base_model: _Optional[str] = ..., weights_digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., max_rank: _Optional[int] = ..., module_count: _Optional[int] = ..., manifest_envelope: _Optional[bytes] = ..., record_envelope: _Optional[bytes] = ..., etag: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Alias(_message.Message):
    __slots__ = ("name", "revision_id", "version", "etag", "update_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision_id: str
    version: int
    etag: str
    update_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., revision_id: _Optional[str] = ..., version: _Optional[int] = ..., etag: _Optional[str] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RegisterRevisionRequest(_message.Message):
    __slots__ = ("parent", "manifest_envelope", "request_id", "validate_only")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    parent: str
    manifest_envelope: bytes
    request_id: str
    validate_only: bool
    def __init__(self, parent: _Optional[str] = ..., manifest_envelope: _Optional[bytes] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class RegisterRevisionResponse(_message.Message):
    __slots__ = ("revision", "upload_session", "session_expire_time")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_SESSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    upload_session: bytes
    session_expire_time: _timestamp_pb2.Timestamp
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., upload_session: _Optional[bytes] = ..., session_expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class AdmitRevisionRequest(_message.Message):
    __slots__ = ("verification_envelope",)
    VERIFICATION_ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    verification_envelope: bytes
    def __init__(self, verification_envelope: _Optional[bytes] = ...) -> None: ...

class ApproveRevisionRequest(_message.Message):
    __slots__ = ("name", "etag", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class RevokeRevisionRequest(_message.Message):
    __slots__ = ("name", "reason", "etag", "request_id", "security")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SECURITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    etag: str
    request_id: str
    security: bool
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ..., etag: _Optional[str] = ..., request_id: _Optional[str] = ..., security: _Optional[bool] = ...) -> None: ...

class GetRevisionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListRevisionsRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRevisionsResponse(_message.Message):
    __slots__ = ("revisions", "next_page_token")
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    revisions: _containers.RepeatedCompositeFieldContainer[Revision]
    next_page_token: str
    def __init__(self, revisions: _Optional[_Iterable[_Union[Revision, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "next_page_token")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    next_page_token: str
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class SetAliasRequest(_message.Message):
    __slots__ = ("name", "revision_id", "etag", "now", "reason", "request_id", "force")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision_id: str
    etag: str
    now: bool
    reason: str
    request_id: str
    force: bool
    def __init__(self, name: _Optional[str] = ..., revision_id: _Optional[str] = ..., etag: _Optional[str] = ..., now: _Optional[bool] = ..., reason: _Optional[str] = ..., request_id: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class DeleteAliasRequest(_message.Message):
    __slots__ = ("name", "etag", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ShareAdapterRequest(_message.Message):
    __slots__ = ("name", "shared_tenants", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARED_TENANTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    shared_tenants: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    def __init__(self, name: _Optional[str] = ..., shared_tenants: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ...) -> None: ...
