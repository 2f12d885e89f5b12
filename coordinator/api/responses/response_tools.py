"""The tools of the Responses API, and which of them a request may call. Pure.

Only functions can be called. Tools that OpenAI's servers run, or whose input is no JSON, are left out of the prompt and
named in the response's header: coding agents declare them with every request, and go on without them. A choice that
demands one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from coordinator.api.schema.body_parts import LenientBody, Listed, described
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
from outrider.errors import InvalidRequest
from outrider.sampling_params import check_count

_FUNCTION: Final = "function"
_ALLOWED: Final = "allowed_tools"


class FunctionTool(LenientBody):
    """A callable function. Calls follow the JSON schema `parameters`, as far as a grammar holds it."""

    type: Annotated[str, described(enum=[_FUNCTION])] = Field(description="only functions can be called")
    name: FunctionName | None = Field(default=None, description="the name by which the model calls it")
    description: str | None = Field(default=None, description="for the model: what the function does")
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments")
    strict: bool | None = Field(default=None, description=STRICT)

    def to_tool(self, where: str) -> Tool:
        """Converts the tool to a chat's. Raises InvalidRequest."""
        if self.name is None:
            raise InvalidRequest(f"{where}.name", f"{where}.name is required")
        return Tool(
            function=Function(
                name=self.name,
                description=self.description,
                parameters=self.parameters,
                strict=self.strict or None,
            )
        )


class HostedTool(LeftOutTool):
    """A tool of another kind: it is left out of the prompt, and named in the response's header."""

    type: Annotated[str, described(**{"not": {"enum": [_FUNCTION]}})] = Field(description="kind of the tool")


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("Function")] | Annotated[HostedTool, Tag("Hosted")],
    Discriminator(served_types(_FUNCTION, served="Function", other="Hosted")),
]


ListedTools = tuple[str, Sequence[FunctionTool | HostedTool]]
"""A list of tools, after its place in the body."""


class ChosenTool(LenientBody):
    """The choice of one function, or of some of them."""

    type: Annotated[str, described(enum=[_FUNCTION, _ALLOWED])] = Field(description="kind of the choice")
    name: str | None = Field(default=None, description="type function: its name")
    mode: Literal["auto", "required"] = Field(
        default="auto", description="type allowed_tools: whether a call must come"
    )
    tools: Listed[dict[str, Any]] | None = Field(
        default=None, description="type allowed_tools: the functions that may be called, each with type and name"
    )


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The tools of a request that can be called, and those that are left out, as the header names them."""

    tools: Sequence[Tool]
    left_out: Sequence[str]

    @classmethod
    def of(
        cls, own: Sequence[ListedTools], remembered: Sequence[ListedTools], added: Sequence[ListedTools]
    ) -> CallableTools:
        """Sorts the tools of a request, those of the conversation that it refers to, and those in its input.

        The function that was declared last has a name: one of the input, else of the request, else of the conversation.
        Raises InvalidRequest, also for two functions of the same name in one list.
        """
        left_out: list[str] = []
        first, before, last = (_functions(lists, left_out) for lists in (own, remembered, added))
        # In this order the tools at the beginning of the prompt stay the same from turn to turn.
        return cls([*(first | before | first | last).values()], left_out)

    def choose(self, choice: str | ChosenTool | None) -> tuple[Sequence[Tool], ToolChoice | None]:
        """Returns the functions that may be called, and the choice among them. Raises InvalidRequest."""
        if not isinstance(choice, ChosenTool):
            if choice == "required" and not self.tools:
                raise self._refusal("tool_choice requires a call")
            return self.tools, choice  # type: ignore[return-value]
        if choice.type == _FUNCTION:
            if choice.name is None:
                raise InvalidRequest("tool_choice.name", "tool_choice.name is required for its type function")
            return self.tools, NamedToolChoice(type="function", function=FunctionRef(name=choice.name))
        if choice.type != _ALLOWED:
            raise self._refusal(f"tool_choice demands a tool of type {choice.type!r}")
        return self._allowed(choice), choice.mode

    def _allowed(self, choice: ChosenTool) -> list[Tool]:
        allowed = [each.get("name") for each in choice.tools or () if each.get("type", _FUNCTION) == _FUNCTION]
        known = {tool.function.name for tool in self.tools}
        if not choice.tools or not all(isinstance(name, str) and name in known for name in allowed):
            raise InvalidRequest("tool_choice.tools", "tool_choice.tools needs names of functions among the tools")
        if choice.mode == "required" and not allowed:
            raise self._refusal("tool_choice requires a call")
        return [tool for tool in self.tools if tool.function.name in allowed]

    def _refusal(self, what: str) -> InvalidRequest:
        left_out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        return InvalidRequest("tool_choice", f"{what}, but only functions can be called{left_out}")


def _functions(lists: Sequence[ListedTools], left_out: list[str]) -> dict[str, Tool]:
    """Returns the functions by name, the last of each; adds to `left_out` what cannot be called."""
    found: dict[str, Tool] = {}
    for where, tools in lists:
        check_count(where, tools, TOOLS_MAX)
        listed: dict[str, Tool] = {}
        for index, tool in enumerate(tools):
            place = f"{where}[{index}]"
            if isinstance(tool, HostedTool):
                left_out.append(tool.named(place))
                continue
            made = tool.to_tool(place)
            if made.function.name in listed:
                raise InvalidRequest(where, f"{where} holds two functions of the same name")
            listed[made.function.name] = made
        found |= listed
    return found
