"""The `anthropic` package, used as its README shows."""

import os

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from checks import check, equal, finish

MODEL = os.environ["OUTRIDER_MODEL"]
MESSAGES = [{"role": "user", "content": "How is the weather in Paris?"}]
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "London"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
    },
}
# This version of the package has no argument for it.
GREEDY = {"temperature": 0}
client = Anthropic(max_retries=0, timeout=60)


@check("messages.create")
def _() -> None:
    message = client.messages.create(
        model=MODEL, max_tokens=20, messages=MESSAGES, system="Be brief.", extra_body=GREEDY, metadata={"user_id": "u"}
    )
    equal((message.type, message.role, message.content[0].type), ("message", "assistant", "text"))
    assert message.content[0].text
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens <= 20
    messages = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": "Tomorrow?"}]
    again = client.messages.create(model=MODEL, max_tokens=5, messages=messages)
    assert again.usage.input_tokens > message.usage.input_tokens


@check("messages.stream has the text of messages.create")
def _() -> None:
    asked = {"model": MODEL, "max_tokens": 20, "messages": MESSAGES, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    equal(text, whole.content[0].text)
    equal((final.stop_reason, final.usage.output_tokens), (whole.stop_reason, whole.usage.output_tokens))
    kinds = [event.type for event in client.messages.create(**asked, stream=True)]
    equal((kinds[0], kinds[-1]), ("message_start", "message_stop"))


@check("a stop sequence ends the message")
def _() -> None:
    text = client.messages.create(model=MODEL, max_tokens=20, messages=MESSAGES, extra_body=GREEDY).content[0].text
    stop = text.strip()[3:6]
    message = client.messages.create(
        model=MODEL, max_tokens=20, messages=MESSAGES, extra_body=GREEDY, stop_sequences=[stop]
    )
    equal((message.stop_reason, message.stop_sequence), ("stop_sequence", stop))


@check("a tool is used, and its result sent back")
def _() -> None:
    asked = {"model": MODEL, "max_tokens": 200, "tools": [TOOL], "extra_body": GREEDY}
    message = client.messages.create(
        messages=MESSAGES, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **asked
    )
    equal(message.stop_reason, "tool_use")
    (use,) = [block for block in message.content if block.type == "tool_use"]
    equal((use.name, use.input.keys()), ("get_weather", {"city", "days"}))
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    messages = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=messages, **(asked | {"max_tokens": 10}), tool_choice={"type": "none"})
    equal([block.type for block in answer.content], ["text"])


@check("the input of a tool is streamed")
def _() -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert parts
    (use,) = final.content
    equal(use.input.keys(), {"city", "days"})


@check("count_tokens counts what a message counts")
def _() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    message = client.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES)
    equal(counted.input_tokens, message.usage.input_tokens)


@check("errors are typed exceptions")
def _() -> None:
    for expected, changed in (
        (anthropic.BadRequestError, {"extra_body": {"temperature": 9}}),
        (anthropic.BadRequestError, {"messages": []}),
        (anthropic.NotFoundError, {"model": "no-such-model"}),
    ):
        try:
            client.messages.create(**({"model": MODEL, "max_tokens": 1, "messages": MESSAGES} | changed))
        except anthropic.APIStatusError as error:
            assert type(error) is expected, error
            equal(error.body["type"], "error")
        else:
            raise AssertionError(f"{changed} is not refused")


@check("AsyncAnthropic")
async def _() -> None:
    async with (
        AsyncAnthropic(max_retries=0, timeout=60) as asynchronous,
        asynchronous.messages.stream(model=MODEL, max_tokens=10, messages=MESSAGES) as stream,
    ):
        assert [text async for text in stream.text_stream]


finish()
