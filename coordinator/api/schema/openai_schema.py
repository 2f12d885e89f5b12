"""The bodies of OpenAI's completion calls, with extensions of vLLM and SGLang.

A parameter that changes the output is honoured or refused by name. Unserved ones of other servers are accepted at the
value that changes nothing, because some clients always send them. A parameter that cannot change the output is accepted
and reported as ignored. Unknown fields are refused, so that a misspelt `temperture` is noticed; only in messages and
tools are they ignored, because clients send back what other servers gave them.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from coordinator.api.schema.body_parts import Body, Listed, TokenId, described
from coordinator.api.schema.chat_messages import ChatMessage, ignored_in, read_messages
from coordinator.api.schema.generation_fields import GenerationBody, Logprobs
from coordinator.api.schema.structured_output import StructuredOutputs
from coordinator.api.schema.tool_schema import (
    TOOLS_MAX,
    Function,
    FunctionRef,
    NamedToolChoice,
    Tool,
    ToolChoice,
    read_tool_use,
)
from coordinator.api.schema.unserved_parameters import (
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    UNUSED_CHAT,
    UNUSED_COMPLETION,
    successor,
    without_neutral,
)
from coordinator.formats.answer_parts import ToolUse
from coordinator.intake.generation_request import (
    CHOICES_BOUNDS,
    MAX_TOKENS_BOUNDS,
    MESSAGES_MAX,
    PROMPT_TOKENS_MAX,
    GenerationInput,
)
from coordinator.intake.json_size import check_json_size
from outrider.errors import InvalidRequest
from outrider.sampling_params import check_count

DEPTH_MAX: Final = 256  # of a body; grammars are limited to half of it
DETOKENIZE_TOKENS_MAX: Final = PROMPT_TOKENS_MAX
PROMPTS_MAX: Final = 1024
"""Most prompts of one request."""
TEMPLATE_WORDS: Final = ("reasoning_effort", "verbosity")
"""Parameters that change the prompt if the model's chat template knows them, and nothing otherwise."""
_WORD_CHARS_MAX: Final = 64
_PROMPTS: Final = described(minItems=1, maxItems=PROMPTS_MAX)
_PromptTokenIds = Annotated[Listed[TokenId], described(minItems=1, maxItems=PROMPT_TOKENS_MAX)]


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions. A prompt is a text or token ids; each of a list gets `n` choices."""

    neutral = NEUTRAL_COMPLETION
    unused = UNUSED_COMPLETION

    prompt: Annotated[
        str | _PromptTokenIds | Annotated[Listed[str], _PROMPTS] | Annotated[Listed[_PromptTokenIds], _PROMPTS],
        described(description="at most 1 MiB of text, or token ids of the model; or a list of either"),
    ]
    logprobs: Logprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, described(CHOICES_BOUNDS)] | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="false: a text gets none of the tokenizer's special tokens"
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, at least one. Raises InvalidRequest for an empty list or too many."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt", "prompt is an empty list; at least one prompt is needed")
        check_count("prompt", prompt, PROMPTS_MAX)
        return list(prompt)

    def to_inputs(self, request_id: str) -> list[GenerationInput]:
        """Converts the body, one input for each prompt. Raises InvalidRequest for a value out of bounds."""
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise InvalidRequest("best_of", "best_of above n cannot be streamed: the best is known at the end")
        prompts = self.prompts
        first = GenerationInput(
            **self.common_input(request_id, self.logprobs, "logprobs"),
            max_tokens=self.max_tokens,
            max_tokens_default=16,
            add_special_tokens=self.add_special_tokens,
            echo=bool(self.echo),
            best_of=self.best_of,
        )
        inputs = []
        for index, prompt in enumerate(prompts):
            text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
            own_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            inputs.append(replace(first, request_id=own_id, text=text, token_ids=token_ids))
        return inputs


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions. Without `max_tokens` the answer may fill the context."""

    neutral = NEUTRAL_CHAT
    unused = UNUSED_CHAT

    messages: Annotated[Listed[ChatMessage], described(minItems=1, maxItems=MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, described(MAX_TOKENS_BOUNDS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = Field(default=True, description="whether the template begins the answer")
    continue_final_message: bool = Field(
        default=False, description="the output continues the last message; needs add_generation_prompt: false"
    )
    add_special_tokens: bool | None = Field(default=None, description="adds special tokens to those of the template")
    reasoning_effort: Annotated[str, Field(max_length=_WORD_CHARS_MAX)] | None = Field(
        default=None, description="for chat templates that know it, ignored by others"
    )
    verbosity: Annotated[str, Field(max_length=_WORD_CHARS_MAX)] | None = Field(
        default=None, description="for chat templates that know it, ignored by others"
    )
    echo: bool | None = Field(default=None, description="the answer begins with the last message of the assistant")
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[Listed[Tool], described(maxItems=TOOLS_MAX)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Listed[Function], described(maxItems=TOOLS_MAX)] | None = Field(
        default=None, description="former name of `tools`"
    )
    function_call: Literal["none", "auto"] | FunctionRef | None = Field(
        default=None, description="former name of `tool_choice`"
    )
    include_reasoning: bool = True

    @property
    def calls_one_function(self) -> bool:
        """Whether a call is answered in OpenAI's former form, `function_call`."""
        return self.functions is not None

    @property
    def names_function(self) -> bool:
        """Whether the client named the function to call."""
        return isinstance(self.tool_choice, NamedToolChoice) or isinstance(self.function_call, FunctionRef)

    def to_inputs(self, request_id: str) -> list[GenerationInput]:
        """Converts the body. Raises InvalidRequest for a value out of bounds or contradicting parameters."""
        bounds = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(bounds) > 1:
            raise InvalidRequest("max_tokens", "max_tokens and max_completion_tokens contradict each other")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest("continue_final_message", "continue_final_message needs add_generation_prompt: false")
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        common = self.common_input(request_id, num_logprobs, "top_logprobs")
        use, shown_tools = self._tool_use()
        if use is not None and common["sampling"].grammar is None:
            common["grammar_parameter"] = "tools"
        self.ignore(*ignored_in(self.messages))
        return [
            GenerationInput(
                **common,
                messages=read_messages(self.messages),
                chat_template_kwargs=self._template_kwargs(shown_tools if use else []),
                continue_final_message=self.continue_final_message,
                add_special_tokens=self.add_special_tokens,
                echo=bool(self.echo),
                tools=use,
                is_parsed=True,
                includes_reasoning=self.include_reasoning,
                max_tokens=next(iter(bounds), None),
                max_tokens_default=None,
            )
        ]

    def _tool_use(self) -> tuple[ToolUse | None, list[dict[str, Any]]]:
        """Returns the functions that may be called, and the tools for the chat template. Raises InvalidRequest."""
        for name, successor_name in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, name) is not None and getattr(self, successor_name) is not None:
                raise InvalidRequest(name, f"{name} and its successor {successor_name} contradict each other")
        if self.functions is None:
            tools, choice = self.tools or [], self.tool_choice
        else:
            tools = [Tool(function=function) for function in self.functions]
            named = self.function_call
            choice = NamedToolChoice(type="function", function=named) if isinstance(named, FunctionRef) else named
        names = dict.fromkeys(name for tool in tools for name in tool.ignored_names)
        self.ignore(*(f"tools[].{name}" for name in names))
        is_parallel = self.parallel_tool_calls is not False and self.functions is None
        return read_tool_use(tools, choice, is_parallel=is_parallel)

    def _template_kwargs(self, tools: list[dict[str, Any]]) -> dict[str, Any]:
        kwargs = dict(self.chat_template_kwargs or {})
        for name in TEMPLATE_WORDS:
            if getattr(self, name) is not None:
                kwargs.setdefault(name, getattr(self, name))
        if not self.add_generation_prompt:
            kwargs["add_generation_prompt"] = False
        return kwargs | ({"tools": tools} if tools else {})


class TokenizeBody(Body):
    """The body of POST /tokenize: a text, or a conversation to render with the chat template."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}, "required": ["prompt"]},
                {"properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}, "required": ["messages"]},
            ]
        }
    )  # fmt: skip

    model: str = Field(default="", description="needed if several models are served")
    prompt: str | None = Field(default=None, description="a text")
    messages: Annotated[Listed[ChatMessage], described(maxItems=MESSAGES_MAX)] | None = Field(
        default=None, description="a conversation"
    )
    add_special_tokens: bool | None = Field(
        default=None, description="whether the tokenizer's special tokens are added; null: to a text only"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="arguments for the chat template")
    add_generation_prompt: bool = Field(default=True, description="whether the template begins the answer")
    continue_final_message: bool = Field(
        default=False, description="the last message is left open; needs add_generation_prompt: false"
    )
    tools: Annotated[Listed[Tool], described(maxItems=TOOLS_MAX)] | None = Field(
        default=None, description="tools for the chat template"
    )
    return_token_strs: bool = Field(default=False, description="whether the vocabulary's entries are returned as well")

    def to_input(self, request_id: str) -> GenerationInput:
        """Converts the body. Raises InvalidRequest for contradicting parameters."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "exactly one of prompt and messages is needed")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest("continue_final_message", "continue_final_message needs add_generation_prompt: false")
        kwargs = dict(self.chat_template_kwargs or {})
        if not self.add_generation_prompt:
            kwargs["add_generation_prompt"] = False
        if self.tools:
            _, kwargs["tools"] = read_tool_use(self.tools, None, is_parallel=True)
        return GenerationInput(
            request_id=request_id,
            text=self.prompt,
            messages=None if self.messages is None else read_messages(self.messages),
            add_special_tokens=self.add_special_tokens,
            chat_template_kwargs=kwargs,
            continue_final_message=self.continue_final_message,
        )


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str = Field(default="", description="needed if several models are served")
    tokens: Annotated[Listed[TokenId], described(maxItems=DETOKENIZE_TOKENS_MAX)] = Field(description="token ids")


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(kind: type[BodyT], raw: bytes) -> BodyT:
    """Parses a request body. Raises InvalidRequest that names the first wrong parameter.

    A body over `coordinator.api.http.http_transport.SMALL_BODY_BYTES` takes milliseconds, so call this in a thread.
    """
    content = without_neutral(_read_object(raw), kind.neutral, "")
    unused = [name for name in kind.unused if content.pop(name, None) is not None]
    if isinstance(content.get("structured_outputs"), dict):
        content["structured_outputs"] = without_neutral(
            content["structured_outputs"], StructuredOutputs.neutral, "structured_outputs."
        )
    if isinstance(content.get("messages"), list):
        check_count("messages", content["messages"], MESSAGES_MAX)
    try:
        body = kind.model_validate(content)
    except ValidationError as error:
        raise _named(error) from error
    body.ignore(*unused)
    return body


def _read_object(raw: bytes) -> dict[str, Any]:
    """Parses the body as a JSON object. Raises InvalidRequest."""
    check_json_size(raw)
    try:
        # json.loads on bytes would guess other encodings and accept unpaired surrogates.
        content = json.loads(raw.removeprefix(codecs.BOM_UTF8).decode())
        if b"\\ud" in raw.lower():  # an escaped unpaired surrogate is JSON, but cannot be encoded
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deeply
        raise InvalidRequest(None, f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest(None, "the body must be a JSON object")
    if raw.count(b"{") + raw.count(b"[") > DEPTH_MAX:
        _check_depth(content)
    return content


def _check_depth(content: dict[str, Any]) -> None:
    """Refuses JSON nested too deeply to be written again on Python's stack. Raises InvalidRequest."""
    level: list[Any] = [content]
    for _ in range(DEPTH_MAX):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
    if level:
        raise InvalidRequest(None, f"the body is JSON nested more than {DEPTH_MAX} deep")


def _is_field(part: str) -> bool:
    return part.isidentifier() and part not in ("str", "int", "bool") and not part[0].isupper()


def _named(error: ValidationError) -> InvalidRequest:
    # Every branch of a union reports errors; the first error of the first parameter is used.
    detail = error.errors(include_url=False)[0]
    is_unknown = detail["type"] == "extra_forbidden"
    *path, last = detail["loc"] or ("",)
    parameter = ""
    # The location contains branches of a union as types or models, which are left out. A client may call its own
    # unknown parameter like one.
    for part in (*path, last):
        if isinstance(part, int):
            parameter += f"[{part}]"
        elif _is_field(part) or (is_unknown and part is last):
            parameter += f".{part}" if parameter else part
    if is_unknown:
        return InvalidRequest(parameter, f"unknown parameter {parameter!r}{successor(parameter)}")
    if detail["type"] == "missing":
        return InvalidRequest(parameter, f"parameter {parameter!r} is required")
    return InvalidRequest(parameter, f"{parameter}: {detail['msg']}")
