"""Clients that ask all the time and compare every answer: the `openai` package, gRPC in Python, gRPC in JavaScript."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import httpx
import openai

from command_line.checkout import ROOT
from outrider.errors import ConfigurationError
from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.secured import SecuredSystem

REQUEST_TIMEOUT_S = 60.0
NODE_PACKAGES = ("@grpc/grpc-js@1", "@grpc/proto-loader@0.8")


@dataclass(frozen=True)
class Case:
    """A greedy request and the text that plain decoding gives it."""

    model: str
    prompt: str
    max_tokens: int
    text: str


@dataclass
class Tally:
    """Outcomes of all requests, by the kind of client."""

    done: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def put(self, kind: str, failure: str = "") -> None:
        self.done[kind] += 1
        if failure and len(self.failures) < 1000:
            self.failures.append(f"{kind}: {failure}")


class Traffic:
    """The requests that clients send at present, and the models that answered each client since they last changed."""

    def __init__(self, cases: Sequence[Case], path: Path) -> None:
        """`path` is where a client in another process reads the cases before each request."""
        self.path = path
        self._models: dict[str, list[str]] = {}  # by the client's name, oldest first
        self._has_answer = asyncio.Event()
        self._set(cases)

    def _set(self, cases: Sequence[Case]) -> None:
        self.cases = list(cases)
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps([asdict(case) for case in cases]))
        draft.replace(self.path)

    def put(self, client: str, model: str) -> None:
        """Records that a client was answered by this model."""
        self._models.setdefault(client, []).append(model)
        self._has_answer.set()

    async def turn_to(self, cases: Sequence[Case], is_done: Callable[[list[str]], bool]) -> None:
        """Has clients send these requests from their next one on. Returns when `is_done` is true of the models that
        answered each client since. Raises TimeoutError."""
        self._set(cases)
        self._models = {client: [] for client in self._models}
        async with asyncio.timeout(2 * REQUEST_TIMEOUT_S):
            while not all(is_done(models) for models in self._models.values()):
                self._has_answer.clear()
                await self._has_answer.wait()


async def plain_cases(system: SecuredSystem, model: str, prompts: Sequence[str], max_tokens: int) -> list[Case]:
    """Cases with the output of plain decoding, requested from a coordinator directly."""
    cases = []
    async with system.http(system.key) as client:
        for prompt in prompts:
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "speculation": {"enabled": False},
            }
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            cases.append(Case(model, prompt, max_tokens, answer["choices"][0]["text"]))
    return cases


async def ask_by_openai(client: openai.AsyncOpenAI, case: Case) -> str:
    """Sends a request with the `openai` package; returns the failure, or an empty string."""
    try:
        stream = await client.completions.create(
            model=case.model, prompt=case.prompt, max_tokens=case.max_tokens, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    except (openai.OpenAIError, httpx.HTTPError) as error:
        return f"{type(error).__name__} {error}"
    return "" if text == case.text else "another text"


async def ask_by_grpc(channel: grpc.aio.Channel, case: Case, key: str) -> str:
    """Sends a request over gRPC; returns the failure, or an empty string."""
    request = generation_pb2.GenerationRequest(
        model=case.model,
        prompt=case.prompt,
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=case.max_tokens),
    )
    call = generation_pb2_grpc.GenerationStub(channel).Generate(
        request, metadata=(("authorization", f"Bearer {key}"),), timeout=REQUEST_TIMEOUT_S
    )
    try:
        text = "".join([chunk.text async for chunk in call])
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {error.details()}"
    return "" if text == case.text else "another text"


@dataclass(frozen=True)
class Clients:
    """How many of each kind ask at once; `node_modules` None: none in JavaScript."""

    num_openai: int
    num_grpc: int
    think_s: float  # between an answer and the next request
    node_modules: Path | None


@asynccontextmanager
async def asking(
    system: SecuredSystem, url: str, address: str, traffic: Traffic, clients: Clients
) -> AsyncIterator[Tally]:
    """All clients ask at the balancer for as long as the context is open; what has begun is finished."""
    tally, is_over = Tally(), asyncio.Event()
    http = openai.DefaultAsyncHttpxClient(verify=system.context(), timeout=REQUEST_TIMEOUT_S)

    async def keep(kind: str, number: int, ask: Callable[[Case], Awaitable[str]]) -> None:
        turn = number
        while not is_over.is_set():
            case = traffic.cases[turn % len(traffic.cases)]
            tally.put(kind, await ask(case))
            traffic.put(f"{kind}-{number}", case.model)
            turn += 1
            await asyncio.sleep(clients.think_s)

    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=system.key, max_retries=0, http_client=http) as openai_client,
        system.channel(address) as channel,
    ):
        tasks = [
            asyncio.create_task(keep("openai", i, lambda case: ask_by_openai(openai_client, case)))
            for i in range(clients.num_openai)
        ]
        tasks += [
            asyncio.create_task(keep("grpc", i, lambda case: ask_by_grpc(channel, case, system.key)))
            for i in range(clients.num_grpc)
        ]
        node = None
        if clients.node_modules is not None:
            node = await _start_node(system, address, traffic, clients)
            tasks.append(asyncio.create_task(_hear(node, tally, traffic)))
        try:
            yield tally
        finally:
            is_over.set()
            if node is not None:
                with contextlib.suppress(ProcessLookupError):
                    node.terminate()
            async with asyncio.timeout(2 * REQUEST_TIMEOUT_S):
                await asyncio.gather(*tasks)
                if node is not None and await node.wait():
                    tally.put("javascript", f"the client ended with {node.returncode}")


async def _start_node(
    system: SecuredSystem, address: str, traffic: Traffic, clients: Clients
) -> asyncio.subprocess.Process:
    script = Path(__file__).with_name("client.mjs")
    authority = system.certificates / "ca.crt"
    return await asyncio.create_subprocess_exec(
        *("node", str(script), str(clients.node_modules), str(ROOT), address, str(authority), system.key),
        *(str(traffic.path), str(clients.think_s)),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"GRPC_VERBOSITY": "NONE"},
    )


async def _hear(node: asyncio.subprocess.Process, tally: Tally, traffic: Traffic) -> None:
    assert node.stdout is not None
    async for line in node.stdout:
        answer = json.loads(line)
        tally.put("javascript", "" if answer["ok"] else str(answer["error"]))
        traffic.put("javascript", answer["model"])


def install_node_modules(folder: Path) -> None:
    """Raises ConfigurationError where there is no npm, or no registry."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder), *NODE_PACKAGES]
    try:
        subprocess.run(words, check=True, timeout=180, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            f"npm could not install {' and '.join(NODE_PACKAGES)} ({error}); name a registry that can be reached in "
            "npm_config_registry, or leave the client in JavaScript out: --no-node"
        ) from error
