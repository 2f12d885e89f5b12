from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogprobsMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGPROBS_MODE_RAW: _ClassVar[LogprobsMode]
    LOGPROBS_MODE_PROCESSED: _ClassVar[LogprobsMode]

class AcceptanceRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_RULE_BLOCK: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_TOKEN: _ClassVar[AcceptanceRule]

class DecodingMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECODING_MODE_UNSPECIFIED: _ClassVar[DecodingMode]
    DECODING_MODE_GREEDY: _ClassVar[DecodingMode]
    DECODING_MODE_REJECTION: _ClassVar[DecodingMode]
    DECODING_MODE_COUPLED: _ClassVar[DecodingMode]

class Exactness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXACTNESS_UNSPECIFIED: _ClassVar[Exactness]
    EXACTNESS_TOKENS: _ClassVar[Exactness]
    EXACTNESS_DISTRIBUTION: _ClassVar[Exactness]

class TokenOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_ORIGIN_UNSPECIFIED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_PLAIN: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_ACCEPTED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_RECOVERED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_BONUS: _ClassVar[TokenOrigin]

class HintSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_SOURCE_UNSPECIFIED: _ClassVar[HintSource]
    HINT_SOURCE_DRAFT: _ClassVar[HintSource]
    HINT_SOURCE_HEAD: _ClassVar[HintSource]
    HINT_SOURCE_LOOKUP: _ClassVar[HintSource]
    HINT_SOURCE_PREDICTION: _ClassVar[HintSource]
    HINT_SOURCE_GRAMMAR: _ClassVar[HintSource]
    HINT_SOURCE_MEMORY: _ClassVar[HintSource]
LOGPROBS_MODE_RAW: LogprobsMode
LOGPROBS_MODE_PROCESSED: LogprobsMode
ACCEPTANCE_RULE_BLOCK: AcceptanceRule
ACCEPTANCE_RULE_TOKEN: AcceptanceRule
DECODING_MODE_UNSPECIFIED: DecodingMode
DECODING_MODE_GREEDY: DecodingMode
DECODING_MODE_REJECTION: DecodingMode
DECODING_MODE_COUPLED: DecodingMode
EXACTNESS_UNSPECIFIED: Exactness
EXACTNESS_TOKENS: Exactness
EXACTNESS_DISTRIBUTION: Exactness
TOKEN_ORIGIN_UNSPECIFIED: TokenOrigin
TOKEN_ORIGIN_PLAIN: TokenOrigin
TOKEN_ORIGIN_ACCEPTED: TokenOrigin
TOKEN_ORIGIN_RECOVERED: TokenOrigin
TOKEN_ORIGIN_BONUS: TokenOrigin
HINT_SOURCE_UNSPECIFIED: HintSource
HINT_SOURCE_DRAFT: HintSource
HINT_SOURCE_HEAD: HintSource
HINT_SOURCE_LOOKUP: HintSource
HINT_SOURCE_PREDICTION: HintSource
HINT_SOURCE_GRAMMAR: HintSource
HINT_SOURCE_MEMORY: HintSource

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "num_logprobs", "num_prompt_logprobs", "logprobs_mode", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    typical_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    num_logprobs: int
    num_prompt_logprobs: int
    logprobs_mode: LogprobsMode
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., typical_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., logprobs_mode: _Optional[_Union[LogprobsMode, str]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "lark", "any_whitespace")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    ANY_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    any_whitespace: bool
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., any_whitespace: _Optional[bool] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "rank", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("enabled", "num_speculative_tokens", "acceptance_rule", "num_draft_probs", "draft_probs_bits", "plain", "always")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RULE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_BITS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    ALWAYS_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    num_speculative_tokens: int
    acceptance_rule: AcceptanceRule
    num_draft_probs: int
    draft_probs_bits: int
    plain: bool
    always: bool
    def __init__(self, enabled: _Optional[bool] = ..., num_speculative_tokens: _Optional[int] = ..., acceptance_rule: _Optional[_Union[AcceptanceRule, str]] = ..., num_draft_probs: _Optional[int] = ..., draft_probs_bits: _Optional[int] = ..., plain: _Optional[bool] = ..., always: _Optional[bool] = ...) -> None: ...

class Objective(_message.Message):
    __slots__ = ("ttft_ms", "tpot_ms")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    tpot_ms: float
    def __init__(self, ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("num_steps", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_stale_hints", "acceptance_histogram", "draft_length_histogram", "num_hint_bytes", "num_forced_tokens", "num_lookup_tokens", "num_outcomes", "num_predicted_outcomes", "num_ready_outcomes", "num_late_hints", "num_prediction_tokens", "num_accepted_prediction_tokens", "num_head_tokens", "num_accepted_head_tokens", "num_memory_tokens")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STALE_HINTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    NUM_HINT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTED_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_HINTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_HEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_MEMORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_stale_hints: int
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    draft_length_histogram: _containers.RepeatedScalarFieldContainer[int]
    num_hint_bytes: int
    num_forced_tokens: int
    num_lookup_tokens: int
    num_outcomes: int
    num_predicted_outcomes: int
    num_ready_outcomes: int
    num_late_hints: int
    num_prediction_tokens: int
    num_accepted_prediction_tokens: int
    num_head_tokens: int
    num_accepted_head_tokens: int
    num_memory_tokens: int
    def __init__(self, num_steps: _Optional[int] = ..., num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., num_stale_hints: _Optional[int] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., draft_length_histogram: _Optional[_Iterable[int]] = ..., num_hint_bytes: _Optional[int] = ..., num_forced_tokens: _Optional[int] = ..., num_lookup_tokens: _Optional[int] = ..., num_outcomes: _Optional[int] = ..., num_predicted_outcomes: _Optional[int] = ..., num_ready_outcomes: _Optional[int] = ..., num_late_hints: _Optional[int] = ..., num_prediction_tokens: _Optional[int] = ..., num_accepted_prediction_tokens: _Optional[int] = ..., num_head_tokens: _Optional[int] = ..., num_accepted_head_tokens: _Optional[int] = ..., num_memory_tokens: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "model_name", "tokenizer_fingerprint", "vocab_size", "max_model_len", "max_num_seqs", "dtype", "incarnation", "num_model_parameters", "max_num_waiting", "weights_fingerprint", "numerics", "stalled_ms", "num_speculative_tokens", "engine", "num_mask_tokens", "head_fingerprint")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_MODEL_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    STALLED_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NUM_MASK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    model_name: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    dtype: str
    incarnation: str
    num_model_parameters: int
    max_num_waiting: int
    weights_fingerprint: str
    numerics: str
    stalled_ms: int
    num_speculative_tokens: int
    engine: str
    num_mask_tokens: int
    head_fingerprint: str
    def __init__(self, worker_id: _Optional[str] = ..., model_name: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., dtype: _Optional[str] = ..., incarnation: _Optional[str] = ..., num_model_parameters: _Optional[int] = ..., max_num_waiting: _Optional[int] = ..., weights_fingerprint: _Optional[str] = ..., numerics: _Optional[str] = ..., stalled_ms: _Optional[int] = ..., num_speculative_tokens: _Optional[int] = ..., engine: _Optional[str] = ..., num_mask_tokens: _Optional[int] = ..., head_fingerprint: _Optional[str] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
