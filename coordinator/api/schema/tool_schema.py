"""OpenAI's fields for functions that a chat may call, and for calls in its messages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from coordinator.api.schema.body_parts import Body, LenientBody
from coordinator.formats.answer_parts import ToolMode, ToolUse
from coordinator.intake.closed_schema import closed
from coordinator.intake.json_size import check_json_size, check_schema_sizes
from outrider.errors import InvalidRequest
from outrider.sampling_params import check_count

TOOLS_MAX: Final = 128
STRICT: Final = "true: a schema that a grammar does not hold as a whole is refused; else it is loosened"

FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(LenientBody):
    """A callable function. Calls follow the JSON schema `parameters`, as far as a grammar holds it."""

    name: FunctionName = Field(description="the name by which the model calls it")
    description: str | None = Field(default=None, description="for the model: what the function does")
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments")
    strict: bool | None = Field(default=None, description=STRICT)


class Tool(LenientBody):
    type: Literal["function"] = Field(default="function", description="only functions can be called")
    function: Function

    def to_template(self) -> dict[str, Any]:
        """Converts the tool for chat templates."""
        function = self.function.model_dump(include=set(Function.model_fields), exclude_none=True)
        return {"type": self.type, "function": function}

    @property
    def ignored_names(self) -> tuple[str, ...]:
        """Fields that are not used, as paths within the tool."""
        return (*self.unknown, *(f"function.{name}" for name in self.function.unknown))


class LeftOutTool(LenientBody):
    """A tool that cannot be called here. Nothing of it is read but what names it."""

    type: str
    name: str | None = Field(default=None, description="names it in the response's header")

    def named(self, where: str) -> str:
        """Names the tool for the header and for errors, as `tools[2] (custom apply_patch)`."""
        return f"{where} ({self.type} {self.name})" if self.name else f"{where} ({self.type})"


def served_types(*types: str | None, served: str, other: str) -> Callable[[Any], str]:
    """Tells tools of these types from others, as a discriminator between models with these tags."""

    def tag(tool: Any) -> str:
        kind = tool.get("type", types[0]) if isinstance(tool, dict) else getattr(tool, "type", types[0])
        return other if isinstance(kind, str) and kind not in types else served

    return tag


class FunctionRef(Body):
    name: str = Field(description="one of the functions in `tools`")


class NamedToolChoice(Body):
    type: Literal["function"]
    function: FunctionRef


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(LenientBody):
    name: str = Field(description="the function that was called")
    arguments: str | dict[str, Any] = Field(default="", description="JSON, or what it stands for")

    def to_template(self) -> dict[str, Any]:
        """Converts the call for `Tokenizer.render_chat`. Raises InvalidRequest for JSON of too many values."""
        if isinstance(self.arguments, str):
            what = f"the arguments of a call of {self.name!r}"
            check_json_size(self.arguments.encode(errors="replace"), "messages", what)
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCall(LenientBody):
    """A call that the assistant made in an earlier message."""

    id: str = Field(default="", description="the call's id, which its answer repeats")
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_template(self) -> dict[str, Any]:
        """Converts the call for `Tokenizer.render_chat`. Raises InvalidRequest."""
        return ({"id": self.id} if self.id else {}) | self.function.to_template()


def read_tool_use(
    tools: Sequence[Tool], choice: ToolChoice | None, *, is_parallel: bool
) -> tuple[ToolUse | None, list[dict[str, Any]]]:
    """Returns the callable functions and the tools for the chat template; None and [] if no call is allowed.

    Raises InvalidRequest for too many tools, a duplicate name, or a choice that is not among them.
    """
    check_count("tools", tools, TOOLS_MAX)
    functions = {tool.function.name: tool.function.parameters for tool in tools}
    if len(functions) < len(tools):
        raise InvalidRequest("tools", "tools holds two functions of the same name")
    if choice == "none" or (choice in (None, "auto") and not tools):
        return None, []
    if not tools:
        raise InvalidRequest("tool_choice", "tool_choice requires a call, but there are no tools")
    check_schema_sizes("tools", *functions.values())
    functions = {name: closed(parameters) for name, parameters in functions.items()}
    strict = frozenset(tool.function.name for tool in tools if tool.function.strict)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in functions:
            raise InvalidRequest("tool_choice", f"tool_choice names {name!r}, which is not among the tools")
        # A function chosen by name is called once.
        use = ToolUse(((name, functions[name]),), ToolMode.REQUIRED, False, strict)
    else:
        mode = ToolMode.REQUIRED if choice == "required" else ToolMode.AUTO
        use = ToolUse(tuple(functions.items()), mode, is_parallel, strict)
    return use, [tool.to_template() for tool in tools]
