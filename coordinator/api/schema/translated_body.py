"""Bodies of other APIs than OpenAI's chat: each is translated to the chat that asks for the same. Pure.

So all of them have the same bounds, and what the chat learns to do they can do too. Errors are renamed to the
parameters that the client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from coordinator.api.schema.body_parts import Body, described
from coordinator.api.schema.chat_messages import ChatMessage
from coordinator.api.schema.generation_fields import SEED_BOUNDS, ServiceLevelObjective, Speculation
from coordinator.api.schema.openai_schema import ChatBody
from coordinator.api.schema.tool_schema import Tool, ToolChoice
from coordinator.intake.generation_request import (
    ASKED_SALT_CHARS_MAX,
    PRIORITY_MAX,
    REQUEST_ID_CHARS_MAX,
    GenerationInput,
    PromptLimit,
)
from outrider.errors import InvalidRequest
from outrider.sampling_params import BOUNDS, UINT32_MAX, Bounds

OUTPUT_TOKENS_BOUNDS: Final = Bounds(1, UINT32_MAX)


class SharedFields(Body):
    """The fields of a chat that bodies of other APIs have under the same name; all but the first are extensions."""

    names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Parameters of the chat, and of checks after it, by the names that this API has for them."""

    model: str = Field(default="", description="name of a served model; may be left out while only one is served")
    temperature: Annotated[float, described(BOUNDS["temperature"])] | None = None
    top_p: Annotated[float, described(BOUNDS["top_p"])] | None = None
    top_k: Annotated[int, described(Bounds(-1, UINT32_MAX), description="0 and -1 keep all")] | None = None
    min_p: Annotated[float, described(BOUNDS["min_p"])] | None = None
    presence_penalty: Annotated[float, described(BOUNDS["presence_penalty"])] | None = None
    frequency_penalty: Annotated[float, described(BOUNDS["frequency_penalty"])] | None = None
    repetition_penalty: Annotated[float, described(BOUNDS["repetition_penalty"])] | None = None
    seed: Annotated[int, described(SEED_BOUNDS, description="modulo 2^64")] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="arguments for the chat template")
    cache_salt: Annotated[str, Field(min_length=1, max_length=ASKED_SALT_CHARS_MAX)] | None = Field(
        default=None, description="only requests of the same salt share the prompt's KV"
    )
    priority: Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = Field(
        default=None, description="lower goes first"
    )
    deadline_ms: Annotated[int, Field(ge=1, le=UINT32_MAX)] | None = Field(
        default=None, description="milliseconds for the whole answer, from arrival"
    )
    request_id: Annotated[str, described(pattern=f"^[ -~]{{0,{REQUEST_ID_CHARS_MAX}}}$")] | None = Field(
        default=None, description="id of the request in place of `X-Request-Id`"
    )
    speculation: Speculation = Field(default_factory=Speculation, description="whether and how hints are verified")
    slo: ServiceLevelObjective | None = Field(default=None, description="times that the request aims at")

    @property
    def prompt_limit(self) -> PromptLimit | None:
        """The longest prompt that this API's edits of the conversation leave as it is. Raises InvalidRequest."""
        return None

    @property
    def max_output(self) -> int | None:
        """Most tokens of the output; None for the rest of the context."""
        return None

    def template_words(self) -> dict[str, tuple[str, ...]]:
        """Returns the sent parameters that only a chat template can honour, with its variables that stand for them."""
        return {}

    def to_chat(
        self,
        messages: list[ChatMessage],
        tools: list[Tool],
        tool_choice: ToolChoice | None,
        **values: Any,
    ) -> ChatBody:
        """Builds the chat that asks for the same, from what this API writes in its own way."""
        shared = {name: getattr(self, name) for name in SharedFields.model_fields}
        return ChatBody(messages=messages, tools=tools or None, tool_choice=tool_choice, **shared, **values)


def translated(body: SharedFields, translate: Callable[[], ChatBody], request_id: str) -> GenerationInput:
    """Translates a body to the chat that asks for the same, and converts that. Raises InvalidRequest."""
    with renamed_errors(body.names):
        (asked,) = translate().to_inputs(body.request_id or request_id)
        if body.max_output is not None:
            OUTPUT_TOKENS_BOUNDS.check("max_tokens", body.max_output)
        limit = body.prompt_limit
    return replace(asked, max_tokens=body.max_output, prompt_limit=limit, merges_system=True)


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the parameters of errors. A name stands for its parts as well."""
    try:
        yield
    except InvalidRequest as error:
        whole = error.parameter or ""
        ours = next((name for name in names if whole == name or whole.startswith((f"{name}.", f"{name}["))), None)
        if ours is None:
            raise
        theirs = names[ours] + whole[len(ours) :]
        raise InvalidRequest(theirs, error.message.replace(whole, theirs, 1)) from error
