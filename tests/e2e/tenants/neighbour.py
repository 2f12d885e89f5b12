"""The well-behaved tenant: a trickle of short requests of every kind, each timed from the moment it was due.

Requests are sent by the clock and not one after the other, so that a server that stands still for ten seconds is seen
by all the requests of these ten seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.tenants.access import ANSWER_MAX_S, Access

PROMPT: Final = "def read_file(path):\n"
MESSAGES: Final = [{"role": "user", "content": "Write a function that reads a file."}]
NUM_TOKENS: Final = 8
QUIET_S: Final = 2.0
"""Within that a request is answered that nothing is before."""
LARGE_BYTES: Final = 20 << 10  # parsed in a thread
LARGEST_BYTES: Final = 1 << 20
SCHEMA: Final = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


class UnexpectedAnswer(Exception):
    """An answer that a well-behaved tenant should not get."""


@dataclass(frozen=True)
class Sample:
    """One request and its answer."""

    kind: str
    latency_s: float
    fault: str | None = None


class Neighbour:
    """For as long as its system runs; `close` it then."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._client = access.http()
        self._channel = access.channel()
        self._expected: dict[str, str] = {}  # texts, by kind

    async def close(self) -> None:
        await self._client.aclose()
        await self._channel.close(None)

    async def trickle(self, seconds: float, per_s: float, seed: str) -> list[Sample]:
        """Sends a request of a random kind `per_s` times a second; returns when all are answered."""
        rng, loop = random.Random(seed), asyncio.get_running_loop()
        count = max(int(seconds * per_s), len(KINDS))
        kinds = [name for _ in range(count // len(KINDS) + 1) for name in KINDS][:count]
        rng.shuffle(kinds)
        begin_s = loop.time()
        sent = []
        for index, kind in enumerate(kinds):
            due_s = begin_s + index * seconds / count
            await asyncio.sleep(max(due_s - loop.time(), 0))
            sent.append(asyncio.create_task(self._timed(kind, due_s)))
        return list(await asyncio.gather(*sent))

    async def record_expected(self) -> None:
        """Sends a request of each kind, and keeps the texts as those that every later answer has to have. Raises
        AssertionError where one fails."""
        for kind in KINDS:
            sample = await self._timed(kind, asyncio.get_running_loop().time())
            assert sample.fault is None, f"{kind}, with nothing beside it: {sample.fault}"

    async def send_largest(self, count: int) -> None:
        """Sends so many bodies of the largest size that is served at once, to warm allocators up. They may be
        refused."""
        body = {"prompt": "a file " * (LARGEST_BYTES // 7)}
        await asyncio.gather(*(self._client.post("/tokenize", json=body) for _ in range(count)), return_exceptions=True)

    async def until_quiet(self, timeout_s: float) -> str | None:
        """Waits until a request of each group is answered as fast as if nothing was left to do. Returns the group
        whose is not."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        for group, kinds in GROUPS.items():
            while True:
                sample = await self._timed(next(iter(kinds)), loop.time())
                if sample.fault is None and sample.latency_s <= QUIET_S:
                    break
                if loop.time() > until_s:
                    return group
        return None

    async def _timed(self, kind: str, due_s: float) -> Sample:
        fault: str | None = None
        try:
            async with asyncio.timeout(ANSWER_MAX_S):
                text = await KINDS[kind](self)
            if text != self._expected.setdefault(kind, text):
                fault = "another answer than with nothing beside it"
        except UnexpectedAnswer as error:
            fault = str(error)
        except (TimeoutError, httpx.TimeoutException):
            fault = f"no answer within {ANSWER_MAX_S:g} s"
        except grpc.aio.AioRpcError as error:
            fault = f"{error.code().name}: {(error.details() or '')[:80]}"
        except (httpx.HTTPError, ssl.SSLError, OSError, ValueError, LookupError) as error:
            fault = f"{type(error).__name__}: {str(error)[:80]}"
        return Sample(kind, asyncio.get_running_loop().time() - due_s, fault)

    # Kinds of requests. Each returns the part of its answer that is always the same.

    async def _post(self, path: str, body: dict[str, Any], client: httpx.AsyncClient | None = None) -> Any:
        return _read(await (client or self._client).post(path, json=body))

    async def chat(self) -> str:
        body = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0}
        return str((await self._post("/v1/chat/completions", body))["choices"][0]["message"]["content"])

    async def completion(self) -> str:
        """Over a new connection."""
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
        async with self._access.http() as client:
            return str((await self._post("/v1/completions", body, client))["choices"][0]["text"])

    async def stream(self) -> str:
        body = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
        text = ""
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                _read(response)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise UnexpectedAnswer(f"in the stream: {str(event['error'])[:80]}")
                    text += event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
        raise UnexpectedAnswer("the stream ended without [DONE]")

    async def tools(self) -> str:
        body = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0, "tools": [TOOL], "tool_choice": "required"}
        message = (await self._post("/v1/chat/completions", body))["choices"][0]["message"]
        return str([call["function"] for call in message.get("tool_calls") or ()])

    async def schema(self) -> str:
        """With a schema that no cache has."""
        schema = SCHEMA | {"title": uuid.uuid4().hex}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0, "response_format": form}
        return str((await self._post("/v1/chat/completions", body))["choices"][0]["message"]["content"])

    async def response(self) -> str:
        body = {"input": "Write a function.", "max_output_tokens": 16, "temperature": 0}
        answer = await self._post("/v1/responses", body)
        return str(answer["output"][0]["content"][0]["text"])

    async def message(self) -> str:
        body = {"model": "target", "messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0}
        return str((await self._post("/v1/messages", body))["content"][0]["text"])

    async def grpc_generate(self) -> str:
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
        request = generation_pb2.GenerationRequest(prompt=PROMPT, sampling=sampling)
        stub = generation_pb2_grpc.GenerationStub(self._channel)
        call = stub.Generate(request, metadata=self._access.metadata, timeout=ANSWER_MAX_S)
        return "".join([chunk.text async for chunk in call])

    async def tokenize(self) -> str:
        return str((await self._post("/tokenize", {"prompt": PROMPT}))["tokens"])

    async def large_tokenize(self) -> str:
        return str((await self._post("/tokenize", {"prompt": "a file " * (LARGE_BYTES // 7)}))["count"])

    async def large_chat(self) -> str:
        """The same chat in a large body."""
        body = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "temperature": 0}
        content = json.dumps(body) + " " * LARGE_BYTES
        headers = {"Content-Type": "application/json"}
        answer = _read(await self._client.post("/v1/chat/completions", content=content, headers=headers))
        return str(answer["choices"][0]["message"]["content"])

    async def models(self) -> str:
        """Over a new connection."""
        async with self._access.http() as client:
            return str([each["id"] for each in _read(await client.get("/v1/models"))["data"]])

    async def grpc_models(self) -> str:
        stub = generation_pb2_grpc.GenerationStub(self._channel)
        call = stub.ListModels(generation_pb2.ListModelsRequest(), metadata=self._access.metadata, timeout=ANSWER_MAX_S)
        return str([each.id for each in (await call).models])

    async def probe(self) -> str:
        """As a load balancer asks, over a new connection."""
        async with self._access.http() as client:
            return str(_read(await client.get("/livez"))["status"])

    async def grpc_watch(self) -> str:
        """As a client of gRPC does that watches health, over a new connection."""
        async with self._access.channel() as channel:
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=ANSWER_MAX_S)
            async for answer in watching:
                watching.cancel()
                return str(answer.status)
        raise UnexpectedAnswer("the watch ended without a status")


def _read(response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise UnexpectedAnswer(f"{response.status_code}: {response.text[:80]}")
    return response.json()


Kind = Callable[[Neighbour], Awaitable[str]]
GROUPS: Final[dict[str, dict[str, Kind]]] = {
    "generation": {
        "chat": Neighbour.chat,
        "completion": Neighbour.completion,
        "stream": Neighbour.stream,
        "response": Neighbour.response,
        "message": Neighbour.message,
        "gRPC generate": Neighbour.grpc_generate,
    },
    "grammars": {"tools": Neighbour.tools, "schema": Neighbour.schema},
    "large bodies": {"large tokenize": Neighbour.large_tokenize, "large chat": Neighbour.large_chat},
    "calls": {
        "tokenize": Neighbour.tokenize,
        "models": Neighbour.models,
        "gRPC models": Neighbour.grpc_models,
        "probe": Neighbour.probe,
        "gRPC watch": Neighbour.grpc_watch,
    },
}
"""Kinds that need the same of a server, and are compared together: the model, the compiler of grammars, the threads for
large bodies, or only the event loop."""
KINDS: Final[dict[str, Kind]] = {name: kind for kinds in GROUPS.values() for name, kind in kinds.items()}
