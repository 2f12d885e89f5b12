"""Clients of the gateway, in a process of their own because they live in another network namespace.

`check` sends one request of each kind and prints what came back; `ask` keeps on asking until SIGTERM and prints a line
of JSON for each answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai

from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.rollout.load import REQUEST_TIMEOUT_S, Case, ask_by_grpc, ask_by_openai

PROMPT = "The night"
NUM_TOKENS = 32


async def check(given: argparse.Namespace, context: ssl.SSLContext, channel: grpc.aio.Channel) -> dict[str, Any]:
    """The texts over HTTP and gRPC, and how requests without a key, and for closed paths, are refused.

    For a model that is not served: how these are refused.
    """
    body = {"model": given.model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(
        base_url=given.url, verify=context, timeout=REQUEST_TIMEOUT_S, trust_env=False
    ) as client:
        headers = {"Authorization": f"Bearer {given.key}"}
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
            found["http_status"] = response.status_code
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        found["http_text"] = "".join(choice["text"] for event in events for choice in event["choices"])
        found["num_http_events"] = len(events)
        plain = await client.post(
            "/v1/completions", json=body | {"stream": False, "speculation": {"enabled": False}}, headers=headers
        )
        found["http_text_without_speculation"] = "".join(each["text"] for each in plain.json().get("choices", ()))
        found["http_without_key"] = (await client.post("/v1/completions", json=body)).status_code
        found["metrics_from_outside"] = (await client.get("/metrics", headers=headers)).status_code
    request = generation_pb2.GenerationRequest(
        model=given.model,
        prompt=PROMPT,
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS),
    )
    stub = generation_pb2_grpc.GenerationStub(channel)
    metadata = (("authorization", f"Bearer {given.key}"),)
    found["grpc_text"], found["grpc_code"] = await _generated(stub, request, metadata)
    _, found["grpc_without_key"] = await _generated(stub, request, ())
    return found


async def _generated(
    stub: generation_pb2_grpc.GenerationStub,
    request: generation_pb2.GenerationRequest,
    metadata: Sequence[tuple[str, str]],
) -> tuple[str, str]:
    """The text, and the name of the status."""
    text = ""
    try:
        async for chunk in stub.Generate(request, metadata=metadata, timeout=REQUEST_TIMEOUT_S):
            text += chunk.text
    except grpc.aio.AioRpcError as error:
        return text, error.code().name
    return text, "OK"


async def texts(given: argparse.Namespace, client: openai.AsyncOpenAI) -> list[Case]:
    """Cases with the texts that they have now, without speculation."""
    cases = []
    for prompt, max_tokens in json.loads(given.prompts.read_text()):
        answer = await client.completions.create(
            model=given.model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"speculation": {"enabled": False}},
        )
        cases.append(Case(given.model, prompt, max_tokens, answer.choices[0].text))
    return cases


async def keep_asking(given: argparse.Namespace, client: openai.AsyncOpenAI, channel: grpc.aio.Channel) -> None:
    """Asks over HTTP and gRPC with several clients at once, and ends after SIGTERM when the last answer is there.

    The first client of each kind asks for the first case only, the others for the rest in turn.
    """
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    cases = await texts(given, client)
    print(json.dumps({"cases": len(cases)}), flush=True)

    async def keep(kind: str, number: int, ask: Callable[[Case], Awaitable[str]]) -> None:
        own, turn = (cases[1:], number) if number else (cases[:1], 0)
        while not is_over.is_set():
            error = await ask(own[turn % len(own)])
            print(json.dumps({"kind": kind, "error": error}), flush=True)
            turn += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(given.think_s):
                    await is_over.wait()

    async with asyncio.TaskGroup() as tasks:
        for number in range(given.clients):
            tasks.create_task(keep("http", number, lambda case: ask_by_openai(client, case)))
            tasks.create_task(keep("grpc", number, lambda case: ask_by_grpc(channel, case, given.key)))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("check", "ask"))
    for name in ("url", "grpc", "key", "model"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--authority", type=Path, required=True)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--think-s", type=float, default=0.2)
    given = parser.parse_args()
    context = ssl.create_default_context(cafile=str(given.authority))
    credentials = grpc.ssl_channel_credentials(given.authority.read_bytes())
    async with grpc.aio.secure_channel(given.grpc, credentials) as channel:
        if given.what == "check":
            print(json.dumps(await check(given, context, channel)))
            return
        http = openai.DefaultAsyncHttpxClient(verify=context, timeout=REQUEST_TIMEOUT_S, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{given.url}/v1", api_key=given.key, max_retries=0, http_client=http
        ) as client:
            await keep_asking(given, client, channel)


if __name__ == "__main__":
    asyncio.run(main())
