import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BaseModel(_message.Message):
    __slots__ = ("name", "base_id", "spec_json", "create_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    base_id: str
    spec_json: bytes
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., base_id: _Optional[str] = ..., spec_json: _Optional[bytes] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class CreateBaseModelRequest(_message.Message):
    __slots__ = ("base_model_id", "base_model")
    BASE_MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    base_model_id: str
    base_model: BaseModel
    def __init__(self, base_model_id: _Optional[str] = ..., base_model: _Optional[_Union[BaseModel, _Mapping]] = ...) -> None: ...

class GetBaseModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListBaseModelsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBaseModelsResponse(_message.Message):
    __slots__ = ("base_models", "next_page_token")
    BASE_MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    base_models: _containers.RepeatedCompositeFieldContainer[BaseModel]
    next_page_token: str
    def __init__(self, base_models: _Optional[_Iterable[_Union[BaseModel, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...
