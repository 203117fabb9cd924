import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("envelope", "tree_size", "root_hash", "catalog_epoch", "revocation_epoch", "expire_time")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    TREE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROOT_HASH_FIELD_NUMBER: _ClassVar[int]
    CATALOG_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVOCATION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    envelope: bytes
    tree_size: int
    root_hash: bytes
    catalog_epoch: int
    revocation_epoch: int
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, envelope: _Optional[bytes] = ..., tree_size: _Optional[int] = ..., root_hash: _Optional[bytes] = ..., catalog_epoch: _Optional[int] = ..., revocation_epoch: _Optional[int] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetInclusionProofRequest(_message.Message):
    __slots__ = ("leaf_index", "tree_size")
    LEAF_INDEX_FIELD_NUMBER: _ClassVar[int]
    TREE_SIZE_FIELD_NUMBER: _ClassVar[int]
    leaf_index: int
    tree_size: int
    def __init__(self, leaf_index: _Optional[int] = ..., tree_size: _Optional[int] = ...) -> None: ...

class InclusionProof(_message.Message):
    __slots__ = ("leaf_index", "tree_size", "leaf_hash", "hashes", "body")
    LEAF_INDEX_FIELD_NUMBER: _ClassVar[int]
    TREE_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEAF_HASH_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    leaf_index: int
    tree_size: int
    leaf_hash: bytes
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    body: bytes
    def __init__(self, leaf_index: _Optional[int] = ..., tree_size: _Optional[int] = ..., leaf_hash: _Optional[bytes] = ..., hashes: _Optional[_Iterable[bytes]] = ..., body: _Optional[bytes] = ...) -> None: ...

class GetConsistencyProofRequest(_message.Message):
    __slots__ = ("old_tree_size", "new_tree_size")
    OLD_TREE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NEW_TREE_SIZE_FIELD_NUMBER: _ClassVar[int]
    old_tree_size: int
    new_tree_size: int
    def __init__(self, old_tree_size: _Optional[int] = ..., new_tree_size: _Optional[int] = ...) -> None: ...

class ConsistencyProof(_message.Message):
    __slots__ = ("old_tree_size", "new_tree_size", "hashes")
    OLD_TREE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NEW_TREE_SIZE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    old_tree_size: int
    new_tree_size: int
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, old_tree_size: _Optional[int] = ..., new_tree_size: _Optional[int] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ListLeavesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "start_index")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    START_INDEX_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    start_index: int
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., start_index: _Optional[int] = ...) -> None: ...

class ListLeavesResponse(_message.Message):
    __slots__ = ("leaves", "next_page_token")
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    leaves: _containers.RepeatedCompositeFieldContainer[Leaf]
    next_page_token: str
    def __init__(self, leaves: _Optional[_Iterable[_Union[Leaf, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Leaf(_message.Message):
    __slots__ = ("index", "body")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    index: int
    body: bytes
    def __init__(self, index: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...
