"""A request for text as every edge hands it in, and what is left of it once it is checked and tokenized.

Pure. HTTP and gRPC both end here, so a bound holds on both or on neither. What concerns sampling is checked by
`outrider.sampling_params`, on construction; the rest is checked here.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.cache_salt import cache_salt
from coordinator.run_identity import RunIdentity, digest_of
from coordinator.tool_calls import ToolUse
from outrider.api_keys import ANYBODY, Caller
from outrider.canary.plan import ANY_DRAFT, Assignment, DraftChoice
from outrider.errors import InvalidRequest
from outrider.sampling_params import MAX_BAD_WORDS, DecodingMode, SamplingParams, SpeculationSettings
from outrider.tenants import tenant_digest
from outrider.tracing import NO_SPAN, Span

PROMPT_BYTES_MAX: Final = 1 << 20
PROMPT_TOKENS_MAX: Final = 1 << 18
"""That come as token ids. Nothing that handles a prompt may hold up the event loop for long."""
PROMPT_LOGPROBS_MAX: Final = 1 << 18
"""Log probabilities of a prompt's tokens in one answer: they are held, and written, all at once."""
STOP_STRINGS_MAX: Final = 16
MESSAGES_MAX: Final = 16384
STOP_STRING_CHARS_MAX: Final = 256
BAD_WORD_CHARS_MAX: Final = 256
REQUEST_ID_CHARS_MAX: Final = 64
CHOICES_MAX: Final = 64
PRIORITY_MAX: Final = 1000
TENANT_CHARS_MAX: Final = 256
CANARY_KEY_CHARS_MAX: Final = 256
ASKED_SALT_CHARS_MAX: Final = 256
UINT32_MAX: Final = (1 << 32) - 1
UINT64_MAX: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from: what its edge knows beside what it asks for."""

    caller: Caller = ANYBODY
    traceparent: str | None = None  # of the client's trace
    canary_key: str = ""


NOWHERE: Final = Origin()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationInput:
    """A request before tokenization. Exactly one of `text`, `token_ids` and `messages` is set."""

    request_id: str
    model: str = ""  # empty: the only one served
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolUse | None = None  # set: calls of them are possible, so `sampling` carries no grammar
    max_tokens: int | None = None  # None: `max_tokens_default`; 0: the prompt is scored and nothing is said
    max_tokens_default: int | None = 16  # None: the rest of the context
    # Its max_tokens counts for nothing here: `GenerationSpec.sampling` has the one that fits the context.
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=UINT32_MAX))
    bad_words: tuple[str, ...] = ()  # beside those of `sampling`, to be tokenized
    grammar_parameter: str = "grammar"  # what the client calls the thing that `sampling.grammar` came from
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    best_of: int | None = None  # None: n
    echo: bool = False
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    is_detailed: bool = False  # where each token came from, and what each step did
    deadline_s: float | None = None
    tenant: str = ""  # on whose behalf: as its key says, or as it says itself where there are no keys
    cache_salt: str = (
        ""  # the prompt's KV is shared with requests of the same one alone, `coordinator.cache_salt`
    )
    canary_key: str = ""  # requests with the same one get the same arm of a canary; empty: the request's id
    origin: Origin = NOWHERE
    priority: int = 0  # lower goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A request that is known to be possible: prompt and output fit the context of some live target."""

    request: GenerationInput
    model: str
    prompt_token_ids: tuple[int, ...]  # at least 1
    max_tokens: int  # most tokens shown; 0 where the prompt is only scored
    sampling: SamplingParams  # for the workers, with a seed where one is used; max_tokens at least 1
    deadline_s: float  # from arrival
    prompt_text: str | None = None  # set: shown before the output
    shows_special_tokens: bool = False
    span: Span = NO_SPAN  # the request's, for what happens to it
    assignment: Assignment | None = None  # the arm of a canary that it got
    drafts: DraftChoice = ANY_DRAFT
    is_background: bool = False  # nobody waits for it: it stays behind everybody else, and is no client's
    run: RunIdentity = field(default_factory=RunIdentity, compare=False)

    @property
    def has_drawn_seed(self) -> bool:
        """Whether the seed is the coordinator's own: nobody knows it who does not have this very run."""
        return self.sampling.seed is not None and self.request.sampling.seed is None

    @property
    def num_tokens_max(self) -> int:
        """The longest that prompt and output can become, tokens."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    @property
    def cache_salt(self) -> str:
        """What workers are told: sessions of different salts share no KV."""
        return cache_salt(self.request.origin.caller, self.request.cache_salt)

    @property
    def owner(self) -> str:
        """Workers are told on whose behalf it is, and not who that is."""
        return tenant_digest(self.request.tenant) if self.request.tenant else ""

    @property
    def num_choices(self) -> int:
        """Texts returned."""
        return self.request.n

    @property
    def num_candidates(self) -> int:
        """Texts generated; the likeliest `num_choices` of them are returned."""
        return self.request.best_of or self.request.n

    @property
    def shows_logprobs(self) -> bool:
        """Whether the client asked for them; ranking candidates needs them too."""
        return self.request.sampling.num_logprobs is not None

    def sampling_of(self, index: int) -> SamplingParams:
        """What candidate `index` is sampled with: seed + index modulo 2^64, so that equal seeds give unequal texts
        within a request and each of them can be had again alone."""
        seed = self.sampling.seed
        if seed is None or index == 0:
            return self.sampling
        return dataclasses.replace(self.sampling, seed=(seed + index) & UINT64_MAX)

    def forbidding_parameters(self, num_output_tokens: int) -> list[str]:
        """The client's parameters that rule tokens out after as many tokens of output."""
        sampling = self.sampling
        forbids = {
            "logit_bias": bool(sampling.logit_bias),
            "bad_words": bool(sampling.bad_words),
            "allowed_token_ids": bool(sampling.allowed_token_ids),
            "min_tokens": num_output_tokens < sampling.min_tokens,
            self.request.grammar_parameter: sampling.grammar is not None,
        }
        return [name for name, is_forbidding in forbids.items() if is_forbidding]


def identified(spec: GenerationSpec, weights_digest: str | None = None) -> GenerationSpec:
    """The same request with the identity of its run; `weights_digest` where it goes on with what others generated."""
    request = spec.request
    digest = digest_of(
        *(request.tenant, spec.model, array("q", spec.prompt_token_ids).tobytes(), spec.max_tokens),
        *(spec.sampling.to_proto().SerializeToString(deterministic=True), request.n, request.best_of),
        *(request.stop, request.include_stop_str_in_output, spec.shows_special_tokens, spec.prompt_text),
    )
    run = RunIdentity(
        digest,
        compares_numerics=spec.sampling.decoding_mode is not DecodingMode.REJECTION,
        weights_digest=weights_digest,
    )
    return dataclasses.replace(spec, run=run)


def check_input(request: GenerationInput) -> None:
    """Checks everything that needs neither tokenizer nor workers. Raises InvalidRequest naming the parameter."""
    _check_range("top_k", request.sampling.top_k, 0, UINT32_MAX)
    if request.max_tokens is not None:
        scores_prompt = request.echo or request.sampling.num_prompt_logprobs is not None
        if request.max_tokens == 0 and not scores_prompt:
            raise InvalidRequest("max_tokens", "max_tokens is 0, which needs echo or prompt_logprobs")
        _check_range("max_tokens", request.max_tokens, 0, UINT32_MAX)
    check_count("stop", request.stop, STOP_STRINGS_MAX)
    if not all(1 <= len(stop) <= STOP_STRING_CHARS_MAX for stop in request.stop):
        raise InvalidRequest("stop", f"each stop string must have 1 to {STOP_STRING_CHARS_MAX} characters")
    check_count("bad_words", request.bad_words, MAX_BAD_WORDS)
    if not all(1 <= len(word) <= BAD_WORD_CHARS_MAX for word in request.bad_words):
        raise InvalidRequest(
            "bad_words", f"each word of bad_words must have 1 to {BAD_WORD_CHARS_MAX} characters"
        )
    _check_range("n", request.n, 1, CHOICES_MAX)
    if request.best_of is not None:
        _check_range("best_of", request.best_of, 1, CHOICES_MAX)
        if request.best_of < request.n:
            raise InvalidRequest(
                "best_of", f"best_of is {request.best_of}; permitted: at least n, {request.n}"
            )
    _check_range("priority", request.priority, -PRIORITY_MAX, PRIORITY_MAX)
    if len(request.tenant) > TENANT_CHARS_MAX:
        raise InvalidRequest("tenant", f"tenant must have at most {TENANT_CHARS_MAX} characters")
    if len(request.cache_salt) > ASKED_SALT_CHARS_MAX:
        raise InvalidRequest("cache_salt", f"cache_salt must have at most {ASKED_SALT_CHARS_MAX} characters")
    if len(request.canary_key) > CANARY_KEY_CHARS_MAX:
        raise InvalidRequest(
            "x-canary-key", f"x-canary-key must have at most {CANARY_KEY_CHARS_MAX} characters"
        )
    if request.echo and request.messages is not None:
        raise InvalidRequest("echo", "echo is not served for chats")
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
    """Raises InvalidRequest. It comes back in a header, where other characters would be a way to forge one, and is part
    of a path, where clients and proxies take the segments . and .. away."""
    if not 1 <= len(request_id) <= REQUEST_ID_CHARS_MAX or not (
        request_id.isascii() and request_id.isprintable()
    ):
        raise InvalidRequest(
            "request_id", f"request_id must have 1 to {REQUEST_ID_CHARS_MAX} printable ASCII characters"
        )
    if {".", ".."} & set(request_id.split("/")):
        raise InvalidRequest(
            "request_id", "request_id must not have . or .. between slashes, for URLs lose such segments"
        )


def fit_to_context(
    request: GenerationInput, prompt_token_ids: Sequence[int], *, max_model_len: int, vocab_size: int
) -> int:
    """How many tokens may be shown: what was asked for, or the default, cut to what the context leaves.

    `max_model_len` is that of the model's roomiest target, in tokens. Raises InvalidRequest when the prompt
    is empty or too long, when it and an explicit `max_tokens` do not fit together, or for an id that does not
    exist.
    """
    parameter = "messages" if request.messages is not None else "prompt"
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequest(parameter, f"{parameter} has no tokens; at least one is needed")
    room = max_model_len - num_prompt
    if room < 1:
        raise InvalidRequest(
            parameter,
            f"the prompt has {num_prompt} tokens; the longest context of this model is {max_model_len} tokens, of "
            "which at least one must be left for the answer",
        )
    if max(prompt_token_ids) >= vocab_size or min(prompt_token_ids) < 0:
        raise InvalidRequest(parameter, f"{parameter}: token ids must lie between 0 and {vocab_size - 1}")
    if request.max_tokens is None:
        return room if request.max_tokens_default is None else min(request.max_tokens_default, room)
    if request.max_tokens > room:
        raise InvalidRequest(
            "max_tokens",
            f"the prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}, together "
            f"{num_prompt + request.max_tokens}; the longest context of this model is {max_model_len} tokens",
        )
    return request.max_tokens


def effective_sampling(
    request: GenerationInput, max_tokens: int, *, bad_words: Sequence[tuple[int, ...]], seed: int | None
) -> SamplingParams:
    """What the workers are told: `max_tokens` as it fits, every bad word as tokens, and the log probabilities that
    echo and best_of need beside those asked for. Raises InvalidRequest, for min_tokens and bad_words."""
    sampling = request.sampling
    num_logprobs, num_prompt_logprobs = sampling.num_logprobs, sampling.num_prompt_logprobs
    if request.echo and num_logprobs is not None:
        num_prompt_logprobs = max(num_logprobs, num_prompt_logprobs or 0)
    if num_logprobs is None and (request.best_of or request.n) > request.n:
        num_logprobs = 0
    return dataclasses.replace(
        sampling,
        # Where nothing is said, the target still has to say one token to get there; nobody sees it.
        max_tokens=max(max_tokens, 1),
        bad_words=tuple(dict.fromkeys((*sampling.bad_words, *bad_words))),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        seed=seed,
    )


def check_prompt_logprobs(spec: GenerationSpec) -> None:
    """Raises InvalidRequest for more log probabilities of the prompt than one answer may hold."""
    num_top = spec.sampling.num_prompt_logprobs
    if num_top is None:
        return
    num_logprobs = spec.num_candidates * len(spec.prompt_token_ids) * (num_top + 1)
    if num_logprobs > PROMPT_LOGPROBS_MAX:
        parameter = "echo" if spec.request.sampling.num_prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(
            parameter,
            f"{parameter}: {len(spec.prompt_token_ids)} prompt tokens have {num_logprobs} log probabilities, with "
            f"{num_top} others each and in {spec.num_candidates} texts; permitted: at most {PROMPT_LOGPROBS_MAX}",
        )


def _check_range(parameter: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise InvalidRequest(parameter, f"{parameter} must lie between {lowest} and {highest}, got {value}")


def check_count(parameter: str, values: Sized, most: int) -> None:
    """Raises InvalidRequest."""
    if len(values) > most:
        raise InvalidRequest(parameter, f"{parameter} may hold at most {most} entries, got {len(values)}")
