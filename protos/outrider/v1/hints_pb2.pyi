from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HintFrame(_message.Message):
    __slots__ = ("subscribe", "nodes", "unsubscribe", "ping")
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    UNSUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    subscribe: _containers.RepeatedCompositeFieldContainer[Subscribe]
    nodes: _containers.RepeatedCompositeFieldContainer[HintNodes]
    unsubscribe: _containers.RepeatedScalarFieldContainer[str]
    ping: int
    def __init__(self, subscribe: _Optional[_Iterable[_Union[Subscribe, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[HintNodes, _Mapping]]] = ..., unsubscribe: _Optional[_Iterable[str]] = ..., ping: _Optional[int] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("session_id", "attachment", "known_len", "channel", "hint_token", "head", "known_features", "is_memory")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_LEN_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    HINT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FEATURES_FIELD_NUMBER: _ClassVar[int]
    IS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    attachment: int
    known_len: int
    channel: int
    hint_token: str
    head: str
    known_features: int
    is_memory: bool
    def __init__(self, session_id: _Optional[str] = ..., attachment: _Optional[int] = ..., known_len: _Optional[int] = ..., channel: _Optional[int] = ..., hint_token: _Optional[str] = ..., head: _Optional[str] = ..., known_features: _Optional[int] = ..., is_memory: _Optional[bool] = ...) -> None: ...

class HintNodes(_message.Message):
    __slots__ = ("channel", "base_len", "first_node_id", "node_ids", "parent_ids", "token_ids", "support_sizes", "support_token_ids", "support_weights", "confidences", "promoted_ids", "match_len")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_SIZES_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_IDS_FIELD_NUMBER: _ClassVar[int]
    MATCH_LEN_FIELD_NUMBER: _ClassVar[int]
    channel: int
    base_len: int
    first_node_id: int
    node_ids: _containers.RepeatedScalarFieldContainer[int]
    parent_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    support_sizes: _containers.RepeatedScalarFieldContainer[int]
    support_token_ids: _containers.RepeatedScalarFieldContainer[int]
    support_weights: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[int]
    promoted_ids: _containers.RepeatedScalarFieldContainer[int]
    match_len: int
    def __init__(self, channel: _Optional[int] = ..., base_len: _Optional[int] = ..., first_node_id: _Optional[int] = ..., node_ids: _Optional[_Iterable[int]] = ..., parent_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., support_sizes: _Optional[_Iterable[int]] = ..., support_token_ids: _Optional[_Iterable[int]] = ..., support_weights: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[int]] = ..., promoted_ids: _Optional[_Iterable[int]] = ..., match_len: _Optional[int] = ...) -> None: ...

class CommitFrame(_message.Message):
    __slots__ = ("commits", "pong")
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    commits: _containers.RepeatedCompositeFieldContainer[SessionCommit]
    pong: int
    def __init__(self, commits: _Optional[_Iterable[_Union[SessionCommit, _Mapping]]] = ..., pong: _Optional[int] = ...) -> None: ...

class SessionCommit(_message.Message):
    __slots__ = ("channel", "from_len", "token_ids", "is_paused", "is_finished", "num_tried_hints", "num_held_hints", "features", "features_from")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    FROM_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_TRIED_HINTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_HINTS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FROM_FIELD_NUMBER: _ClassVar[int]
    channel: int
    from_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    is_paused: bool
    is_finished: bool
    num_tried_hints: int
    num_held_hints: int
    features: bytes
    features_from: int
    def __init__(self, channel: _Optional[int] = ..., from_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., is_paused: _Optional[bool] = ..., is_finished: _Optional[bool] = ..., num_tried_hints: _Optional[int] = ..., num_held_hints: _Optional[int] = ..., features: _Optional[bytes] = ..., features_from: _Optional[int] = ...) -> None: ...
