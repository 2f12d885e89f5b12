"""OpenAI's Agents SDK, used as its documentation shows: over the Responses API, its default, and over chats."""

import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
)
from checks import check, equal, finish
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

MODEL = os.environ["OUTRIDER_MODEL"]
called = []


class Weather(BaseModel):
    sky: Literal["clear", "cloudy", "rainy"]
    celsius: int = Field(ge=-40, le=50)


# The tool is offered once. The answers have a type because a response that is cut off is an error to the SDK.
@function_tool(is_enabled=lambda context, agent: not called)
def get_weather(city: Literal["Paris", "London"]) -> str:
    """Weather of a city."""
    called.append(city)
    return f"sunny in {city}"


def agent(kind: type | None, **parameters: object) -> Agent:
    """An agent that calls the tool if it has one, and then answers."""
    called.clear()
    model = MODEL if kind is None else kind(model=MODEL, openai_client=AsyncOpenAI(max_retries=0, timeout=60))
    chosen = {"model_settings": ModelSettings(temperature=0, max_tokens=120), "output_type": Weather} | parameters
    return Agent(name="Assistant", instructions="Be brief.", model=model, **chosen)


CALLING = {
    "tools": [get_weather],
    "model_settings": ModelSettings(temperature=0, max_tokens=120, tool_choice="required", parallel_tool_calls=False),
}

for name, kind in (("default", None), ("Responses", OpenAIResponsesModel), ("chats", OpenAIChatCompletionsModel)):

    @check(f"{name}: an agent with a tool and an output type")
    async def _(kind: type | None = kind) -> None:
        result = await Runner.run(agent(kind, **CALLING), "How is the weather?", max_turns=3)
        equal(len(called), 1)
        assert isinstance(result.final_output, Weather)
        equal([item.type for item in result.new_items][:2], ["tool_call_item", "tool_call_output_item"])

    @check(f"{name}: the same, streamed")
    async def _(kind: type | None = kind) -> None:
        result = Runner.run_streamed(agent(kind, **CALLING), "How is the weather?", max_turns=3)
        kinds = [event.type async for event in result.stream_events()]
        equal(len(called), 1)
        assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)
        assert isinstance(result.final_output, Weather)

    @check(f"{name}: a session keeps the conversation")
    async def _(kind: type | None = kind) -> None:
        session = SQLiteSession("conversation")
        for text in ("How is the weather?", "And tomorrow?"):
            assert (await Runner.run(agent(kind), text, session=session)).final_output
        equal(len(await session.get_items()), 4)


@check("Responses: previous_response_id in place of the conversation")
async def _() -> None:
    first = await Runner.run(agent(None), "How is the weather?")
    second = await Runner.run(agent(None), "And tomorrow?", previous_response_id=first.last_response_id)
    assert second.final_output


@check("chats: an answer as text")
async def _() -> None:
    result = await Runner.run(agent(OpenAIChatCompletionsModel, output_type=str), "How is the weather?")
    assert result.final_output


finish()
