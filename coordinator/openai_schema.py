"""The bodies of OpenAI's completion calls, with the extras that vLLM and SGLang users know.

Every parameter is honoured or refused by name. Those known elsewhere and not served yet are accepted at the
value that changes nothing (clients send `"n": 1` without being asked) and refused at any other; a field that
nobody knows is refused too, for a misspelt `temperture` must not go unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.generation_request import GenerationInput, Sampling, SpeculationChoice
from coordinator.unserved_parameters import NEUTRAL_CHAT, NEUTRAL_COMPLETION, NEUTRAL_MESSAGE, without_neutral
from outrider.errors import InvalidRequest


class _Body(BaseModel):
    """Strict: a number in quotes is not a number. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool = False


class Speculation(_Body):
    enabled: bool = True
    num_speculative_tokens: int = 0  # most hints verified per step; 0 leaves it to the target
    detail: bool = False  # token ids, origins and text pieces in every chunk, per-step counts at the end


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def to_template(self) -> dict[str, str]:
        """The message as chat templates expect it, its parts as one text."""
        is_text = isinstance(self.content, str)
        content = self.content if is_text else "".join(part.text for part in self.content)  # type: ignore[union-attr]
        # Templates from before the new name of the role know only the old one.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": str(content)} | ({"name": self.name} if self.name else {})


class _GenerationBody(_Body):
    """What completions and chat completions share."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]]

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 and -1 keep all
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    speculation: Speculation = Field(default_factory=Speculation)

    @property
    def is_streaming(self) -> bool:
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _common(self, request_id: str) -> dict[str, Any]:
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k in (None, -1) else self.top_k or 0,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "request_id": request_id,
            "model": self.model,
            "sampling": sampling,
            "stop": tuple(stop),
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "speculation": SpeculationChoice(**self.speculation.model_dump()),
        }


class CompletionBody(_GenerationBody):
    """POST /v1/completions. Exactly one prompt: a text or a list of token ids, bare or alone in a list."""

    neutral = NEUTRAL_COMPLETION

    prompt: str | list[int] | list[str] | list[list[int]]

    def to_input(self, request_id: str) -> GenerationInput:
        """Raises InvalidRequest when there is more than one prompt, or none."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int)):
            if len(prompt) != 1:
                raise InvalidRequest("prompt", f"exactly one prompt per request is served, got {len(prompt)}")
            prompt = prompt[0]
        key = "text" if isinstance(prompt, str) else "token_ids"
        return GenerationInput(
            **self._common(request_id), **{key: prompt}, max_tokens=self.max_tokens, max_tokens_default=16
        )


class ChatBody(_GenerationBody):
    """POST /v1/chat/completions. Without a bound the answer may fill the context."""

    neutral = NEUTRAL_CHAT

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_input(self, request_id: str) -> GenerationInput:
        """Raises InvalidRequest when both names of the bound are given with different values."""
        bounds = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(bounds) > 1:
            raise InvalidRequest("max_tokens", "max_tokens and max_completion_tokens contradict each other")
        return GenerationInput(
            **self._common(request_id),
            messages=[message.to_template() for message in self.messages],
            chat_template_kwargs=self.chat_template_kwargs or {},
            max_tokens=next(iter(bounds), None),
            max_tokens_default=None,
        )


class TokenizeBody(_Body):
    """POST /tokenize: a text, or a conversation as the chat template renders it."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})

    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(_Body):
    """POST /detokenize."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})

    model: str = ""
    tokens: list[int]


BodyT = TypeVar("BodyT", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)


def parse_body(kind: type[BodyT], raw: bytes) -> BodyT:
    """Reads a request body. Raises InvalidRequest that names the first parameter that is wrong."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested too deeply
        raise InvalidRequest(None, f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest(None, "the body must be a JSON object")
    content = without_neutral(content, kind.neutral, "")
    if isinstance(content.get("messages"), list):
        content["messages"] = [
            without_neutral(message, NEUTRAL_MESSAGE, f"messages[{index}].")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(content["messages"])
        ]
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _named(error) from error


def _named(error: ValidationError) -> InvalidRequest:
    # Of a union every branch reports; the first complaint about the first parameter will do.
    detail = error.errors(include_url=False)[0]
    parameter = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            parameter += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            parameter += f".{part}" if parameter else part
    if detail["type"] == "extra_forbidden":
        return InvalidRequest(parameter, f"unknown parameter {parameter!r}")
    if detail["type"] == "missing":
        return InvalidRequest(parameter, f"parameter {parameter!r} is required")
    return InvalidRequest(parameter, f"{parameter}: {detail['msg']}")
