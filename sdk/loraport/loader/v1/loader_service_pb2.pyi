from google.api import field_behavior_pb2 as _field_behavior_pb2
from loraport.types.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UploadRequest(_message.Message):
    __slots__ = ("session", "chunk")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    chunk: FileChunk
    def __init__(self, session: _Optional[bytes] = ..., chunk: _Optional[_Union[FileChunk, _Mapping]] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("file", "data")
    class File(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FILE_UNSPECIFIED: _ClassVar[FileChunk.File]
        FILE_CONFIG: _ClassVar[FileChunk.File]
        FILE_WEIGHTS: _ClassVar[FileChunk.File]
    FILE_UNSPECIFIED: FileChunk.File
    FILE_CONFIG: FileChunk.File
    FILE_WEIGHTS: FileChunk.File
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file: FileChunk.File
    data: bytes
    def __init__(self, file: _Optional[_Union[FileChunk.File, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadResponse(_message.Message):
    __slots__ = ("revision_id", "admitted", "violations", "warnings")
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    admitted: bool
    violations: _containers.RepeatedCompositeFieldContainer[_types_pb2.Violation]
    warnings: _containers.RepeatedCompositeFieldContainer[_types_pb2.Violation]
    def __init__(self, revision_id: _Optional[str] = ..., admitted: _Optional[bool] = ..., violations: _Optional[_Iterable[_Union[_types_pb2.Violation, _Mapping]]] = ..., warnings: _Optional[_Iterable[_Union[_types_pb2.Violation, _Mapping]]] = ...) -> None: ...

class ImportRequest(_message.Message):
    __slots__ = ("session", "s3", "hub", "https")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    S3_FIELD_NUMBER: _ClassVar[int]
    HUB_FIELD_NUMBER: _ClassVar[int]
    HTTPS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    s3: S3Source
    hub: HubSource
    https: HttpsSource
    def __init__(self, session: _Optional[bytes] = ..., s3: _Optional[_Union[S3Source, _Mapping]] = ..., hub: _Optional[_Union[HubSource, _Mapping]] = ..., https: _Optional[_Union[HttpsSource, _Mapping]] = ...) -> None: ...

class S3Source(_message.Message):
    __slots__ = ("endpoint", "bucket", "config_key", "weights_key")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    CONFIG_KEY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_KEY_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    bucket: str
    config_key: str
    weights_key: str
    def __init__(self, endpoint: _Optional[str] = ..., bucket: _Optional[str] = ..., config_key: _Optional[str] = ..., weights_key: _Optional[str] = ...) -> None: ...

class HubSource(_message.Message):
    __slots__ = ("repository", "commit")
    REPOSITORY_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    repository: str
    commit: str
    def __init__(self, repository: _Optional[str] = ..., commit: _Optional[str] = ...) -> None: ...

class HttpsSource(_message.Message):
    __slots__ = ("config_url", "weights_url")
    CONFIG_URL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_URL_FIELD_NUMBER: _ClassVar[int]
    config_url: str
    weights_url: str
    def __init__(self, config_url: _Optional[str] = ..., weights_url: _Optional[str] = ...) -> None: ...

class ImportResponse(_message.Message):
    __slots__ = ("stage", "result")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    stage: _types_pb2.StageReport
    result: UploadResponse
    def __init__(self, stage: _Optional[_Union[_types_pb2.StageReport, _Mapping]] = ..., result: _Optional[_Union[UploadResponse, _Mapping]] = ...) -> None: ...

class EnsureHostRequest(_message.Message):
    __slots__ = ("revision_id",)
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    def __init__(self, revision_id: _Optional[str] = ...) -> None: ...

class EnsureHostResponse(_message.Message):
    __slots__ = ("stage", "lease")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    stage: _types_pb2.StageReport
    lease: HostLease
    def __init__(self, stage: _Optional[_Union[_types_pb2.StageReport, _Mapping]] = ..., lease: _Optional[_Union[HostLease, _Mapping]] = ...) -> None: ...

class HostLease(_message.Message):
    __slots__ = ("lease_id", "weights_digest", "size_bytes", "manifest_envelope", "record_envelope", "handover_token", "handover_socket")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    RECORD_ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_SOCKET_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    weights_digest: str
    size_bytes: int
    manifest_envelope: bytes
    record_envelope: bytes
    handover_token: bytes
    handover_socket: str
    def __init__(self, lease_id: _Optional[str] = ..., weights_digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., manifest_envelope: _Optional[bytes] = ..., record_envelope: _Optional[bytes] = ..., handover_token: _Optional[bytes] = ..., handover_socket: _Optional[str] = ...) -> None: ...

class ReadBlobRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReadBlobResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ReleaseHostRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReleaseHostResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InventoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InventoryResponse(_message.Message):
    __slots__ = ("entries", "loads", "used_bytes", "budget_bytes", "checkpoint")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[HostEntry]
    loads: _containers.RepeatedCompositeFieldContainer[LoadEntry]
    used_bytes: int
    budget_bytes: int
    checkpoint: _types_pb2.SeenCheckpoint
    def __init__(self, entries: _Optional[_Iterable[_Union[HostEntry, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[LoadEntry, _Mapping]]] = ..., used_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., checkpoint: _Optional[_Union[_types_pb2.SeenCheckpoint, _Mapping]] = ...) -> None: ...

class HostEntry(_message.Message):
    __slots__ = ("weights_digest", "size_bytes", "lease_count", "stages")
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    weights_digest: str
    size_bytes: int
    lease_count: int
    stages: _containers.RepeatedCompositeFieldContainer[_types_pb2.StageReport]
    def __init__(self, weights_digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., lease_count: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[_types_pb2.StageReport, _Mapping]]] = ...) -> None: ...

class LoadEntry(_message.Message):
    __slots__ = ("weights_digest", "stage", "waiter_count")
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WAITER_COUNT_FIELD_NUMBER: _ClassVar[int]
    weights_digest: str
    stage: _types_pb2.LoadStage
    waiter_count: int
    def __init__(self, weights_digest: _Optional[str] = ..., stage: _Optional[_Union[_types_pb2.LoadStage, str]] = ..., waiter_count: _Optional[int] = ...) -> None: ...

class CancelLoadRequest(_message.Message):
    __slots__ = ("revision_id",)
    REVISION_ID_FIELD_NUMBER: _ClassVar[int]
    revision_id: str
    def __init__(self, revision_id: _Optional[str] = ...) -> None: ...

class CancelLoadResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    def __init__(self, cancelled: _Optional[bool] = ...) -> None: ...
