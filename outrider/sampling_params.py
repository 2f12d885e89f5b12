"""What a request asks of sampling, checked. Pure; shared by every process."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from outrider.errors import InvalidRequest
from protos.outrider.v1 import common_pb2

MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_ALLOWED_TOKEN_IDS = 65536
MAX_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_SPECULATIVE_TOKENS = 32
MAX_DRAFT_PROBS = 64
FLOAT32_ZERO_MAX = 2.0**-150  # float32 rounds this and everything nearer to 0 to it


class DecodingMode(enum.Enum):
    """How committed tokens are decided (design section 5)."""

    GREEDY = common_pb2.DECODING_MODE_GREEDY
    REJECTION = common_pb2.DECODING_MODE_REJECTION
    COUPLED = common_pb2.DECODING_MODE_COUPLED


class AcceptanceRule(enum.Enum):
    """How rejection mode decides what holds of a block of hints."""

    BLOCK = common_pb2.ACCEPTANCE_RULE_BLOCK  # as a whole, Sun et al. 2403.10444
    TOKEN = common_pb2.ACCEPTANCE_RULE_TOKEN  # token by token, Leviathan et al. 2211.17192


class GrammarKind(enum.Enum):
    """The language a grammar is written in; the value is the field of outrider.v1.Grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output may be. Whether the text makes sense is found out when it is compiled (`outrider.grammar`)."""

    kind: GrammarKind
    text: str
    any_whitespace: bool = False  # JSON only: not just ", " and ": " between its parts

    def __post_init__(self) -> None:
        if len(self.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest("grammar", f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes")

    @classmethod
    def from_proto(cls, message: common_pb2.Grammar) -> GrammarSpec:
        kind = message.WhichOneof("kind")
        if kind is None:
            raise InvalidRequest("grammar", "grammar needs one of json_schema, regex and lark")
        return cls(GrammarKind(kind), getattr(message, kind), message.any_whitespace)

    def to_proto(self) -> common_pb2.Grammar:
        message = common_pb2.Grammar(any_whitespace=self.any_whitespace)
        setattr(message, self.kind.value, self.text)
        return message


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked on construction; raises InvalidRequest, which names the field and its range.

    Meaning and order of application are told in `protos/outrider/v1/common.proto`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), by token id
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: frozenset[int] = frozenset()  # empty: all
    min_tokens: int = 0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    are_logprobs_processed: bool = False
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0 <= self.temperature <= 2.0, "0 to 2")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, at most 1")
        _check("top_k", self.top_k, self.top_k >= 0, "at least 0 (0 keeps all)")
        _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 to 1")
        _check("typical_p", self.typical_p, 0.0 < self.typical_p <= 1.0, "above 0, at most 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2.0 <= value <= 2.0, "-2 to 2")
        _check(
            "repetition_penalty", self.repetition_penalty, 0.0 < self.repetition_penalty <= 10.0,
            "above 0, at most 10",
        )  # fmt: skip
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _check("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "0 to max_tokens")
        if self.seed is not None:
            _check("seed", self.seed, 0 <= self.seed < 2**64, "0 to 2^64 - 1")
        for name in ("num_logprobs", "num_prompt_logprobs"):
            value = getattr(self, name)
            _check(name, value or 0, 0 <= (value or 0) <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        for _, bias in self.logit_bias:
            _check("logit_bias", bias, -100.0 <= bias <= 100.0, "-100 to 100")
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        _check_count("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
        _check_count("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        for word in self.bad_words:
            if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    "bad_words",
                    f"a word of bad_words has {len(word)} tokens; permitted: 1 to {MAX_BAD_WORD_TOKENS}",
                )

    @property
    def decoding_mode(self) -> DecodingMode:
        if self.temperature == 0.0:
            return DecodingMode.GREEDY
        return DecodingMode.REJECTION if self.seed is None else DecodingMode.COUPLED

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest when a token id is outside the model's vocabulary."""
        for name, token_ids in (
            ("logit_bias", [token_id for token_id, _ in self.logit_bias]),
            ("bad_words", [token_id for word in self.bad_words for token_id in word]),
            ("allowed_token_ids", self.allowed_token_ids),
            ("stop_token_ids", self.stop_token_ids),
        ):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                raise InvalidRequest(
                    name, f"{name} names a token outside the vocabulary; permitted: 0 to {vocab_size - 1}"
                )

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> SamplingParams:
        check_counts(message)
        if message.logprobs_mode not in common_pb2.LogprobsMode.values():
            raise InvalidRequest("logprobs_mode", f"logprobs_mode {message.logprobs_mode} is not known here")
        return cls(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            min_p=message.min_p,
            typical_p=message.typical_p if message.HasField("typical_p") else 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
            logit_bias=tuple(sorted(message.logit_bias.items())),
            bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
            allowed_token_ids=frozenset(message.allowed_token_ids),
            min_tokens=message.min_tokens,
            seed=message.seed if message.HasField("seed") else None,
            max_tokens=message.max_tokens,
            stop_token_ids=frozenset(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
            num_prompt_logprobs=(
                message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None
            ),
            are_logprobs_processed=message.logprobs_mode == common_pb2.LOGPROBS_MODE_PROCESSED,
            grammar=GrammarSpec.from_proto(message.grammar) if message.HasField("grammar") else None,
        )

    def to_proto(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            typical_p=self.typical_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=dict(self.logit_bias),
            bad_words=[common_pb2.TokenSequence(token_ids=word) for word in self.bad_words],
            allowed_token_ids=sorted(self.allowed_token_ids),
            min_tokens=self.min_tokens,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop_token_ids=sorted(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
            logprobs_mode=(
                common_pb2.LOGPROBS_MODE_PROCESSED
                if self.are_logprobs_processed
                else common_pb2.LOGPROBS_MODE_RAW
            ),
            grammar=None if self.grammar is None else self.grammar.to_proto(),
        )


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Whether and how far a request's hints are verified. Checked on construction; raises InvalidRequest."""

    enabled: bool = True  # False: hints are not listened to
    num_speculative_tokens: int = 0  # most hints fed per step; 0: the worker's own limit
    acceptance_rule: AcceptanceRule = AcceptanceRule.BLOCK
    num_draft_probs: int = 0  # entries of a hint's distribution; 0: the draft worker's choice
    draft_probs_bits: int = 0  # their precision; 0: the draft worker's choice
    is_plain: bool = False  # nothing is fed ahead of time, tokens that the grammar forces included
    is_always: bool = False  # no controller may find that it does not pay, for audits and tests

    def __post_init__(self) -> None:
        _check(
            "num_speculative_tokens",
            self.num_speculative_tokens,
            0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS,
            f"0 to {MAX_SPECULATIVE_TOKENS}",
        )
        _check(
            "num_draft_probs",
            self.num_draft_probs,
            0 <= self.num_draft_probs <= MAX_DRAFT_PROBS,
            f"0 to {MAX_DRAFT_PROBS}",
        )
        bits = self.draft_probs_bits
        _check("draft_probs_bits", bits, bits == 0 or 4 <= bits <= 16, "0, or 4 to 16")

    @classmethod
    def from_proto(cls, message: common_pb2.SpeculationParams) -> SpeculationSettings:
        try:
            acceptance_rule = AcceptanceRule(message.acceptance_rule)
        except ValueError:
            raise InvalidRequest(
                "acceptance_rule", f"acceptance_rule {message.acceptance_rule} is not known here"
            ) from None
        return cls(
            message.enabled,
            message.num_speculative_tokens,
            acceptance_rule,
            message.num_draft_probs,
            message.draft_probs_bits,
            message.plain,
            message.always,
        )

    def to_proto(self) -> common_pb2.SpeculationParams:
        return common_pb2.SpeculationParams(
            enabled=self.enabled,
            num_speculative_tokens=self.num_speculative_tokens,
            acceptance_rule=self.acceptance_rule.value,
            num_draft_probs=self.num_draft_probs,
            draft_probs_bits=self.draft_probs_bits,
            plain=self.is_plain,
            always=self.is_always,
        )


def _check(name: str, value: float, holds: bool, permitted: str) -> None:
    # A client's integer may be too large for a float, and its float too small for the workers', which would read 0.
    is_readable = isinstance(value, int) or (
        math.isfinite(value) and not 0.0 < abs(value) <= FLOAT32_ZERO_MAX
    )
    if not holds or not is_readable:
        shown = str(value) if isinstance(value, int) else f"{value:g}"
        raise InvalidRequest(name, f"{name} is {shown}; permitted: {permitted}")


def check_counts(message: common_pb2.SamplingParams) -> None:
    """Before anything of it is copied: a megabyte may hold half a million words of nothing. Raises InvalidRequest."""
    _check_count("logit_bias", len(message.logit_bias), MAX_LOGIT_BIAS)
    _check_count("bad_words", len(message.bad_words), MAX_BAD_WORDS)
    # Ids may come twice.
    _check_count("stop_token_ids", len(message.stop_token_ids), MAX_ALLOWED_TOKEN_IDS)
    _check_count("allowed_token_ids", len(message.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
    for word in message.bad_words:
        _check_count("bad_words", len(word.token_ids), MAX_ALLOWED_TOKEN_IDS)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(name, f"{name} has {count} entries; permitted: at most {most}")
