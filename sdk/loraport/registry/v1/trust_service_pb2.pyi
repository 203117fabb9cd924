import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrustRoot(_message.Message):
    __slots__ = ("name", "version", "envelope", "log_index", "create_time", "stopped_revision_count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    LOG_INDEX_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    STOPPED_REVISION_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    envelope: bytes
    log_index: int
    create_time: _timestamp_pb2.Timestamp
    stopped_revision_count: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., envelope: _Optional[bytes] = ..., log_index: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., stopped_revision_count: _Optional[int] = ...) -> None: ...

class SubmitTrustRootRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: bytes
    def __init__(self, envelope: _Optional[bytes] = ...) -> None: ...

class ListTrustRootsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTrustRootsResponse(_message.Message):
    __slots__ = ("trust_roots", "next_page_token")
    TRUST_ROOTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    trust_roots: _containers.RepeatedCompositeFieldContainer[TrustRoot]
    next_page_token: str
    def __init__(self, trust_roots: _Optional[_Iterable[_Union[TrustRoot, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...
