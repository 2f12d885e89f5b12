"""LlamaIndex's `OpenAILike`, used as its documentation shows."""

import os
from typing import Literal

from checks import check, equal, finish
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

PROMPT = "def read_file(path):\n"
MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="How is the weather?")]


class Weather(BaseModel):
    """How the weather is."""

    sky: Literal["clear", "cloudy", "rainy"]
    celsius: int = Field(ge=-40, le=50)


def get_weather(city: Literal["Paris", "London"]) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def model(**parameters: object) -> OpenAILike:
    common = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": "none", "max_retries": 0, "timeout": 60}
    asked = {"context_window": 1024, "temperature": 0, "max_tokens": 20} | parameters
    return OpenAILike(model=os.environ["OUTRIDER_MODEL"], **common, **asked)


@check("complete and stream_complete")
def _() -> None:
    llm = model(is_chat_model=False)
    answer = llm.complete(PROMPT)
    assert answer.text
    equal("".join(chunk.delta for chunk in llm.stream_complete(PROMPT)), answer.text)


@check("chat and stream_chat")
def _() -> None:
    llm = model(is_chat_model=True)
    answer = llm.chat(MESSAGES)
    assert answer.message.content
    equal("".join(chunk.delta or "" for chunk in llm.stream_chat(MESSAGES)), answer.message.content)
    assert llm.chat([*MESSAGES, answer.message, ChatMessage(role="user", content="And tomorrow?")]).message.content


@check("achat and astream_chat")
async def _() -> None:
    llm = model(is_chat_model=True)
    answer = await llm.achat(MESSAGES)
    text = "".join([chunk.delta or "" async for chunk in await llm.astream_chat(MESSAGES)])
    equal(text, answer.message.content)


@check("chat_with_tools and stream_chat_with_tools")
def _() -> None:
    llm = model(is_chat_model=True, is_function_calling_model=True, max_tokens=200)
    tools = [FunctionTool.from_defaults(fn=get_weather)]
    answer = llm.chat_with_tools(tools, user_msg="How is the weather?", tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    equal(calls[0].tool_kwargs.keys(), {"city"})
    *_, last = llm.stream_chat_with_tools(tools, user_msg="How is the weather?", tool_required=True)
    equal(llm.get_tool_calls_from_response(last)[0].tool_kwargs.keys(), {"city"})


@check("predict_and_call runs the tool")
def _() -> None:
    llm = model(is_chat_model=True, is_function_calling_model=True, max_tokens=200)
    answer = llm.predict_and_call([FunctionTool.from_defaults(fn=get_weather)], "How is it?", tool_required=True)
    assert str(answer).startswith("sunny in"), answer


@check("as_structured_llm")
def _() -> None:
    llm = model(is_chat_model=True, is_function_calling_model=True, max_tokens=200)
    answer = llm.as_structured_llm(Weather).complete("How is the weather?")
    assert isinstance(answer.raw, Weather)


finish()
