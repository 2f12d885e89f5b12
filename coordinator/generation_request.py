"""A request for text as every edge hands it in, and what is left of it once it is checked and tokenized.

Pure. HTTP and gRPC both end here, so a bound holds on both or on neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.errors import InvalidRequest
from protos.outrider.v1 import common_pb2

PROMPT_BYTES_MAX: Final = 1 << 20
STOP_STRINGS_MAX: Final = 16
STOP_STRING_CHARS_MAX: Final = 256
STOP_TOKEN_IDS_MAX: Final = 64
REQUEST_ID_CHARS_MAX: Final = 64
NUM_SPECULATIVE_TOKENS_MAX: Final = 32
_UINT32_MAX: Final = (1 << 32) - 1
_UINT64_MAX: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """As asked for; the meaning and the bounds are those of outrider.v1.SamplingParams."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def to_proto(self, max_tokens: int) -> common_pb2.SamplingParams:
        """The message for the workers; `max_tokens` is the most tokens generated, at least 1."""
        return common_pb2.SamplingParams(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, seed=self.seed,
            max_tokens=max_tokens, stop_token_ids=self.stop_token_ids, ignore_eos=self.ignore_eos,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationChoice:
    """The client's switch. `num_speculative_tokens` 0 leaves the length to the target."""

    enabled: bool = True
    num_speculative_tokens: int = 0
    detail: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationInput:
    """A request before tokenization. Exactly one of `text`, `token_ids` and `messages` is set."""

    request_id: str
    model: str = ""  # empty: the only one served
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None  # None: `max_tokens_default`
    max_tokens_default: int | None = 16  # None: the rest of the context
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculation: SpeculationChoice = field(default_factory=SpeculationChoice)
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A request that is known to be possible: prompt and output fit the context of some live target."""

    request: GenerationInput
    model: str
    prompt_token_ids: tuple[int, ...]  # at least 1
    max_tokens: int  # at least 1
    deadline_s: float  # from arrival

    @property
    def num_tokens_max(self) -> int:
        """The longest that prompt and output can become, tokens."""
        return len(self.prompt_token_ids) + self.max_tokens


def check_input(request: GenerationInput) -> None:
    """Checks everything that needs neither tokenizer nor workers. Raises InvalidRequest naming the parameter."""
    sampling = request.sampling
    _check_range("temperature", sampling.temperature, 0, 2)
    _check_range("top_p", sampling.top_p, 0, 1)
    if sampling.top_p == 0:
        raise InvalidRequest("top_p", "top_p must be above 0 and at most 1, got 0")
    _check_range("top_k", sampling.top_k, 0, _UINT32_MAX)
    _check_range("min_p", sampling.min_p, 0, 1)
    if sampling.seed is not None:
        _check_range("seed", sampling.seed, 0, _UINT64_MAX)
    if request.max_tokens is not None:
        _check_range("max_tokens", request.max_tokens, 1, _UINT32_MAX)
    _check_count("stop_token_ids", sampling.stop_token_ids, STOP_TOKEN_IDS_MAX)
    for token_id in sampling.stop_token_ids:
        _check_range("stop_token_ids", token_id, 0, _UINT32_MAX)
    _check_count("stop", request.stop, STOP_STRINGS_MAX)
    if not all(1 <= len(stop) <= STOP_STRING_CHARS_MAX for stop in request.stop):
        raise InvalidRequest("stop", f"each stop string must have 1 to {STOP_STRING_CHARS_MAX} characters")
    num_speculative_tokens = request.speculation.num_speculative_tokens
    _check_range("speculation.num_speculative_tokens", num_speculative_tokens, 0, NUM_SPECULATIVE_TOKENS_MAX)
    request_id = request.request_id
    # It comes back in a header, where other characters would be a way to forge one.
    if not 1 <= len(request_id) <= REQUEST_ID_CHARS_MAX or not (
        request_id.isascii() and request_id.isprintable()
    ):
        raise InvalidRequest(
            "request_id", f"request_id must have 1 to {REQUEST_ID_CHARS_MAX} printable ASCII characters"
        )
    if request.messages is not None and not request.messages:
        raise InvalidRequest("messages", "messages must hold at least one message")
    if request.text is not None and len(request.text.encode()) > PROMPT_BYTES_MAX:
        raise InvalidRequest("prompt", f"the prompt is longer than {PROMPT_BYTES_MAX} bytes")


def fit_to_context(
    request: GenerationInput, prompt_token_ids: Sequence[int], *, max_model_len: int, vocab_size: int
) -> int:
    """How many tokens may be generated: what was asked for, or the default, cut to what the context leaves.

    `max_model_len` is that of the model's roomiest target, in tokens. Raises InvalidRequest when the prompt
    is empty or too long, when it and an explicit `max_tokens` do not fit together, or for an id that does not
    exist.
    """
    parameter = "messages" if request.messages is not None else "prompt"
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequest(parameter, f"{parameter} has no tokens; at least one is needed")
    if max(prompt_token_ids) >= vocab_size or min(prompt_token_ids) < 0:
        raise InvalidRequest(parameter, f"{parameter}: token ids must lie between 0 and {vocab_size - 1}")
    room = max_model_len - num_prompt
    if room < 1:
        raise InvalidRequest(
            parameter,
            f"the prompt has {num_prompt} tokens; the longest context of this model is {max_model_len} tokens, of "
            "which at least one must be left for the answer",
        )
    if request.max_tokens is None:
        return room if request.max_tokens_default is None else min(request.max_tokens_default, room)
    if request.max_tokens > room:
        raise InvalidRequest(
            "max_tokens",
            f"the prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}, together "
            f"{num_prompt + request.max_tokens}; the longest context of this model is {max_model_len} tokens",
        )
    return request.max_tokens


def _check_range(parameter: str, value: float, lowest: float, highest: float) -> None:
    if not (math.isfinite(value) and lowest <= value <= highest):
        raise InvalidRequest(parameter, f"{parameter} must lie between {lowest} and {highest}, got {value}")


def _check_count(parameter: str, values: Sequence[object], most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(parameter, f"{parameter} may hold at most {most} entries, got {len(values)}")
