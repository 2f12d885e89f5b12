"""The fields that completions and chat completions share, and what they mean for sampling. Pure.

Bounds are those of `SamplingParams`, which checks itself; here they get the names that HTTP clients know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coordinator.body_parts import FIRST_ERROR_ONLY, Body, Listed
from coordinator.generation_request import (
    ASKED_SALT_CHARS_MAX,
    CANARY_KEY_CHARS_MAX,
    PRIORITY_MAX,
    TENANT_CHARS_MAX,
    UINT32_MAX,
)
from coordinator.structured_output import ResponseFormat, StructuredOutputs
from outrider.errors import InvalidRequest
from outrider.sampling_params import AcceptanceRule, GrammarSpec, SamplingParams, SpeculationSettings


class StreamOptions(Body):
    include_usage: bool = False
    include_event_ids: bool = False  # by which the stream can be resumed; some clients cannot read them


class Speculation(Body):
    enabled: bool = True  # False: nothing is fed ahead of time, not even tokens that a grammar forces
    always: bool = False  # even where it does not pay: for audits and tests
    num_speculative_tokens: int = 0  # most hints verified per step; 0 leaves it to the target
    acceptance_rule: Literal["block", "token"] = "block"
    num_draft_probs: int = 0  # entries of a hint's distribution; 0 leaves it to the draft worker
    draft_probs_bits: int = 0  # their precision; 0 leaves it to the draft worker
    detail: bool = False  # token ids, origins and text pieces in every chunk, per-step counts at the end

    def to_settings(self) -> SpeculationSettings:
        """Raises InvalidRequest for a value out of its bounds."""
        return SpeculationSettings(
            enabled=self.enabled,
            num_speculative_tokens=self.num_speculative_tokens,
            acceptance_rule=AcceptanceRule[self.acceptance_rule.upper()],
            num_draft_probs=self.num_draft_probs,
            draft_probs_bits=self.draft_probs_bits,
            is_plain=not self.enabled,
            is_always=self.always,
        )


class GenerationBody(Body):
    """What completions and chat completions share."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]]

    model: str = ""
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 and -1 keep all
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], FIRST_ERROR_ONLY] | None = None  # by token id
    bad_words: Listed[str] | None = None
    allowed_token_ids: Listed[int] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=TENANT_CHARS_MAX)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=CANARY_KEY_CHARS_MAX)] | None = (
        None  # picks a canary's arm
    )
    # The prompt shares its KV with the tenant's requests of the same salt alone.
    cache_salt: Annotated[str, Field(min_length=1, max_length=ASKED_SALT_CHARS_MAX)] | None = None
    priority: Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None  # lower goes first
    deadline_ms: Annotated[int, Field(ge=1, le=UINT32_MAX)] | None = None  # of the whole answer, from arrival
    request_id: str | None = None
    return_token_ids: bool | None = None
    speculation: Speculation = Field(default_factory=Speculation)

    @property
    def is_streaming(self) -> bool:
        return bool(self.stream)

    @property
    def includes_event_ids(self) -> bool:
        """Whether a client that loses its connection means to come back."""
        return self.stream_options is not None and self.stream_options.include_event_ids

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def common_input(self, request_id: str, num_logprobs: int | None, logprobs_name: str) -> dict[str, Any]:
        """Fields of a GenerationInput. Raises InvalidRequest; `logprobs_name` is what asked for `num_logprobs`."""
        grammar, grammar_parameter = self._grammar()
        try:
            sampling, speculation = self._sampling(num_logprobs, grammar), self.speculation.to_settings()
        except InvalidRequest as error:
            raise _in_the_clients_words(error, logprobs_name) from error
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "request_id": request_id,
            "model": self.model,
            "sampling": sampling,
            "grammar_parameter": grammar_parameter,
            "bad_words": tuple(self.bad_words or ()),
            "n": 1 if self.n is None else self.n,
            "stop": tuple(stop),
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "speculation": speculation,
            "is_detailed": self.speculation.detail,
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
            seed=self.seed,
            max_tokens=UINT32_MAX,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            are_logprobs_processed=self.logprobs_mode == "processed",
            grammar=grammar,
        )

    def _grammar(self) -> tuple[GrammarSpec | None, str]:
        """The grammar asked for and the parameter that asked. Raises InvalidRequest when there are two."""
        asked: dict[str, GrammarSpec] = {}
        for name in ("response_format", "structured_outputs"):
            wish: ResponseFormat | StructuredOutputs | None = getattr(self, name)
            try:
                grammar = None if wish is None else wish.to_grammar()
            except InvalidRequest as error:
                if error.parameter != "grammar":
                    raise
                raise InvalidRequest(name, f"{name}: {error.message}") from error
            if grammar is not None:
                asked[name] = grammar
        if len(asked) > 1:
            raise InvalidRequest(
                "structured_outputs", "structured_outputs and response_format both say what the output may be"
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


def _in_the_clients_words(error: InvalidRequest, logprobs_name: str) -> InvalidRequest:
    """The same error under the name that the parameter has over HTTP."""
    words = {"num_logprobs": logprobs_name, "num_prompt_logprobs": "prompt_logprobs"}
    words |= {name: f"speculation.{name}" for name in Speculation.model_fields}
    ours = error.parameter or ""
    theirs = words.get(ours, ours)
    return InvalidRequest(theirs or None, error.message.replace(ours, theirs, 1) if ours else error.message)
