"""Validated sampling and speculation parameters of a request. Pure; shared by every process.

The bounds of its parameters stand here alone: every process checks by them, and the OpenAPI document tells them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Final

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
BACKGROUND_PRIORITY: Final = 1001
"""Priority of what runs for no waiting client, behind all that clients may ask for."""
UINT32_MAX: Final = (1 << 32) - 1
UINT64_MAX: Final = (1 << 64) - 1
FLOAT32_ZERO_MAX = 2.0**-150  # float32 rounds this and everything nearer to 0 to it


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers that a parameter may be."""

    lowest: int
    highest: int
    is_open: bool = False  # `lowest` itself is not permitted

    def __str__(self) -> str:
        permitted = f"{self.lowest} to {self.highest}"
        return f"above {self.lowest}, at most {self.highest}" if self.is_open else permitted

    def check(self, name: str, value: float) -> None:
        """Raises InvalidRequest."""
        is_above = self.lowest < value if self.is_open else self.lowest <= value
        _check(name, value, is_above and value <= self.highest, str(self))

    @property
    def schema(self) -> dict[str, float]:
        """The same as JSON Schema has it."""
        lowest: dict[str, float] = (
            {"exclusiveMinimum": self.lowest or FLOAT32_ZERO_MAX} if self.is_open else {"minimum": self.lowest}
        )
        return {**lowest, "maximum": self.highest}


BOUNDS: Final[Mapping[str, Bounds]] = {
    "temperature": Bounds(0, 2),
    "top_p": Bounds(0, 1),
    "top_k": Bounds(0, UINT32_MAX),
    "min_p": Bounds(0, 1),
    "typical_p": Bounds(0, 1, is_open=True),
    "presence_penalty": Bounds(-2, 2),
    "frequency_penalty": Bounds(-2, 2),
    "repetition_penalty": Bounds(0, 10, is_open=True),
    "max_tokens": Bounds(1, UINT32_MAX),
    "seed": Bounds(0, UINT64_MAX),
    "num_logprobs": Bounds(0, MAX_LOGPROBS),
    "num_prompt_logprobs": Bounds(0, MAX_LOGPROBS),
}
LOGIT_BIAS_BOUNDS: Final = Bounds(-100, 100)
SPECULATION_BOUNDS: Final[Mapping[str, Bounds]] = {
    "num_speculative_tokens": Bounds(0, MAX_SPECULATIVE_TOKENS),
    "num_draft_probs": Bounds(0, MAX_DRAFT_PROBS),
}
DRAFT_PROBS_BITS: Final = (0, *range(4, 17))  # of a hint's distribution; 0: the draft worker's choice


class DecodingMode(enum.Enum):
    """How committed tokens are chosen."""

    GREEDY = common_pb2.DECODING_MODE_GREEDY
    REJECTION = common_pb2.DECODING_MODE_REJECTION
    COUPLED = common_pb2.DECODING_MODE_COUPLED


class Exactness(enum.Enum):
    """The part of an output that is a function of its request: its tokens, or only their distribution."""

    TOKENS = common_pb2.EXACTNESS_TOKENS
    DISTRIBUTION = common_pb2.EXACTNESS_DISTRIBUTION

    @classmethod
    def of(cls, mode: DecodingMode) -> Exactness:
        """The exactness of an engine whose logits depend on nothing but the tokens before them."""
        return cls.DISTRIBUTION if mode is DecodingMode.REJECTION else cls.TOKENS


class AcceptanceRule(enum.Enum):
    """How rejection mode decides which hints of a block are accepted."""

    BLOCK = common_pb2.ACCEPTANCE_RULE_BLOCK  # as a whole, Sun et al. 2403.10444
    TOKEN = common_pb2.ACCEPTANCE_RULE_TOKEN  # token by token, Leviathan et al. 2211.17192


class GrammarKind(enum.Enum):
    """The language of a grammar; the value is the field of outrider.v1.Grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar for the output. Its syntax is checked when it is compiled (`outrider.grammar`)."""

    kind: GrammarKind
    text: str
    any_whitespace: bool = False  # JSON only: whitespace in bounded runs, not just ", " and ": "

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


# Of `SamplingParams` and its message alike; the optional ones may be left out of a message.
_PLAIN_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                        "min_tokens", "max_tokens", "ignore_eos")  # fmt: skip
_OPTIONAL_FIELDS: Final = ("typical_p", "repetition_penalty", "seed", "num_logprobs", "num_prompt_logprobs")
_SPECULATION_FIELDS: Final = ("enabled", "num_speculative_tokens", "num_draft_probs", "draft_probs_bits")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, checked on construction; InvalidRequest names the field and its range.

    `protos/outrider/v1/common.proto` documents their meaning and order of application.
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
        for name, bounds in BOUNDS.items():
            value = getattr(self, name)
            if value is not None:
                bounds.check(name, value)
        _check("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "0 to max_tokens")
        for _, bias in self.logit_bias:
            LOGIT_BIAS_BOUNDS.check("logit_bias", bias)
        check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
        check_count("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        check_count("bad_words", self.bad_words, MAX_BAD_WORDS)
        for word in self.bad_words:
            if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    "bad_words",
                    f"a word of bad_words has {len(word)} tokens; permitted: 1 to {MAX_BAD_WORD_TOKENS}",
                )

    @property
    def decoding_mode(self) -> DecodingMode:
        if 0.0 in (self.temperature, self.top_p):  # a top_p of 0 leaves the likeliest token alone
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
        """Converts a coordinator's message, which has every plain field; an unset one is 0, for releases before
        explicit presence leave zeros out. Raises InvalidRequest."""
        check_counts(message)
        if message.logprobs_mode not in common_pb2.LogprobsMode.values():
            raise InvalidRequest("logprobs_mode", f"logprobs_mode {message.logprobs_mode} is not known here")
        return cls(
            **{name: getattr(message, name) for name in _PLAIN_FIELDS},
            **{name: getattr(message, name) for name in _OPTIONAL_FIELDS if message.HasField(name)},
            logit_bias=tuple(sorted(message.logit_bias.items())),
            bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
            allowed_token_ids=frozenset(message.allowed_token_ids),
            stop_token_ids=frozenset(message.stop_token_ids),
            are_logprobs_processed=message.logprobs_mode == common_pb2.LOGPROBS_MODE_PROCESSED,
            grammar=GrammarSpec.from_proto(message.grammar) if message.HasField("grammar") else None,
        )

    def to_proto(self) -> common_pb2.SamplingParams:
        is_processed = self.are_logprobs_processed
        return common_pb2.SamplingParams(
            **{name: getattr(self, name) for name in (*_PLAIN_FIELDS, *_OPTIONAL_FIELDS)},
            logit_bias=dict(self.logit_bias),
            bad_words=[common_pb2.TokenSequence(token_ids=word) for word in self.bad_words],
            allowed_token_ids=sorted(self.allowed_token_ids),
            stop_token_ids=sorted(self.stop_token_ids),
            logprobs_mode=(common_pb2.LOGPROBS_MODE_PROCESSED if is_processed else common_pb2.LOGPROBS_MODE_RAW),
            grammar=None if self.grammar is None else self.grammar.to_proto(),
        )


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Whether and how far a request's hints are verified. Checked on construction; raises InvalidRequest."""

    enabled: bool = True  # False: hints are not accepted
    num_speculative_tokens: int = 0  # most hints fed per step; 0: the worker's own limit
    acceptance_rule: AcceptanceRule = AcceptanceRule.BLOCK
    num_draft_probs: int = 0  # entries of a hint's distribution; 0: the draft worker's choice
    draft_probs_bits: int = 0  # their precision; 0: the draft worker's choice
    is_plain: bool = False  # nothing is fed ahead, not even tokens that the grammar forces
    is_always: bool = False  # speculates even where it does not pay, for audits and tests

    def __post_init__(self) -> None:
        for name, bounds in SPECULATION_BOUNDS.items():
            bounds.check(name, getattr(self, name))
        bits = self.draft_probs_bits
        _check("draft_probs_bits", bits, bits in DRAFT_PROBS_BITS, "0, or 4 to 16")

    @property
    def asks_for_rejection(self) -> bool:
        """Whether something is set that only rejection sampling has."""
        is_set = bool(self.num_draft_probs or self.draft_probs_bits)
        return is_set or self.acceptance_rule is not AcceptanceRule.BLOCK

    @classmethod
    def from_proto(cls, message: common_pb2.SpeculationParams) -> SpeculationSettings:
        """Converts a coordinator's message; `enabled` is false where it is unset. Raises InvalidRequest."""
        try:
            acceptance_rule = AcceptanceRule(message.acceptance_rule)
        except ValueError:
            raise InvalidRequest(
                "acceptance_rule", f"acceptance_rule {message.acceptance_rule} is not known here"
            ) from None
        return cls(
            **{name: getattr(message, name) for name in _SPECULATION_FIELDS},
            acceptance_rule=acceptance_rule,
            is_plain=message.plain,
            is_always=message.always,
        )

    def to_proto(self) -> common_pb2.SpeculationParams:
        return common_pb2.SpeculationParams(
            **{name: getattr(self, name) for name in _SPECULATION_FIELDS},
            acceptance_rule=self.acceptance_rule.value,
            plain=self.is_plain,
            always=self.is_always,
        )


def _check(name: str, value: float, holds: bool, permitted: str) -> None:
    # A client's integer may exceed a float, and its float may underflow to 0 in the workers' float32.
    is_readable = isinstance(value, int) or (math.isfinite(value) and not 0.0 < abs(value) <= FLOAT32_ZERO_MAX)
    if not holds or not is_readable:
        shown = str(value) if isinstance(value, int) else f"{value:g}"
        raise InvalidRequest(name, f"{name} is {shown}; permitted: {permitted}")


def check_counts(message: common_pb2.SamplingParams) -> None:
    """Before anything of it is copied: a megabyte may hold half a million words of nothing. Raises InvalidRequest."""
    check_count("logit_bias", message.logit_bias, MAX_LOGIT_BIAS)
    check_count("bad_words", message.bad_words, MAX_BAD_WORDS)
    # Ids may come twice.
    check_count("stop_token_ids", message.stop_token_ids, MAX_ALLOWED_TOKEN_IDS)
    check_count("allowed_token_ids", message.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
    for word in message.bad_words:
        check_count("bad_words", word.token_ids, MAX_ALLOWED_TOKEN_IDS)


def check_count(name: str, values: Sized, most: int) -> None:
    """Raises InvalidRequest."""
    if len(values) > most:
        raise InvalidRequest(name, f"{name} has {len(values)} entries; permitted: at most {most}")
