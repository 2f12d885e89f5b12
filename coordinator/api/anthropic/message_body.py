"""The bodies of POST /v1/messages and POST /v1/messages/count_tokens, and their translation to a chat. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag

from coordinator.api.anthropic.context_edits import ContextManagement
from coordinator.api.anthropic.conversation import InputMessage, TextBlock, ignored_in, joined_blocks, read_conversation
from coordinator.api.schema.body_parts import Body, LenientBody, Listed, described
from coordinator.api.schema.chat_messages import ChatMessage
from coordinator.api.schema.openai_schema import ChatBody
from coordinator.api.schema.structured_output import JsonSchemaFormat, ResponseFormat
from coordinator.api.schema.tool_schema import (
    STRICT,
    TOOLS_MAX,
    Function,
    FunctionName,
    FunctionRef,
    LeftOutTool,
    NamedToolChoice,
    Tool,
    ToolChoice,
    served_types,
)
from coordinator.api.schema.translated_body import OUTPUT_TOKENS_BOUNDS, SharedFields
from coordinator.intake.generation_request import (
    MESSAGES_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    TENANT_CHARS_MAX,
    PromptLimit,
)
from outrider.errors import InvalidRequest
from outrider.sampling_params import check_count

_WORD_CHARS_MAX: Final = 64
_THINKING_VARIABLES: Final = ("enable_thinking", "thinking")
"""Variables by which chat templates of reasoning models are told whether to reason: Qwen's and DeepSeek's."""
_StopSequence = Annotated[str, described(minLength=1, maxLength=STOP_STRING_CHARS_MAX)]


class MessageTool(LenientBody):
    """A tool that the client runs. Calls follow the JSON schema `input_schema`, as far as a grammar holds it."""

    type: Annotated[str, described(enum=["custom", None])] | None = Field(
        default=None, description="only tools with a schema can be called"
    )
    name: FunctionName = Field(description="the name by which the model calls it")
    description: str | None = Field(default=None, description="for the model: what the tool does")
    input_schema: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments")
    strict: bool | None = Field(default=None, description=STRICT)

    def to_tool(self) -> Tool:
        """Converts the tool to a chat's."""
        return Tool(
            function=Function(
                name=self.name,
                description=self.description,
                parameters=self.input_schema,
                strict=self.strict or None,
            )
        )


class HostedMessageTool(LeftOutTool):
    """A tool that runs on a server, or whose schema only its author's models know: it is left out of the prompt, and
    named in the response's header."""

    type: Annotated[str, described(**{"not": {"enum": ["custom"]}})] = Field(description="kind of the tool")


AnyMessageTool = Annotated[
    Annotated[MessageTool, Tag("Custom")] | Annotated[HostedMessageTool, Tag("Hosted")],
    Discriminator(served_types(None, "custom", served="Custom", other="Hosted")),
]


class MessageToolChoice(LenientBody):
    type: Literal["auto", "any", "tool", "none"] = Field(description="whether tools are called")
    name: str | None = Field(default=None, description="type tool: its name")
    disable_parallel_tool_use: bool | None = Field(default=None, description="true: at most one call")

    def to_chat(self, tools: Sequence[Tool], left_out: Mapping[str, LeftOutTool]) -> ToolChoice:
        """Converts the choice to a chat's; `left_out` has tools by what names them. Raises InvalidRequest."""
        served = {tool.function.name for tool in tools}
        demanded = [
            named
            for named, tool in left_out.items()
            if (self.type == "any" and not served)
            or (self.type == "tool" and self.name == tool.name and self.name not in served)
        ]
        if demanded:
            raise InvalidRequest(
                "tool_choice", f"tool_choice demands a tool that is left out here: {', '.join(demanded)}"
            )
        if self.type == "tool":
            if self.name is None:
                raise InvalidRequest("tool_choice.name", "tool_choice.name is required for its type tool")
            return NamedToolChoice(type="function", function=FunctionRef(name=self.name))
        return "required" if self.type == "any" else self.type


class Thinking(LenientBody):
    """Whether the model reasons, for chat templates that can switch it."""

    type: Literal["enabled", "adaptive", "disabled"] = Field(description="whether the model reasons")


class OutputFormat(LenientBody):
    type: Literal["json_schema"] = Field(description="form of the output")
    schema_: dict[str, Any] = Field(alias="schema", description="the JSON schema")


class OutputConfig(Body):
    effort: Annotated[str, Field(max_length=_WORD_CHARS_MAX)] | None = Field(
        default=None, description="for chat templates that know `reasoning_effort`, ignored by others"
    )
    format: OutputFormat | None = Field(default=None, description="form of the output")


class MessageMetadata(LenientBody):
    user_id: Annotated[str, Field(max_length=TENANT_CHARS_MAX)] | None = Field(
        default=None, description="the tenant of the request"
    )


class CountTokensBody(SharedFields):
    """The body of POST /v1/messages/count_tokens. What does not decide the prompt is not used.

    Clients count to decide whether to shorten a conversation, so edits that are due and not served refuse no count."""

    neutral = MappingProxyType({"container": (), "mcp_servers": ([],)})
    unused = ("cache_control", "service_tier", "inference_geo", "speed", "diagnostics", "user_profile_id", "betas")
    names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "continue_final_message": "messages",
            "response_format": "output_config.format",
            "stop": "stop_sequences",
            "user": "metadata.user_id",
        }
    )

    messages: Annotated[Listed[InputMessage], described(minItems=1, maxItems=MESSAGES_MAX)] = Field(
        description="the conversation; where its last message is the assistant's, the output goes on with that"
    )
    system: str | Listed[TextBlock] | None = Field(default=None, description="a system message before all others")
    tools: Annotated[Listed[AnyMessageTool], described(maxItems=TOOLS_MAX)] | None = Field(
        default=None, description="tools that the model may call; those that run on a server are left out"
    )
    tool_choice: MessageToolChoice | None = Field(default=None, description="whether tools are called, and which")
    thinking: Thinking | None = Field(default=None, description="ignored where the chat template cannot switch it")
    output_config: OutputConfig | None = Field(default=None, description="form of the output")
    context_management: ContextManagement | None = Field(
        default=None,
        description="older thinking to clear; an answer is refused once something would clear more, a count never is",
    )

    def translate(self) -> ChatBody:
        """Builds the chat that asks for the same. Raises InvalidRequest, partly with the chat's names."""
        return self._chat()

    def template_words(self) -> dict[str, tuple[str, ...]]:
        """Returns the parameters that only a chat template can honour, with its variables that stand for them."""
        words: dict[str, tuple[str, ...]] = {}
        if self.output_config is not None and self.output_config.effort is not None:
            words["output_config.effort"] = ("reasoning_effort",)
        if self.thinking is not None:
            words["thinking"] = _THINKING_VARIABLES
        return words

    def _chat(self, **values: Any) -> ChatBody:
        management = self.context_management or ContextManagement()
        messages = read_conversation(management.edited(self.messages))
        if self.system is not None:
            messages.insert(0, ChatMessage(role="system", content=joined_blocks(self.system, "system")))
        if messages and messages[-1].role == "assistant":
            values |= {"continue_final_message": True, "add_generation_prompt": False}
        check_count("tools", self.tools or (), TOOLS_MAX)
        tools = [tool.to_tool() for tool in self.tools or () if isinstance(tool, MessageTool)]
        left_out = {
            tool.named(f"tools[{index}]"): tool
            for index, tool in enumerate(self.tools or ())
            if isinstance(tool, LeftOutTool)
        }
        self.ignore(*left_out)
        self._report_ignored()
        config, choice = self.output_config or OutputConfig(), self.tool_choice
        chat = self.to_chat(
            messages,
            tools,
            None if choice is None else choice.to_chat(tools, left_out),
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            response_format=None if config.format is None else _response_format(config.format),
            reasoning_effort=config.effort,
            **values,
        )
        if self.thinking is not None:
            switches = dict.fromkeys(_THINKING_VARIABLES, self.thinking.type != "disabled")
            chat.chat_template_kwargs = switches | (chat.chat_template_kwargs or {})
        return chat

    def _report_ignored(self) -> None:
        self.ignore(*ignored_in(self.messages))
        for name in ("system", "tools"):
            parts = getattr(self, name)
            parts = [part for part in parts or () if not isinstance(part, str | LeftOutTool)]
            unknown = [each for part in parts for each in part.unknown]
            self.ignore(*(f"{name}[].{each}" for each in dict.fromkeys(unknown)))
        for name in ("tool_choice", "thinking"):
            part = getattr(self, name)
            self.ignore(*(f"{name}.{each}" for each in ([] if part is None else part.unknown)))


class MessageBody(CountTokensBody):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, described(OUTPUT_TOKENS_BOUNDS)] = Field(
        description="longest output; the rest of the context where that is less"
    )
    stop_sequences: Annotated[Listed[_StopSequence], described(maxItems=STOP_STRINGS_MAX)] | None = Field(
        default=None, description="strings that end the output"
    )
    stream: bool | None = Field(default=None, description="send the answer as events while it is generated")
    metadata: MessageMetadata | None = Field(default=None, description="who asks")

    @property
    def prompt_limit(self) -> PromptLimit | None:
        return None if self.context_management is None else self.context_management.prompt_limit(self.messages)

    @property
    def max_output(self) -> int | None:
        return self.max_tokens

    def translate(self) -> ChatBody:
        metadata = self.metadata or MessageMetadata()
        self.ignore(*(f"metadata.{name}" for name in metadata.unknown))
        return self._chat(stop=self.stop_sequences, user=metadata.user_id)


def _response_format(told: OutputFormat) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="", schema=told.schema_))
