"""The body of POST /v1/responses, and its translation to a chat. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from coordinator.api.responses.input_items import InputItem, ignored_in, read_items
from coordinator.api.responses.response_tools import CallableTools, ChosenTool, FunctionTool, ListedTools, ResponseTool
from coordinator.api.schema.body_parts import Body, LenientBody, Listed, described
from coordinator.api.schema.chat_messages import ChatMessage
from coordinator.api.schema.generation_fields import Logprobs
from coordinator.api.schema.openai_schema import ChatBody
from coordinator.api.schema.structured_output import JsonSchemaFormat, ResponseFormat
from coordinator.api.schema.tool_schema import TOOLS_MAX
from coordinator.api.schema.translated_body import OUTPUT_TOKENS_BOUNDS, SharedFields
from coordinator.intake.generation_request import CANARY_KEY_CHARS_MAX, MESSAGES_MAX, TENANT_CHARS_MAX, PromptLimit
from coordinator.service.stored_responses import NOTHING_REMEMBERED, References, Remembered
from outrider.errors import InvalidRequest
from outrider.sampling_params import UINT32_MAX, check_count

METADATA_PAIRS_MAX: Final = 16
_WORD_CHARS_MAX: Final = 64
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDABLE: Final = (
    _LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip


class TextFormat(Body):
    """The form of the output. A JSON schema is always followed, whatever `strict` is."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="form of the output")
    name: str | None = Field(default=None, description="accepted and not used")
    description: str | None = Field(default=None, description="accepted and not used")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="type json_schema: the schema")
    strict: bool | None = Field(default=None, description="accepted and not used")

    def to_chat(self) -> ResponseFormat:
        """Converts the format to a chat's."""
        named = None
        if self.schema_ is not None:
            named = JsonSchemaFormat(name=self.name or "", schema=self.schema_)
        return ResponseFormat(type=self.type, json_schema=named)


class TextOptions(Body):
    format: TextFormat | None = Field(default=None, description="form of the output")
    verbosity: Annotated[str, Field(max_length=_WORD_CHARS_MAX)] | None = Field(
        default=None, description="for chat templates that know it, ignored by others"
    )


class ReasoningOptions(LenientBody):
    """Only `effort` is used: reasoning is neither summarized nor hidden."""

    effort: Annotated[str, Field(max_length=_WORD_CHARS_MAX)] | None = Field(
        default=None, description="for chat templates that know it, ignored by others"
    )


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = Field(default=None, description="accepted and not used: nothing is padded")


class Compaction(LenientBody):
    """A summary of the conversation once it is long, which is not served; accepted while it has nothing to do."""

    type: Annotated[str, described(enum=["compaction"])] = Field(description="always `compaction`")
    compact_threshold: Annotated[int, Field(ge=0, le=UINT32_MAX)] = Field(
        description="tokens of the prompt beyond which it would be made; the request is then refused"
    )


_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]


class ResponseBody(SharedFields):
    """The body of POST /v1/responses."""

    neutral = MappingProxyType({"background": (False,), "conversation": (), "prompt": ()})
    unused = (
        "max_tool_calls", "safety_identifier", "service_tier", "prompt_cache_retention", "prompt_cache_options",
        "client_metadata", "access_programs",
    )  # fmt: skip
    names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
    )

    input: str | Annotated[Listed[InputItem], described(minItems=1, maxItems=MESSAGES_MAX)] = Field(
        description="the message of the user, or the items of the conversation so far"
    )
    instructions: str | None = Field(default=None, description="a system message before all others")
    max_output_tokens: Annotated[int, described(OUTPUT_TOKENS_BOUNDS)] | None = Field(
        default=None, description="longest output; the rest of the context where it is left out or longer"
    )
    tools: Annotated[Listed[ResponseTool], described(maxItems=TOOLS_MAX)] | None = Field(
        default=None, description="functions that the model may call; other tools are left out"
    )
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = Field(
        default=None, description="whether functions are called, and which"
    )
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call")
    text: TextOptions | None = Field(default=None, description="form of the output")
    reasoning: ReasoningOptions | None = Field(default=None, description="how much the model reasons")
    include: Listed[Annotated[str, described(enum=[*_INCLUDABLE])]] | None = Field(
        default=None, description=f"only `{_LOGPROBS}` has an effect"
    )
    top_logprobs: Logprobs | None = Field(default=None, description=f"needs `include` with `{_LOGPROBS}`")
    stream: bool | None = Field(default=None, description="send the answer as events while it is generated")
    stream_options: ResponseStreamOptions | None = None
    previous_response_id: str | None = Field(
        default=None, description="a stored response, whose conversation and output come before `input`"
    )
    store: bool | None = Field(
        default=None, description="false: the response is not kept, so later requests cannot refer to it"
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="`auto` is accepted, but nothing is left out: an input that is too long is refused"
    )
    context_management: Listed[Compaction] | None = Field(
        default=None, description="refused once there is something to summarize"
    )
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], described(maxProperties=METADATA_PAIRS_MAX)] | None = Field(
        default=None, description="comes back in the answer"
    )
    user: Annotated[str, Field(max_length=TENANT_CHARS_MAX)] | None = Field(
        default=None, description="the tenant of the request"
    )
    prompt_cache_key: Annotated[str, Field(max_length=CANARY_KEY_CHARS_MAX)] | None = Field(
        default=None, description="selects the arm of a canary"
    )

    @property
    def prompt_limit(self) -> PromptLimit | None:
        where = "context_management[{}].compact_threshold"
        limits = []
        for index, each in enumerate(self.context_management or ()):
            if each.type != "compaction":
                raise InvalidRequest(f"context_management[{index}].type", f"{each.type!r} is not served; leave it out")
            limits.append(PromptLimit(where.format(index), each.compact_threshold))
        return min(limits, key=lambda limit: limit.num_tokens, default=None)

    @property
    def max_output(self) -> int | None:
        """Most tokens of the output; None for the rest of the context."""
        return self.max_output_tokens

    @property
    def shows_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def references(self) -> References:
        """Returns what is to be looked up before `translate`."""
        ids = [item.id or "" for item in self._items() if item.type == "item_reference"]
        return References(self.previous_response_id, tuple(dict.fromkeys(ids)))

    def conversation(self, remembered: Remembered) -> list[InputItem]:
        """Returns the items of the whole conversation. Raises InvalidRequest for too many."""
        items = [InputItem.model_validate(each) for each in remembered.before]
        for item in self._items():
            is_reference = item.type == "item_reference"
            items.append(InputItem.model_validate(remembered.items[item.id or ""]) if is_reference else item)
        check_count("input", items, MESSAGES_MAX)
        return items

    def translate(self, remembered: Remembered = NOTHING_REMEMBERED) -> ChatBody:
        """Builds the chat that asks for the same. Raises InvalidRequest, partly with the chat's names."""
        self._check()
        messages = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        items, num_before = self.conversation(remembered), len(remembered.before)
        messages += read_items(items, num_before)
        before = _tools_in(items[:num_before], -num_before)
        callable_tools = CallableTools.of(self._own_tools(), before, _tools_in(self._items()))
        tools, choice = callable_tools.choose(self.tool_choice)
        self.ignore(*callable_tools.left_out)
        self._report_ignored()
        text = self.text or TextOptions()
        return self.to_chat(
            messages,
            [*tools],
            choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=None if text.format is None else text.format.to_chat(),
            verbosity=text.verbosity,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            logprobs=self.shows_logprobs,
            top_logprobs=self.top_logprobs,
            user=self.user,
            prompt_cache_key=self.prompt_cache_key,
        )

    def template_words(self) -> dict[str, tuple[str, ...]]:
        """Returns the parameters that only a chat template can honour, with its variables that stand for them."""
        words: dict[str, tuple[str, ...]] = {}
        if self.reasoning is not None and self.reasoning.effort is not None:
            words["reasoning.effort"] = ("reasoning_effort",)
        if self.text is not None and self.text.verbosity is not None:
            words["text.verbosity"] = ("verbosity",)
        return words

    def _check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream_options needs stream: true")
        if self.top_logprobs and not self.shows_logprobs:
            raise InvalidRequest("top_logprobs", f"top_logprobs needs include with {_LOGPROBS!r}")
        for index, name in enumerate(self.include or ()):
            if name not in _INCLUDABLE:
                raise InvalidRequest(f"include[{index}]", f"include: {name!r} is not known")
        if len(self.metadata or {}) > METADATA_PAIRS_MAX:
            raise InvalidRequest("metadata", f"metadata must have at most {METADATA_PAIRS_MAX} pairs")

    def _items(self) -> list[InputItem]:
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def _own_tools(self) -> list[ListedTools]:
        return [("tools", self.tools)] if self.tools else []

    def _report_ignored(self) -> None:
        self.ignore(*ignored_in(self._items()))
        listed = [*self._own_tools(), *_tools_in(self._items())]
        functions = [tool for _, tools in listed for tool in tools if isinstance(tool, FunctionTool)]
        unknown = dict.fromkeys(name for tool in functions for name in tool.unknown)
        self.ignore(*(f"tools[].{name}" for name in unknown))
        if self.truncation == "auto":
            self.ignore("truncation")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            self.ignore("stream_options.include_obfuscation")
        if any(name != _LOGPROBS for name in self.include or ()):
            self.ignore("include")
        if self.reasoning is not None:
            self.ignore(*(f"reasoning.{name}" for name in self.reasoning.unknown))


def _tools_in(items: Sequence[InputItem], first: int = 0) -> list[ListedTools]:
    """Returns the tools that came as items, the first of which is that of this index."""
    return [(f"input[{index}].tools", item.tools) for index, item in enumerate(items, first) if item.tools]
