"""The fields that completions and chat completions share, and their conversion to sampling parameters. Pure.

`SamplingParams` checks its bounds itself; errors are renamed here to the parameters of the HTTP API.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from coordinator.api.schema.body_parts import FIRST_ERROR_ONLY, Body, Listed, TokenId, described
from coordinator.api.schema.chat_messages import ContentPart
from coordinator.api.schema.structured_output import ResponseFormat, StructuredOutputs
from coordinator.intake.generation_request import (
    ASKED_SALT_CHARS_MAX,
    BAD_WORD_CHARS_MAX,
    CANARY_KEY_CHARS_MAX,
    CHOICES_BOUNDS,
    MAX_TOKENS_BOUNDS,
    PRIORITY_MAX,
    PROMPT_BYTES_MAX,
    PROMPT_TOKENS_MAX,
    REQUEST_ID_CHARS_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    TENANT_CHARS_MAX,
)
from outrider.errors import InvalidRequest
from outrider.objective import NO_OBJECTIVE, OBJECTIVE_MS_BOUNDS, Objective
from outrider.sampling_params import (
    BOUNDS,
    DRAFT_PROBS_BITS,
    LOGIT_BIAS_BOUNDS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SPECULATION_BOUNDS,
    UINT32_MAX,
    UINT64_MAX,
    AcceptanceRule,
    Bounds,
    GrammarSpec,
    SamplingParams,
    SpeculationSettings,
)


def _at_most(count: int, **schema: Any) -> Any:
    """Entries that are told twice count once, which no keyword says."""
    return described(description=f"at most {count} different ones", **schema)


_Bias = Annotated[float, described(LOGIT_BIAS_BOUNDS)]
_TOKEN_NAMES: Final = _at_most(MAX_LOGIT_BIAS, propertyNames={"pattern": "^[0-9]{1,10}$"})
SEED_BOUNDS: Final = Bounds(-(1 << 63), UINT64_MAX)
_TRUNCATION_BOUNDS: Final = Bounds(-1, PROMPT_TOKENS_MAX)
_BadWord = Annotated[str, described(minLength=1, maxLength=BAD_WORD_CHARS_MAX)]
_StopString = Annotated[str, described(minLength=1, maxLength=STOP_STRING_CHARS_MAX)]
Logprobs = Annotated[int, described(BOUNDS["num_logprobs"])]


class StreamOptions(Body):
    include_usage: bool = Field(default=False, description="a last chunk has the usage")
    continuous_usage_stats: bool = Field(
        default=False, description="with `include_usage`, each chunk has the usage until then"
    )
    include_obfuscation: bool | None = Field(default=None, description="accepted and not used: nothing is padded")
    include_event_ids: bool = Field(
        default=False,
        description="each event has an id, by which the stream can be resumed; some clients cannot parse ids",
    )


class Speculation(Body):
    enabled: bool = Field(default=True, description="false: no hint is verified, not even tokens that a grammar forces")
    always: bool = Field(default=False, description="verifies hints even where that does not pay, for audits and tests")
    num_speculative_tokens: Annotated[int, described(SPECULATION_BOUNDS["num_speculative_tokens"])] = Field(
        default=0, description="most hints verified per step; 0 leaves it to the target"
    )
    acceptance_rule: Literal["block", "token"] = Field(
        default="block",
        description="rejection sampling: whether hints are accepted as a block or one by one; `token` asks for it",
    )
    num_draft_probs: Annotated[int, described(SPECULATION_BOUNDS["num_draft_probs"])] = Field(
        default=0, description="entries of a hint's distribution in rejection sampling; 0 does not ask for any"
    )
    draft_probs_bits: Annotated[int, described(enum=[*DRAFT_PROBS_BITS])] = Field(
        default=0, description="bits of each entry; 0 leaves them to the draft worker"
    )
    detail: bool = Field(
        default=False,
        description="adds token ids, their origins and pieces of text to each chunk, counts of each step at the end",
    )

    def to_settings(self) -> SpeculationSettings:
        """Converts the settings. Raises InvalidRequest for a value out of bounds."""
        return SpeculationSettings(
            enabled=self.enabled,
            num_speculative_tokens=self.num_speculative_tokens,
            acceptance_rule=AcceptanceRule[self.acceptance_rule.upper()],
            num_draft_probs=self.num_draft_probs,
            draft_probs_bits=self.draft_probs_bits,
            is_plain=not self.enabled,
            is_always=self.always,
        )


class ServiceLevelObjective(Body):
    """The times that the request aims at. It is counted as met or missed, and never ended or refused for it."""

    ttft_ms: Annotated[float, described(OBJECTIVE_MS_BOUNDS)] | None = Field(
        default=None, description="milliseconds from arrival to the first token"
    )
    tpot_ms: Annotated[float, described(OBJECTIVE_MS_BOUNDS)] | None = Field(
        default=None, description="milliseconds per output token after the first, on average"
    )

    def to_objective(self) -> Objective:
        """Converts the times. Raises InvalidRequest for one out of bounds."""
        asked = {name: value for name in self.__class__.model_fields if (value := getattr(self, name)) is not None}
        for name, value in asked.items():
            OBJECTIVE_MS_BOUNDS.check(f"slo.{name}", value)
        return Objective(**asked)


class Prediction(Body):
    """The output that the client expects, such as a file before an edit. It makes the answer faster if it comes true,
    and never changes it."""

    type: Literal["content"] = Field(description="always `content`")
    content: str | Listed[ContentPart] = Field(
        description=f"text of at most {PROMPT_BYTES_MAX} bytes, or parts of it, which follow each other"
    )

    def to_text(self) -> str:
        """Returns the predicted text. Raises InvalidRequest for a part that is not text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.to_text(f"prediction.content[{index}]") for index, part in enumerate(self.content))


class GenerationBody(Body):
    """The fields that completions and chat completions share."""

    model: str = ""
    max_tokens: (
        Annotated[int, described(MAX_TOKENS_BOUNDS, description="0 only with echo or prompt_logprobs")] | None
    ) = None
    min_tokens: Annotated[int, described(MAX_TOKENS_BOUNDS)] | None = None
    temperature: Annotated[float, described(BOUNDS["temperature"])] | None = None
    top_p: Annotated[float, described(BOUNDS["top_p"])] | None = None
    top_k: Annotated[int, described(Bounds(-1, UINT32_MAX), description="0 and -1 keep all")] | None = None
    min_p: Annotated[float, described(BOUNDS["min_p"])] | None = None
    typical_p: Annotated[float, described(BOUNDS["typical_p"])] | None = None
    presence_penalty: Annotated[float, described(BOUNDS["presence_penalty"])] | None = None
    frequency_penalty: Annotated[float, described(BOUNDS["frequency_penalty"])] | None = None
    repetition_penalty: Annotated[float, described(BOUNDS["repetition_penalty"])] | None = None
    logit_bias: Annotated[dict[str, _Bias], FIRST_ERROR_ONLY, _TOKEN_NAMES] | None = None
    bad_words: Annotated[Listed[_BadWord], described(maxItems=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[Listed[TokenId], _at_most(MAX_ALLOWED_TOKEN_IDS, minItems=1)] | None = None
    seed: Annotated[int, described(SEED_BOUNDS, description="modulo 2^64")] | None = None
    n: Annotated[int, described(CHOICES_BOUNDS)] | None = None
    stop: _StopString | Annotated[Listed[_StopString], described(maxItems=STOP_STRINGS_MAX)] | None = None
    stop_token_ids: Annotated[Listed[TokenId], _at_most(MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Logprobs | None = None
    truncate_prompt_tokens: Annotated[int, described(_TRUNCATION_BOUNDS)] | None = Field(
        default=None, description="only the last tokens of the prompt are used; -1: as many as the context permits"
    )
    logprobs_mode: Literal["raw", "processed"] = "raw"
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=TENANT_CHARS_MAX)] | None = None
    # Selects the arm of a canary.
    prompt_cache_key: Annotated[str, Field(max_length=CANARY_KEY_CHARS_MAX)] | None = None
    # The prompt shares its KV only with the tenant's requests of the same salt.
    cache_salt: Annotated[str, Field(min_length=1, max_length=ASKED_SALT_CHARS_MAX)] | None = None
    priority: Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None  # lower goes first
    deadline_ms: Annotated[int, Field(ge=1, le=UINT32_MAX)] | None = None  # of the whole answer, from arrival
    request_id: Annotated[str, described(pattern=f"^[ -~]{{0,{REQUEST_ID_CHARS_MAX}}}$")] | None = None
    return_token_ids: bool | None = None
    speculation: Speculation = Field(default_factory=Speculation)
    slo: ServiceLevelObjective | None = None
    prediction: Prediction | None = None

    def common_input(self, request_id: str, num_logprobs: int | None, logprobs_name: str) -> dict[str, Any]:
        """Builds fields of a GenerationInput; `logprobs_name` is what set `num_logprobs`. Raises InvalidRequest."""
        grammar, grammar_parameter = self._grammar()
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequest("stream_options", "stream_options needs stream: true")
            if self.stream_options.include_obfuscation:
                self.ignore("stream_options.include_obfuscation")
        if self.prediction is not None and not self.speculation.enabled:
            self.ignore("prediction")
        if self.truncate_prompt_tokens is not None:
            _TRUNCATION_BOUNDS.check("truncate_prompt_tokens", self.truncate_prompt_tokens)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequest("truncate_prompt_tokens", "truncate_prompt_tokens is 0; permitted: -1, or a count")
        if self.seed is not None:
            SEED_BOUNDS.check("seed", self.seed)
        try:
            sampling, speculation = self._sampling(num_logprobs, grammar), self.speculation.to_settings()
        except InvalidRequest as error:
            raise _with_http_name(error, logprobs_name) from error
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "request_id": request_id,
            "model": self.model,
            "sampling": sampling,
            "grammar_parameter": grammar_parameter,
            "bad_words": tuple(self.bad_words or ()),
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "n": 1 if self.n is None else self.n,
            "stop": tuple(stop),
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "speculation": speculation,
            "is_detailed": self.speculation.detail,
            "objective": NO_OBJECTIVE if self.slo is None else self.slo.to_objective(),
            "prediction": None if self.prediction is None else self.prediction.to_text(),
            "tenant": self.user or "",
            "cache_salt": self.cache_salt or "",
            "canary_key": self.prompt_cache_key or self.user or "",
            "priority": self.priority or 0,
            "deadline_s": None if self.deadline_ms is None else self.deadline_ms / 1e3,
        }

    def _sampling(self, num_logprobs: int | None, grammar: GrammarSpec | None) -> SamplingParams:
        if self.allowed_token_ids == []:
            raise InvalidRequest("allowed_token_ids", "allowed_token_ids must hold at least one token id")
        given = {
            name: value
            for name in (
                "temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
                "repetition_penalty", "min_tokens",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        return SamplingParams(
            **given,
            top_k=0 if self.top_k in (None, -1) else self.top_k or 0,
            logit_bias=_read_logit_bias(self.logit_bias or {}),
            allowed_token_ids=frozenset(self.allowed_token_ids or ()),
            seed=None if self.seed is None else self.seed & UINT64_MAX,
            max_tokens=UINT32_MAX,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            are_logprobs_processed=self.logprobs_mode == "processed",
            grammar=grammar,
        )

    def _grammar(self) -> tuple[GrammarSpec | None, str]:
        """Returns the grammar and the parameter that set it. Raises InvalidRequest if both parameters set one."""
        asked: dict[str, GrammarSpec] = {}
        for name in ("response_format", "structured_outputs"):
            output_format: ResponseFormat | StructuredOutputs | None = getattr(self, name)
            try:
                grammar = None if output_format is None else output_format.to_grammar()
            except InvalidRequest as error:
                if error.parameter != "grammar":
                    raise
                raise InvalidRequest(name, f"{name}: {error.message}") from error
            if grammar is not None:
                asked[name] = grammar
        if len(asked) > 1:
            raise InvalidRequest(
                "structured_outputs", "structured_outputs and response_format both constrain the output"
            )
        name, grammar = next(iter(asked.items()), ("grammar", None))
        return grammar, name


def _read_logit_bias(by_name: dict[str, float]) -> tuple[tuple[int, float], ...]:
    bias: dict[int, float] = {}
    for name, value in by_name.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise InvalidRequest("logit_bias", f"logit_bias: {name!r} is not a token id")
        bias[int(name)] = value
    return tuple(sorted(bias.items()))


def _with_http_name(error: InvalidRequest, logprobs_name: str) -> InvalidRequest:
    """Renames an error's parameter to its name in the HTTP API."""
    names = {"num_logprobs": logprobs_name, "num_prompt_logprobs": "prompt_logprobs"}
    names |= {name: f"speculation.{name}" for name in Speculation.model_fields}
    ours = error.parameter or ""
    theirs = names.get(ours, ours)
    return InvalidRequest(theirs or None, error.message.replace(ours, theirs, 1) if ours else error.message)
