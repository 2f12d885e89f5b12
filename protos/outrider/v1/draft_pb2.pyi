from protos.outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("session_id", "attachment", "target_address", "token_ids", "sampling", "tokenizer_fingerprint", "num_prompt_tokens", "speculation", "deadline_ms", "hint_token", "cache_salt", "owner", "priority", "head_fingerprint")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    TARGET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    HINT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    HEAD_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    attachment: int
    target_address: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    tokenizer_fingerprint: str
    num_prompt_tokens: int
    speculation: _common_pb2.SpeculationParams
    deadline_ms: int
    hint_token: str
    cache_salt: str
    owner: str
    priority: int
    head_fingerprint: str
    def __init__(self, session_id: _Optional[str] = ..., attachment: _Optional[int] = ..., target_address: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., tokenizer_fingerprint: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationParams, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., hint_token: _Optional[str] = ..., cache_salt: _Optional[str] = ..., owner: _Optional[str] = ..., priority: _Optional[int] = ..., head_fingerprint: _Optional[str] = ...) -> None: ...

class AttachStatus(_message.Message):
    __slots__ = ("num_sent_nodes", "num_roots", "committed_len", "is_finished")
    NUM_SENT_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROOTS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    num_sent_nodes: int
    num_roots: int
    committed_len: int
    is_finished: bool
    def __init__(self, num_sent_nodes: _Optional[int] = ..., num_roots: _Optional[int] = ..., committed_len: _Optional[int] = ..., is_finished: _Optional[bool] = ...) -> None: ...
