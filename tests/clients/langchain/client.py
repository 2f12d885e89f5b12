"""LangChain's package for OpenAI, used as its documentation shows."""

import os
from typing import Literal

from checks import check, equal, finish
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

MODEL = os.environ["OUTRIDER_MODEL"]
PROMPT = "def read_file(path):\n"
MESSAGES = [SystemMessage("Be brief."), HumanMessage("How is the weather in Paris?")]


class Weather(BaseModel):
    """How the weather is."""

    sky: Literal["clear", "cloudy", "rainy"]
    celsius: int = Field(ge=-40, le=50)


@tool
def get_weather(city: Literal["Paris", "London"]) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def chat(**parameters: object) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, temperature=0, max_retries=0, timeout=60, **parameters)


for name, parameters in (("chat completions", {}), ("Responses API", {"use_responses_api": True})):

    @check(f"{name}: invoke and stream")
    def _(parameters: dict = parameters) -> None:
        llm = chat(max_tokens=20, **parameters)
        answer = llm.invoke(MESSAGES)
        assert answer.text
        assert answer.usage_metadata["output_tokens"] > 0
        chunks = list(llm.stream(MESSAGES))
        equal("".join(chunk.text for chunk in chunks), answer.text)
        assert llm.invoke([*MESSAGES, answer, HumanMessage("And tomorrow?")]).text

    @check(f"{name}: bind_tools; the result is sent back")
    def _(parameters: dict = parameters) -> None:
        llm = chat(max_tokens=200, **parameters)
        answer = llm.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke(MESSAGES)
        (call,) = answer.tool_calls
        equal(call["name"], "get_weather")
        result = get_weather.invoke(call)
        assert isinstance(result, ToolMessage)
        assert llm.invoke([*MESSAGES, answer, result]).text

    @check(f"{name}: bind_tools in a stream")
    def _(parameters: dict = parameters) -> None:
        llm = chat(max_tokens=200, **parameters).bind_tools([get_weather], tool_choice="get_weather")
        total = None
        for chunk in llm.stream(MESSAGES):
            total = chunk if total is None else total + chunk
        equal(total.tool_calls[0]["args"].keys(), {"city"})

    for method in ("json_schema", "function_calling"):

        @check(f"{name}: with_structured_output, {method}")
        def _(parameters: dict = parameters, method: str = method) -> None:
            llm = chat(max_tokens=200, **parameters).with_structured_output(Weather, method=method)
            assert isinstance(llm.invoke("How is the weather in Paris?"), Weather)


@check("chat completions: batch and ainvoke")
async def _() -> None:
    llm = chat(max_tokens=5)
    assert all(answer.text for answer in llm.batch(["Name a city.", "Name a river."]))
    assert (await llm.ainvoke("Name a city.")).text
    assert [chunk async for chunk in llm.astream("Name a city.")]


@check("OpenAI: invoke, stream, and generate with several prompts")
def _() -> None:
    llm = OpenAI(model=MODEL, temperature=0, max_tokens=8, max_retries=0, timeout=60)
    text = llm.invoke(PROMPT)
    equal("".join(llm.stream(PROMPT)), text)
    result = llm.generate([PROMPT, "import os\n"])
    equal(len(result.generations), 2)
    equal(result.generations[0][0].text, text)
    assert result.llm_output["token_usage"]["completion_tokens"] > 0


@check("OpenAI: n and best_of")
def _() -> None:
    llm = OpenAI(model=MODEL, temperature=1, max_tokens=4, n=2, best_of=2, max_retries=0, timeout=60)
    result = llm.generate([PROMPT, "import os\n"])
    equal([len(generations) for generations in result.generations], [2, 2])


finish()
