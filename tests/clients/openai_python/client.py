"""The `openai` package for Python, used as its README and OpenAI's guides show."""

import json
import os
import time
from typing import Literal

import openai
from checks import check, equal, finish
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

MODEL = os.environ["OUTRIDER_MODEL"]
PROMPT = "def read_file(path):\n"
MESSAGES = [{"role": "user", "content": "How is the weather in Paris?"}]
client = OpenAI(max_retries=0, timeout=60)


class Weather(BaseModel):
    sky: Literal["clear", "cloudy", "rainy"]
    celsius: int = Field(ge=-40, le=50)


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
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@check("models.list and models.retrieve")
def _() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    equal(client.models.retrieve(MODEL).object, "model")


@check("completions.create")
def _() -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0)
    equal((answer.object, answer.choices[0].finish_reason), ("text_completion", "length"))
    equal(answer.usage.completion_tokens, 20)
    with client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    equal("".join(chunk.choices[0].text for chunk in chunks if chunk.choices), answer.choices[0].text)
    equal(chunks[-1].choices, [])
    equal(chunks[-1].usage.total_tokens, answer.usage.total_tokens)


@check("completions.create with several prompts, as texts and as tokens")
def _() -> None:
    prompts = [PROMPT, "import os\n", "class Point:\n"]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=8, temperature=0)
    equal([choice.index for choice in answer.choices], [0, 1, 2])
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        alone = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
        equal(choice.text, alone.choices[0].text)
    answer = client.completions.create(model=MODEL, prompt=[[10, 11], [12]], n=2, max_tokens=4, seed=1)
    equal([choice.index for choice in answer.choices], [0, 1, 2, 3])
    equal(answer.usage.prompt_tokens, 3)


@check("completions.create with echo and logprobs")
def _() -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text.startswith(PROMPT), choice.text
    equal("".join(choice.logprobs.tokens), choice.text)
    equal(choice.logprobs.token_logprobs[0], None)
    equal(len(choice.logprobs.top_logprobs), len(choice.logprobs.tokens))
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


@check("chat.completions.create")
def _() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 20, "temperature": 0}
    answer = client.chat.completions.create(**asked)
    equal((answer.object, answer.choices[0].message.role), ("chat.completion", "assistant"))
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    equal(text, answer.choices[0].message.content)
    equal(chunks[-1].usage.completion_tokens, answer.usage.completion_tokens)
    messages = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "And tomorrow?"}]
    again = client.chat.completions.create(**(asked | {"messages": messages}))
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


@check("chat.completions.create with logprobs, n and what OpenAI's own models take")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "developer", "content": "Be brief."}, *MESSAGES], n=2, seed=3, max_tokens=5,
        logprobs=True, top_logprobs=2, metadata={"a": "b"}, store=False, service_tier="auto", prompt_cache_key="c",
        safety_identifier="d", reasoning_effort="low", verbosity="low", parallel_tool_calls=True, user="e",
    )  # fmt: skip
    equal([choice.index for choice in answer.choices], [0, 1])
    equal(len(answer.choices[0].logprobs.content[0].top_logprobs), 2)


@check("chat.completions.create with content in parts")
def _() -> None:
    parts = [{"type": "text", "text": "How is the weather"}, {"type": "text", "text": "in Paris?"}]
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=5)
    assert answer.choices[0].message.content


@check("a tool is called, and its result sent back")
def _() -> None:
    asked = {"model": MODEL, "tools": [TOOL], "temperature": 0}
    answer = client.chat.completions.create(
        messages=MESSAGES, tool_choice="required", parallel_tool_calls=False, **asked
    )
    message = answer.choices[0].message
    equal(answer.choices[0].finish_reason, "tool_calls")
    call = message.tool_calls[0]
    equal(call.function.name, "get_weather")
    assert json.loads(call.function.arguments).keys() == {"city", "days"}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    messages = [*MESSAGES, message, *results]
    answer = client.chat.completions.create(messages=messages, max_tokens=10, tool_choice="none", **asked)
    assert answer.choices[0].message.content


@check("the first entry of each delta has the whole call of a stream")
def _() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=named, temperature=0, stream=True
    )
    name, arguments, ids = "", "", set()
    for chunk in stream:
        for entry in (chunk.choices[0].delta.tool_calls or [])[:1]:
            name += entry.function.name or ""
            arguments += entry.function.arguments or ""
            ids |= {entry.id} - {None}
    equal((name, len(ids)), ("get_weather", 1))
    assert json.loads(arguments).keys() == {"city", "days"}, arguments


@check("chat.completions.stream with its events")
def _() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        completion = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds, kinds
    assert json.loads(completion.choices[0].message.tool_calls[0].function.arguments)


@check("structured output: response_format and parse")
def _() -> None:
    schema = {
        "name": "weather",
        "schema": Weather.model_json_schema() | {"additionalProperties": False},
        "strict": True,
    }
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_schema", "json_schema": schema}
    )
    Weather.model_validate_json(answer.choices[0].message.content)
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)


@check("tools together with response_format")
def _() -> None:
    tool = openai.pydantic_function_tool(Weather, name="report")
    asked = {"model": MODEL, "messages": MESSAGES, "tools": [tool], "response_format": Weather}
    answer = client.chat.completions.parse(**asked, tool_choice="required", parallel_tool_calls=False)
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    answer = client.chat.completions.parse(**asked, tool_choice="none")
    assert isinstance(answer.choices[0].message.parsed, Weather)


@check("errors are typed exceptions")
def _() -> None:
    for expected, code, changed in (
        (openai.BadRequestError, None, {"temperature": 9}),
        (openai.BadRequestError, None, {"messages": []}),
        (openai.NotFoundError, "model_not_found", {"model": "no-such-model"}),
    ):
        try:
            client.chat.completions.create(**({"model": MODEL, "messages": MESSAGES, "max_tokens": 1} | changed))
        except openai.APIStatusError as error:
            assert type(error) is expected, error
            equal(error.type, "invalid_request_error")
            assert code is None or error.code == code, error.body
        else:
            raise AssertionError(f"{changed} is not refused")


@check("a stream may be left")
def _() -> None:
    with client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=300, stream=True) as stream:
        next(iter(stream))
    assert client.models.list().data


@check("AsyncOpenAI")
async def _() -> None:
    async with AsyncOpenAI(max_retries=0, timeout=60) as asynchronous:
        stream = await asynchronous.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=10, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text


@check("responses.create, whole and streamed")
def _() -> None:
    asked = {"model": MODEL, "input": "Name a city.", "max_output_tokens": 20, "temperature": 0}
    answer = client.responses.create(**asked)
    assert answer.output_text
    events = list(client.responses.create(**asked, stream=True))
    equal(events[0].type, "response.created")
    assert events[-1].type in ("response.completed", "response.incomplete"), events[-1].type
    equal(events[-1].response.output_text, answer.output_text)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    equal(text, answer.output_text)
    with client.responses.stream(model=MODEL, input="How is the weather?", text_format=Weather) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Weather)


@check("responses.create with previous_response_id; retrieve and delete")
def _() -> None:
    first = client.responses.create(model=MODEL, input="Name a city.", max_output_tokens=10)
    second = client.responses.create(
        model=MODEL, input="And its river?", previous_response_id=first.id, max_output_tokens=10
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    equal(second.previous_response_id, first.id)
    equal(client.responses.retrieve(first.id).output_text, first.output_text)
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a deleted response is still there")


@check("responses.create with a tool and its output")
def _() -> None:
    tool = {"type": "function", **TOOL["function"]}
    asked = {"model": MODEL, "tools": [tool], "temperature": 0}
    items = [{"role": "user", "content": "How is the weather in Paris?"}]
    answer = client.responses.create(input=items, tool_choice="required", parallel_tool_calls=False, **asked)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments).keys() == {"city", "days"}
    items += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    answer = client.responses.create(input=items, tool_choice="none", max_output_tokens=10, **asked)
    assert answer.output_text


@check("responses.parse")
def _() -> None:
    answer = client.responses.parse(model=MODEL, input="How is the weather?", text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)


@check("files and batches")
def _() -> None:
    bodies = [{"model": MODEL, "prompt": PROMPT, "max_tokens": 8 + i, "temperature": 0} for i in range(3)]
    asked = {"method": "POST", "url": "/v1/completions"}
    lines = [json.dumps({"custom_id": f"line-{i}", "body": body} | asked) for i, body in enumerate(bodies)]
    file = client.files.create(file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch")
    equal(client.files.retrieve(file.id).filename, "requests.jsonl")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"job": "nightly"}
    )
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    equal((batch.status, batch.request_counts.completed, batch.request_counts.failed), ("completed", 3, 0))
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    answered = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in answered}
    equal(texts, {f"line-{i}": client.completions.create(**body).choices[0].text for i, body in enumerate(bodies)})
    for name in (file.id, batch.output_file_id):
        assert client.files.delete(name).deleted


finish()
