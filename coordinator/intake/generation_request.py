"""A generation request as every API hands it in, and the same request once it is checked and tokenized.

Pure. Both APIs use these types, so a bound applies to both or to neither. `outrider.sampling_params` checks sampling
parameters on construction; the rest is checked here.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.access.api_keys import ANYBODY, Caller
from coordinator.formats.answer_parts import ToolUse
from coordinator.formats.output_format import AnswerPlan
from coordinator.intake.cache_salt import cache_salt
from coordinator.intake.run_identity import RunIdentity, digest_of, prompt_digest
from coordinator.models.served_model import ServedModel
from coordinator.placement.routing import ModelKey
from outrider.canary.plan import ANY_DRAFT, Assignment, DraftChoice
from outrider.errors import ContextExceeded, InvalidRequest
from outrider.objective import NO_OBJECTIVE, Objective
from outrider.observability.tracing import NO_SPAN, Span
from outrider.sampling_params import (
    MAX_BAD_WORDS,
    UINT32_MAX,
    UINT64_MAX,
    Bounds,
    DecodingMode,
    SamplingParams,
    SpeculationSettings,
    check_count,
)
from outrider.security.tenants import tenant_digest

PROMPT_BYTES_MAX: Final = 1 << 20
PROMPT_TOKENS_MAX: Final = 1 << 18
"""Most token ids of a prompt: handling a prompt must not block the event loop for long."""
PROMPT_LOGPROBS_MAX: Final = 1 << 18
"""Most log probabilities of prompt tokens in one answer, because they are stored and written all at once."""
STOP_STRINGS_MAX: Final = 64
MESSAGES_MAX: Final = 16384
STOP_STRING_CHARS_MAX: Final = 256
BAD_WORD_CHARS_MAX: Final = 256
REQUEST_ID_CHARS_MAX: Final = 64
CHOICES_MAX: Final = 128
CHOICES_BOUNDS: Final = Bounds(1, CHOICES_MAX)
MAX_TOKENS_BOUNDS: Final = Bounds(0, UINT32_MAX)
PRIORITY_MAX: Final = 1000
TENANT_CHARS_MAX: Final = 256
CANARY_KEY_CHARS_MAX: Final = 256
ASKED_SALT_CHARS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a request: what its API knows besides the body."""

    caller: Caller = ANYBODY
    traceparent: str | None = None  # the client's trace
    canary_key: str = ""
    num_bytes: int = 0  # of its body: what it costs to read and to tokenize


NOWHERE: Final = Origin()


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The longest prompt that is used as it is. `parameter` asks to shorten a longer one, which is not served."""

    parameter: str
    num_tokens: int

    def check(self, num_tokens: int) -> None:
        """Raises InvalidRequest."""
        if num_tokens > self.num_tokens:
            raise InvalidRequest(
                self.parameter,
                f"{self.parameter} asks to shorten a prompt of more than {self.num_tokens} tokens, which is not "
                f"served; this one has {num_tokens}: raise that number, or shorten the conversation",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationInput:
    """A request before tokenization. Exactly one of `text`, `token_ids` and `messages` is set."""

    request_id: str
    model: str = ""  # empty: the only one served
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False  # the output continues the last message
    add_special_tokens: bool | None = None  # None: to a text only, because chat templates write them
    prompt_limit: PromptLimit | None = None
    merges_system: bool = False  # where the chat template wants one system message, at the beginning
    truncate_prompt_tokens: int | None = None  # only the last tokens are used; -1: those that fit the context
    is_parsed: bool = False  # the answer is split into reasoning, content and calls, by the model's format
    includes_reasoning: bool = True  # where the answer is parsed; False: the reasoning is dropped
    tools: ToolUse | None = None  # where the answer is parsed: the grammar of `sampling` is the content's
    max_tokens: int | None = None  # None: `max_tokens_default`; 0: the prompt is only scored
    max_tokens_default: int | None = 16  # None: the rest of the context
    # Its max_tokens is ignored: `GenerationSpec.sampling` has the one that fits the context.
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=UINT32_MAX))
    bad_words: tuple[str, ...] = ()  # besides those of `sampling`; to be tokenized
    grammar_parameter: str = "grammar"  # the parameter that set `sampling.grammar`
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    best_of: int | None = None  # None: n
    echo: bool = False
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    objective: Objective = NO_OBJECTIVE  # its own, without its tenant's default
    prediction: str | Sequence[int] | None = None  # the output that the client expects, as text or token ids
    is_detailed: bool = False  # reports the origin of each token and the counts of each step
    deadline_s: float | None = None
    tenant: str = ""  # from the API key, or from the request if keys are not in use
    cache_salt: str = ""  # only requests of the same salt share the prompt's KV
    canary_key: str = ""  # requests with the same key get the same arm of a canary; empty: the request's id
    origin: Origin = NOWHERE
    priority: int = 0  # lower goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A checked request: its prompt and output fit the context of at least one live target."""

    request: GenerationInput
    model: str
    prompt_token_ids: tuple[int, ...]  # at least 1
    max_tokens: int  # most tokens shown; 0: the prompt is only scored
    sampling: SamplingParams  # as sent to workers, with the seed if any; max_tokens at least 1
    deadline_s: float  # from arrival
    served: ServedModel  # the model as it was served when the request came in
    objective: Objective = NO_OBJECTIVE  # with its tenant's default; what runs in the background has none
    num_speculative_tokens: int = 0  # most hints verified per step, by the request's limit and the targets'; 0: unknown
    # The client's prediction; its beginning only, if it is longer than the context.
    prediction_token_ids: Sequence[int] = field(default=(), repr=False)
    prompt_text: str | None = None  # shown before the output
    shows_special_tokens: bool = False
    plan: AnswerPlan | None = None  # how its answer is parsed; None: all of it is content
    loosened: tuple[str, ...] = ()  # what the grammar does not hold of tools' schemas, by names and places
    span: Span = NO_SPAN  # the request's trace span
    assignment: Assignment | None = None  # its arm of a canary
    drafts: DraftChoice = ANY_DRAFT
    is_background: bool = False  # runs after all other requests, for no client
    run: RunIdentity = field(default_factory=RunIdentity, compare=False)

    @property
    def model_key(self) -> ModelKey:
        """Name and tokenizer that its targets must have."""
        return ModelKey(self.model, self.served.fingerprint)

    @property
    def has_drawn_seed(self) -> bool:
        """Whether the coordinator drew the seed, so that only this run has it."""
        return self.sampling.seed is not None and self.request.sampling.seed is None

    @property
    def num_tokens_max(self) -> int:
        """Most tokens that prompt and output can have together."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    @property
    def cache_salt(self) -> str:
        """The salt sent to workers: sessions of different salts share no KV."""
        return cache_salt(self.request.origin.caller, self.request.cache_salt)

    @property
    def owner(self) -> str:
        """A digest of the tenant, sent to workers in place of its name."""
        return tenant_digest(self.request.tenant) if self.request.tenant else ""

    @property
    def prompt_digest(self) -> str:
        """Names its tenant, prompt and grammar in the record of lost targets (`coordinator.recovery.poison`)."""
        tenant = self.request.origin.caller.tenant
        return prompt_digest(tenant, self.model, self.prompt_token_ids, self.sampling.grammar)

    @property
    def num_choices(self) -> int:
        """The number of sequences returned."""
        return self.request.n

    @property
    def num_candidates(self) -> int:
        """The number of sequences generated; the likeliest `num_choices` of them are returned."""
        return self.request.best_of or self.request.n

    @property
    def shows_logprobs(self) -> bool:
        """Whether the client asked for log probabilities; ranking candidates needs them too."""
        return self.request.sampling.num_logprobs is not None

    def sampling_of(self, index: int) -> SamplingParams:
        """Returns the sampling parameters of candidate `index`, with seed + index modulo 2^64: the sequences of a
        request differ, and each can be generated again alone."""
        seed = self.sampling.seed
        if seed is None or index == 0:
            return self.sampling
        return dataclasses.replace(self.sampling, seed=(seed + index) & UINT64_MAX)

    def no_token_may_follow(self, num_output_tokens: int) -> InvalidRequest:
        """Builds the error of a sequence whose parameters exclude every next token."""
        sampling = self.sampling
        forbids = {
            "logit_bias": bool(sampling.logit_bias),
            "bad_words": bool(sampling.bad_words),
            "allowed_token_ids": bool(sampling.allowed_token_ids),
            "min_tokens": num_output_tokens < sampling.min_tokens,
            self.request.grammar_parameter: sampling.grammar is not None,
        }
        names = [name for name, is_forbidding in forbids.items() if is_forbidding]
        return InvalidRequest(
            names[0] if len(names) == 1 else None,
            f"the parameters together leave no token that could follow after {num_output_tokens} tokens of output; the "
            f"ones that forbid tokens here are: {', '.join(names) or 'none of the request'}",
        )


def identified(spec: GenerationSpec, weights_digest: str | None = None) -> GenerationSpec:
    """Copies a request with the identity of its run; `weights_digest` binds a resumed run to its weights."""
    request = spec.request
    digest = digest_of(
        *(request.tenant, spec.model, array("q", spec.prompt_token_ids).tobytes(), spec.max_tokens),
        *(_sampling_bytes(spec.sampling), request.n, request.best_of),
        *(request.stop, request.include_stop_str_in_output, spec.shows_special_tokens, spec.prompt_text),
    )
    run = RunIdentity(
        digest,
        compares_numerics=spec.sampling.decoding_mode is not DecodingMode.REJECTION,
        weights_digest=weights_digest,
    )
    return dataclasses.replace(spec, run=run)


def _sampling_bytes(sampling: SamplingParams) -> bytes:
    """Serializes the parameters as in earlier releases, which left a temperature of 0 out: a stream that was begun at
    one of them can be resumed here."""
    message = sampling.to_proto()
    if message.temperature == 0:
        message.ClearField("temperature")
    return message.SerializeToString(deterministic=True)


def check_input(request: GenerationInput) -> None:
    """Checks everything that needs neither tokenizer nor workers. Raises InvalidRequest naming the parameter."""
    if request.max_tokens is not None:
        scores_prompt = request.echo or request.sampling.num_prompt_logprobs is not None
        if request.max_tokens == 0 and not scores_prompt:
            raise InvalidRequest("max_tokens", "max_tokens is 0, which needs echo or prompt_logprobs")
        MAX_TOKENS_BOUNDS.check("max_tokens", request.max_tokens)
    check_count("stop", request.stop, STOP_STRINGS_MAX)
    if not all(1 <= len(stop) <= STOP_STRING_CHARS_MAX for stop in request.stop):
        raise InvalidRequest("stop", f"each stop string must have 1 to {STOP_STRING_CHARS_MAX} characters")
    check_count("bad_words", request.bad_words, MAX_BAD_WORDS)
    if not all(1 <= len(word) <= BAD_WORD_CHARS_MAX for word in request.bad_words):
        raise InvalidRequest("bad_words", f"each word of bad_words must have 1 to {BAD_WORD_CHARS_MAX} characters")
    CHOICES_BOUNDS.check("n", request.n)
    if request.best_of is not None:
        CHOICES_BOUNDS.check("best_of", request.best_of)
        if request.best_of < request.n:
            raise InvalidRequest("best_of", f"best_of is {request.best_of}; permitted: at least n, {request.n}")
    Bounds(-PRIORITY_MAX, PRIORITY_MAX).check("priority", request.priority)
    for name, text, num_chars_max in (
        ("tenant", request.tenant, TENANT_CHARS_MAX),
        ("cache_salt", request.cache_salt, ASKED_SALT_CHARS_MAX),
        ("x-canary-key", request.canary_key, CANARY_KEY_CHARS_MAX),
    ):
        if len(text) > num_chars_max:
            raise InvalidRequest(name, f"{name} must have at most {num_chars_max} characters")
    if request.speculation.is_always and not request.speculation.enabled:
        raise InvalidRequest(
            "speculation.always", "speculation.always contradicts speculation.enabled: false; leave one out"
        )
    check_request_id(request.request_id)
    if request.token_ids is not None:
        check_count("prompt", request.token_ids, PROMPT_TOKENS_MAX)
    if request.messages is not None and not request.messages:
        raise InvalidRequest("messages", "messages must hold at least one message")


def check_request_id(request_id: str) -> None:
    """Checks a request id. Raises InvalidRequest. An id is returned in a header, which other characters could forge,
    and is part of a path, from which clients and proxies remove the segments `.` and `..`."""
    if not 1 <= len(request_id) <= REQUEST_ID_CHARS_MAX or not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest(
            "request_id", f"request_id must have 1 to {REQUEST_ID_CHARS_MAX} printable ASCII characters"
        )
    if {".", ".."} & set(request_id.split("/")):
        raise InvalidRequest(
            "request_id", "request_id must not have . or .. between slashes, for URLs lose such segments"
        )


def truncated(request: GenerationInput, prompt_token_ids: list[int], max_model_len: int) -> list[int]:
    """Returns the last tokens of the prompt, as many as the request permits. Raises InvalidRequest for more than the
    context has."""
    num_kept = request.truncate_prompt_tokens
    if num_kept is None:
        return prompt_token_ids
    if num_kept > max_model_len:
        raise InvalidRequest(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens is {num_kept}; the longest context of this model is {max_model_len} tokens",
        )
    if num_kept < 0:
        num_kept = max_model_len - max(request.max_tokens or 1, 1)
    return prompt_token_ids[-num_kept:] if num_kept > 0 else []


def fit_to_context(
    request: GenerationInput, prompt_token_ids: Sequence[int], *, max_model_len: int, vocab_size: int
) -> int:
    """Returns the most tokens to show: those asked for, or what the context has room for if that is less, as in vLLM.

    `max_model_len` is that of the model's largest live target, in tokens. Raises InvalidRequest for a prompt that is
    empty, ContextExceeded for one that is too long, or InvalidRequest for an unknown token id.
    """
    parameter = "messages" if request.messages is not None else "prompt"
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequest(parameter, f"{parameter} has no tokens; at least one is needed")
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextExceeded(parameter, num_prompt, max_model_len)
    if max(prompt_token_ids) >= vocab_size or min(prompt_token_ids) < 0:
        raise InvalidRequest(parameter, f"{parameter}: token ids must lie between 0 and {vocab_size - 1}")
    asked = request.max_tokens_default if request.max_tokens is None else request.max_tokens
    return room if asked is None else min(asked, room)


def effective_sampling(
    request: GenerationInput, max_tokens: int, *, bad_words: Sequence[tuple[int, ...]], seed: int | None
) -> SamplingParams:
    """Returns the sampling parameters for the workers, with the fitted `max_tokens`, every bad word as tokens, and the
    log probabilities that echo and best_of need. Raises InvalidRequest for min_tokens and bad_words."""
    sampling = request.sampling
    num_logprobs, num_prompt_logprobs = sampling.num_logprobs, sampling.num_prompt_logprobs
    if request.echo and request.messages is None and num_logprobs is not None:
        num_prompt_logprobs = max(num_logprobs, num_prompt_logprobs or 0)
    if num_logprobs is None and (request.best_of or request.n) > request.n:
        num_logprobs = 0
    return dataclasses.replace(
        sampling,
        # To score a prompt, the target has to generate one token, which is not shown.
        max_tokens=max(max_tokens, 1),
        bad_words=tuple(dict.fromkeys((*sampling.bad_words, *bad_words))),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        seed=seed,
    )


def check_prompt_logprobs(spec: GenerationSpec) -> None:
    """Checks the number of log probabilities of the prompt in one answer. Raises InvalidRequest."""
    num_top = spec.sampling.num_prompt_logprobs
    if num_top is None:
        return
    num_logprobs = spec.num_candidates * len(spec.prompt_token_ids) * (num_top + 1)
    if num_logprobs > PROMPT_LOGPROBS_MAX:
        parameter = "echo" if spec.request.sampling.num_prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(
            parameter,
            f"{parameter}: {len(spec.prompt_token_ids)} prompt tokens have {num_logprobs} log probabilities, with "
            f"{num_top} others each and in {spec.num_candidates} sequences; permitted: at most {PROMPT_LOGPROBS_MAX}",
        )
