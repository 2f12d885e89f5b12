from protos.outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_NO_TOKEN: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_NO_TOKEN: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("session_id", "token_ids", "num_prompt_tokens", "sampling", "speculation", "priority", "deadline_ms", "hint_token", "cache_salt", "incarnation", "trial_tokens", "owner", "prediction", "slo", "decoding_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    HINT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    DECODING_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _common_pb2.SamplingParams
    speculation: _common_pb2.SpeculationParams
    priority: int
    deadline_ms: int
    hint_token: str
    cache_salt: str
    incarnation: str
    trial_tokens: int
    owner: str
    prediction: _containers.RepeatedScalarFieldContainer[int]
    slo: _common_pb2.Objective
    decoding_ms: float
    def __init__(self, session_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationParams, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., hint_token: _Optional[str] = ..., cache_salt: _Optional[str] = ..., incarnation: _Optional[str] = ..., trial_tokens: _Optional[int] = ..., owner: _Optional[str] = ..., prediction: _Optional[_Iterable[int]] = ..., slo: _Optional[_Union[_common_pb2.Objective, _Mapping]] = ..., decoding_ms: _Optional[float] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("started", "step", "finished", "prompt", "waiting")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    started: SessionStarted
    step: StepOutput
    finished: SessionFinished
    prompt: PromptLogprobs
    waiting: SessionWaiting
    def __init__(self, started: _Optional[_Union[SessionStarted, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., finished: _Optional[_Union[SessionFinished, _Mapping]] = ..., prompt: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., waiting: _Optional[_Union[SessionWaiting, _Mapping]] = ...) -> None: ...

class SessionWaiting(_message.Message):
    __slots__ = ("is_compiling",)
    IS_COMPILING_FIELD_NUMBER: _ClassVar[int]
    is_compiling: bool
    def __init__(self, is_compiling: _Optional[bool] = ...) -> None: ...

class SessionStarted(_message.Message):
    __slots__ = ("decoding_mode", "exactness")
    DECODING_MODE_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    decoding_mode: _common_pb2.DecodingMode
    exactness: _common_pb2.Exactness
    def __init__(self, decoding_mode: _Optional[_Union[_common_pb2.DecodingMode, str]] = ..., exactness: _Optional[_Union[_common_pb2.Exactness, str]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "logprobs")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, first_position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("token_ids", "origins", "num_draft_tokens", "num_accepted_draft_tokens", "step_ms", "logprobs", "is_resting", "num_prediction_tokens", "num_accepted_prediction_tokens", "hint_source", "num_branches", "num_accepted_branches")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IS_RESTING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HINT_SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[_common_pb2.TokenOrigin]
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    step_ms: float
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    is_resting: bool
    num_prediction_tokens: int
    num_accepted_prediction_tokens: int
    hint_source: _common_pb2.HintSource
    num_branches: int
    num_accepted_branches: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[_common_pb2.TokenOrigin, str]]] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., step_ms: _Optional[float] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., is_resting: _Optional[bool] = ..., num_prediction_tokens: _Optional[int] = ..., num_accepted_prediction_tokens: _Optional[int] = ..., hint_source: _Optional[_Union[_common_pb2.HintSource, str]] = ..., num_branches: _Optional[int] = ..., num_accepted_branches: _Optional[int] = ...) -> None: ...

class SessionFinished(_message.Message):
    __slots__ = ("reason", "stop_token_id", "num_prompt_tokens", "num_output_tokens", "stats", "queue_ms", "prefill_ms", "num_cached_tokens", "num_preemptions")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_token_id: int
    num_prompt_tokens: int
    num_output_tokens: int
    stats: _common_pb2.SpeculationStats
    queue_ms: float
    prefill_ms: float
    num_cached_tokens: int
    num_preemptions: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., stats: _Optional[_Union[_common_pb2.SpeculationStats, _Mapping]] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class SetSpeculationRequest(_message.Message):
    __slots__ = ("session_id", "speculation")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    speculation: _common_pb2.SpeculationParams
    def __init__(self, session_id: _Optional[str] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationParams, _Mapping]] = ...) -> None: ...

class SetSpeculationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
