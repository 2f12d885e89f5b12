"""Attacks by sheer work: long prompts, large bodies, long queues, stored things, and work that is refused or left."""

from __future__ import annotations

import json
from typing import Any

from protos.outrider.v1 import common_pb2, generation_pb2
from tests.e2e.tenants.attacker import CHATS, COMPLETIONS, Attacker
from tests.e2e.tenants.scenario import scenario

MIB = 1 << 20
CONTEXT = 1024
REQUESTS_PER_MINUTE = 3  # of the bounded tenant


def token_ids(a: Attacker, count: int) -> list[int]:
    return [a.rng.randrange(3, 4000) for _ in range(count)]


@scenario(5, clients=40, is_short=True)
async def texts_of_a_mebibyte(a: Attacker) -> None:
    """Forty clients have texts of 1 MiB tokenized."""
    await a.post("/tokenize", {"prompt": a.words(MIB - 10)})


@scenario(5, clients=20)
async def texts_of_a_mebibyte_and_leaving(a: Attacker) -> None:
    """The same by clients that close the connection as soon as the text is sent."""
    await a.leave("/tokenize", {"prompt": a.words(MIB - 10)})


@scenario(5, clients=8)
async def texts_from_tokens(a: Attacker) -> None:
    """Lists of 200,000 tokens are turned into texts."""
    await a.post("/detokenize", {"tokens": token_ids(a, 200_000)})


@scenario(5, clients=8)
async def conversations_of_thousands(a: Attacker) -> None:
    """Conversations of 10,000 messages go through the chat template."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": a.letters(8)} for i in range(9_999)]
    await a.post("/tokenize", {"messages": messages})


@scenario(5, clients=8)
async def conversations_below_every_bound(a: Attacker) -> None:
    """Conversations that are just small enough to be rendered at once."""
    messages = [{"role": "user", "content": a.letters(470)} for _ in range(31)]
    await a.post("/tokenize", {"messages": messages})


@scenario(0, clients=4)
async def odd_conversations(a: Attacker) -> None:
    """Conversations that a chat template may fail at, and arguments that it does not expect."""
    role = a.rng.choice(("user", "assistant", "tool", "developer", a.letters(6)))
    content: Any = a.rng.choice((None, "", [], [{"type": "text", "text": ""}], [{"type": "image_url"}], "{{" * 2000))
    call = {
        "id": "",
        "type": "function",
        "function": {"name": a.letters(4), "arguments": a.rng.choice(("", "{", "[]"))},
    }
    body: dict[str, Any] = {"messages": [{"role": role, "content": content, "tool_calls": [call]}], "max_tokens": 2}
    words = {"messages": [], "tokenize": True, "tools": 1, "chat_template": "{{ x }}", a.letters(5): "a" * 200_000}
    await a.post(CHATS, body | {"chat_template_kwargs": words} if a.rng.random() < 0.5 else body)


@scenario(0, clients=8)
async def scores_of_prompts(a: Attacker) -> None:
    """Long prompts that are only scored and told again, without any new token."""
    await a.post(COMPLETIONS, {"prompt": token_ids(a, 900), "max_tokens": 0, "echo": True, "logprobs": 20})


@scenario(5, clients=8)
async def odd_json(a: Attacker) -> None:
    """Bodies of megabytes that are mostly nesting, numbers or unknown fields."""
    kind = a.rng.randrange(3)
    text = ("[" * 200_000, json.dumps({a.letters(6): i for i in range(60_000)}), "[" + "1," * MIB + "1]")[kind]
    await a.post(COMPLETIONS, f'{{"prompt": "a", "x": {text}}}'.encode())


@scenario(6, clients=8)
async def prompts_too_long(a: Attacker) -> None:
    """Prompts of 200 KB, which no context takes, are refused again and again."""
    await a.complete(a.words(200_000), 1)


async def is_charged(a: Attacker, what: str, body: dict[str, Any]) -> None:
    """Sends a refused request more often than its tenant may send any."""
    for _ in range(REQUESTS_PER_MINUTE * 3):
        answer = await a.post(COMPLETIONS, body, is_bounded=True)
        if answer is not None and answer.status_code == 429:
            return
    a.tally.fault(f"{REQUESTS_PER_MINUTE} requests a minute are permitted, and three times as many {what} were not")


@scenario(6, clients=1, times=1, is_load=False, is_short=True)
async def refused_prompts_are_charged(a: Attacker) -> None:
    """A tenant with three requests a minute sends nine prompts that are too long: most are refused as too many."""
    await is_charged(a, "prompts that are too long", {"prompt": a.words(100_000), "max_tokens": 1})


@scenario(6, clients=1, times=1, is_load=False)
async def refused_grammars_are_charged(a: Attacker) -> None:
    """The same with grammars that do not compile."""
    grammar = {"structured_outputs": {"regex": f"(?={a.letters(4)})b"}}
    await is_charged(a, "grammars that do not compile", {"prompt": "a", "max_tokens": 1, **grammar})


@scenario(7, clients=12, is_short=True)
async def long_prompts(a: Attacker) -> None:
    """Twelve prompts of 1,000 tokens at a time."""
    await a.post(COMPLETIONS, {"prompt": token_ids(a, CONTEXT - 24), "max_tokens": 1})


@scenario(7, clients=12)
async def long_prompts_over_grpc(a: Attacker) -> None:
    """The same over gRPC, twelve at a time."""
    prompt = generation_pb2.TokenPrompt(token_ids=token_ids(a, CONTEXT - 24))
    sampling = common_pb2.SamplingParams(max_tokens=1)
    await a.generate(generation_pb2.GenerationRequest(prompt_token_ids=prompt, sampling=sampling))


@scenario(7, clients=8)
async def every_probability(a: Attacker) -> None:
    """Long prompts with twenty log probabilities of each of their tokens and of the output's."""
    body = {"prompt": token_ids(a, CONTEXT - 64), "max_tokens": 32, "logprobs": 20, "prompt_logprobs": 20}
    await a.post(COMPLETIONS, body)


@scenario(9, clients=400)
async def a_long_queue(a: Attacker) -> None:
    """Four hundred requests at a time wait for a slot."""
    await a.complete(a.words(40), 32)


@scenario(9, clients=8)
async def many_choices(a: Attacker) -> None:
    """Requests of 100 choices each."""
    await a.complete(a.words(40), 16, n=100, temperature=1)


@scenario(9, clients=8)
async def many_prompts(a: Attacker) -> None:
    """Requests of 500 prompts each."""
    await a.post(COMPLETIONS, {"prompt": [a.words(20) for _ in range(500)], "max_tokens": 4})


@scenario(9, clients=8)
async def penalties_over_long_texts(a: Attacker) -> None:
    """All penalties over contexts that are nearly full."""
    body: dict[str, Any] = {"prompt": token_ids(a, 800), "max_tokens": 200, "ignore_eos": True}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    await a.post(COMPLETIONS, body | penalties)


@scenario(0, clients=8)
async def requests_that_are_left(a: Attacker) -> None:
    """Requests for 500 tokens whose client goes away at once."""
    await a.leave(COMPLETIONS, {"prompt": a.words(60), "max_tokens": 500, "ignore_eos": True, "n": 4})


@scenario(0, clients=8)
async def stored_responses(a: Attacker) -> None:
    """Responses of a megabyte that are stored, and read again."""
    answer = await a.post("/v1/responses", {"input": "a", "max_output_tokens": 16, "instructions": a.letters(200)})
    if answer is not None and answer.status_code == 200:
        more = {"previous_response_id": answer.json()["id"], "input": "b", "max_output_tokens": 16}
        await a.post("/v1/responses", more)
        await a.post("/v1/responses", more | {"input": a.words(900_000)})


@scenario(0, clients=2)
async def files_and_batches(a: Attacker) -> None:
    """Files of 1 MiB whose lines are checked and refused, and lists of them."""
    line = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "a", "max_tokens": 1}}
    lines = "\n".join(json.dumps(line | {"custom_id": f"{i}", "body": {"prompt": 1}}) for i in range(8_000))
    parts = [
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch',
        f'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{lines}',
        "--b--\r\n",
    ]
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = await a.post("/v1/files", "\r\n".join(parts).encode(), form)
    if answer is not None and answer.status_code == 200:
        file_id = answer.json()["id"]
        window = {"completion_window": "24h", "endpoint": COMPLETIONS}
        await a.post("/v1/batches", {"input_file_id": file_id} | window)
        await a.request("GET", "/v1/files")
        await a.request("DELETE", f"/v1/files/{file_id}")


@scenario(0, clients=8)
async def chats_of_many_tools(a: Attacker) -> None:
    """Chats with sixty tools of many parameters each, new ones each time."""
    fields = {a.letters(8): {"type": "string", "description": a.words(40)} for _ in range(12)}
    tools = [
        {
            "type": "function",
            "function": {"name": a.letters(10), "parameters": {"type": "object", "properties": fields}},
        }
        for _ in range(60)
    ]
    await a.post(CHATS, {"messages": [{"role": "user", "content": "a"}], "tools": tools, "max_tokens": 4})
