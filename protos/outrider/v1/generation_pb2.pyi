from protos.outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerationRequest(_message.Message):
    __slots__ = ("model", "prompt", "prompt_token_ids", "chat", "sampling", "speculation", "stop", "include_stop_str_in_output", "deadline_ms", "request_id", "n", "best_of", "echo", "bad_words", "resume_from", "priority", "tenant", "run", "cache_salt", "prediction_text", "prediction_token_ids", "slo")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TEXT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    prompt_token_ids: TokenPrompt
    chat: ChatPrompt
    sampling: _common_pb2.SamplingParams
    speculation: _common_pb2.SpeculationParams
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    deadline_ms: int
    request_id: str
    n: int
    best_of: int
    echo: bool
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    resume_from: _containers.RepeatedCompositeFieldContainer[ResumePoint]
    priority: int
    tenant: str
    run: str
    cache_salt: str
    prediction_text: str
    prediction_token_ids: TokenPrompt
    slo: _common_pb2.Objective
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_token_ids: _Optional[_Union[TokenPrompt, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationParams, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: _Optional[bool] = ..., deadline_ms: _Optional[int] = ..., request_id: _Optional[str] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., echo: _Optional[bool] = ..., bad_words: _Optional[_Iterable[str]] = ..., resume_from: _Optional[_Iterable[_Union[ResumePoint, _Mapping]]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., run: _Optional[str] = ..., cache_salt: _Optional[str] = ..., prediction_text: _Optional[str] = ..., prediction_token_ids: _Optional[_Union[TokenPrompt, _Mapping]] = ..., slo: _Optional[_Union[_common_pb2.Objective, _Mapping]] = ...) -> None: ...

class ResumePoint(_message.Message):
    __slots__ = ("num_tokens", "has_begun", "has_ended")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    has_begun: bool
    has_ended: bool
    def __init__(self, num_tokens: _Optional[int] = ..., has_begun: _Optional[bool] = ..., has_ended: _Optional[bool] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class GenerationChunk(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "origins", "finished", "index", "logprobs", "prompt_logprobs", "run")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[_common_pb2.TokenOrigin]
    finished: GenerationFinished
    index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    run: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[_common_pb2.TokenOrigin, str]]] = ..., finished: _Optional[_Union[GenerationFinished, _Mapping]] = ..., index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., run: _Optional[str] = ...) -> None: ...

class GenerationFinished(_message.Message):
    __slots__ = ("finish_reason", "stop_reason", "num_prompt_tokens", "num_output_tokens", "stats", "decoding_mode", "time_to_first_token_ms", "generation_time_ms", "exactness", "slo_met", "seed")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    DECODING_MODE_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    SLO_MET_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    stop_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    stats: _common_pb2.SpeculationStats
    decoding_mode: _common_pb2.DecodingMode
    time_to_first_token_ms: float
    generation_time_ms: float
    exactness: _common_pb2.Exactness
    slo_met: bool
    seed: int
    def __init__(self, finish_reason: _Optional[str] = ..., stop_reason: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., stats: _Optional[_Union[_common_pb2.SpeculationStats, _Mapping]] = ..., decoding_mode: _Optional[_Union[_common_pb2.DecodingMode, str]] = ..., time_to_first_token_ms: _Optional[float] = ..., generation_time_ms: _Optional[float] = ..., exactness: _Optional[_Union[_common_pb2.Exactness, str]] = ..., slo_met: _Optional[bool] = ..., seed: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("id", "max_model_len", "num_target_workers", "num_draft_workers")
    ID_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    max_model_len: int
    num_target_workers: int
    num_draft_workers: int
    def __init__(self, id: _Optional[str] = ..., max_model_len: _Optional[int] = ..., num_target_workers: _Optional[int] = ..., num_draft_workers: _Optional[int] = ...) -> None: ...
