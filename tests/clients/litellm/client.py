"""LiteLLM, used as its documentation of OpenAI-compatible servers and of vLLM shows."""

import asyncio
import json
import os
from typing import Literal

import litellm
from checks import check, equal, finish
from pydantic import BaseModel, Field

MODEL = os.environ["OUTRIDER_MODEL"]
BASE = os.environ["OPENAI_BASE_URL"]
SERVER = {"api_base": BASE, "api_key": "none", "num_retries": 0, "timeout": 60}
PROMPT = "def read_file(path):\n"
MESSAGES = [{"role": "user", "content": "How is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "London"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}


class Weather(BaseModel):
    sky: Literal["clear", "cloudy", "rainy"]
    celsius: int = Field(ge=-40, le=50)


for provider in ("openai", "hosted_vllm"):
    model = f"{provider}/{MODEL}"

    @check(f"{provider}/: completion, whole and streamed")
    def _(model: str = model) -> None:
        asked = {"model": model, "messages": MESSAGES, "max_tokens": 20, "temperature": 0, **SERVER}
        answer = litellm.completion(**asked)
        chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        equal(text, answer.choices[0].message.content)
        rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        equal(rebuilt.usage.completion_tokens, answer.usage.completion_tokens)

    @check(f"{provider}/: a tool is called, and LiteLLM's own message sent back")
    def _(model: str = model) -> None:
        asked = {"model": model, "tools": [TOOL], "temperature": 0, **SERVER}
        answer = litellm.completion(messages=MESSAGES, tool_choice="required", **asked)
        message = answer.choices[0].message
        assert json.loads(message.tool_calls[0].function.arguments).keys() == {"city", "days"}
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
        messages = [*MESSAGES, message, *results]
        answer = litellm.completion(messages=messages, max_tokens=10, tool_choice="none", **asked)
        assert answer.choices[0].message.content

    @check(f"{provider}/: a tool is called in a stream")
    def _(model: str = model) -> None:
        named = {"type": "function", "function": {"name": "get_weather"}}
        stream = litellm.completion(
            model=model, messages=MESSAGES, tools=[TOOL], tool_choice=named, stream=True, **SERVER
        )
        rebuilt = litellm.stream_chunk_builder(list(stream), messages=MESSAGES)
        arguments = rebuilt.choices[0].message.tool_calls[0].function.arguments
        assert json.loads(arguments).keys() == {"city", "days"}, arguments

    @check(f"{provider}/: structured output")
    def _(model: str = model) -> None:
        answer = litellm.completion(model=model, messages=MESSAGES, response_format=Weather, **SERVER)
        Weather.model_validate_json(answer.choices[0].message.content)

    @check(f"{provider}/: acompletion")
    async def _(model: str = model) -> None:
        asked = [litellm.acompletion(model=model, messages=MESSAGES, max_tokens=5, **SERVER) for _ in range(3)]
        assert all(answer.choices[0].message.content for answer in await asyncio.gather(*asked))

    @check(f"{provider}/: errors are typed exceptions")
    def _(provider: str = provider) -> None:
        try:
            litellm.completion(model=f"{provider}/no-such-model", messages=MESSAGES, **SERVER)
        except litellm.NotFoundError:
            return
        raise AssertionError("an unknown model is not refused")


@check("text-completion-openai/: text_completion with one prompt and with several, whole and streamed")
def _() -> None:
    asked = {"model": f"text-completion-openai/{MODEL}", "max_tokens": 8, "temperature": 0, **SERVER}
    one = litellm.text_completion(prompt=PROMPT, **asked)
    several = litellm.text_completion(prompt=[PROMPT, "import os\n"], **asked)
    equal(len(several.choices), 2)
    equal(several.choices[0].text, one.choices[0].text)
    chunks = litellm.text_completion(prompt=PROMPT, stream=True, **asked)
    equal("".join(chunk.choices[0].text or "" for chunk in chunks), one.choices[0].text)


@check("hosted_vllm/: batch_completion")
def _() -> None:
    answers = litellm.batch_completion(
        model=f"hosted_vllm/{MODEL}", messages=[MESSAGES, MESSAGES], max_tokens=5, temperature=0, **SERVER
    )
    equal(*(answer.choices[0].message.content for answer in answers))


@check("openai/: responses, whole and streamed")
def _() -> None:
    asked = {"model": f"openai/{MODEL}", "input": "Name a city.", "max_output_tokens": 10, "temperature": 0, **SERVER}
    answer = litellm.responses(**asked)
    text = answer.output[0].content[0].text
    events = list(litellm.responses(**asked, stream=True))
    equal("".join(event.delta for event in events if event.type == "response.output_text.delta"), text)


@check("anthropic/: completion over /v1/messages")
def _() -> None:
    server = SERVER | {"api_base": os.environ["ANTHROPIC_BASE_URL"]}
    answer = litellm.completion(model=f"anthropic/{MODEL}", messages=MESSAGES, max_tokens=10, **server)
    assert answer.choices[0].message.content


finish()
