"""The hostile tenant's hands: requests of every shape, with a count of what was sent and of how it was answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import grpc
import grpc.aio
import httpx

from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.tenants.access import Access

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
JSON: Final = {"Content-Type": "application/json"}
_FAULTS_MAX: Final = 20
# For random text that costs its sender hardly any time.
_LETTERS: Final = bytes(ord("a") + byte % 26 for byte in range(256))
_WORDS: Final = bytes(ord(" ") if byte % 6 == 0 else ord("a") + byte % 26 for byte in range(256))


@dataclass
class Tally:
    """The load that a tenant has sent, and the answers. Counts of several clients are added up."""

    num_requests: int = 0
    # The load without requests that had no answer when the attack was over.
    num_loads: int = 0
    num_bytes: int = 0
    num_tokens: int = 0  # that were asked for, over all choices
    answers: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)  # answers that nobody may get

    def load(self, num_bytes: int, num_tokens: int = 0, num_requests: int = 1) -> None:
        """Counts what the system has served, or has to hold."""
        self.num_loads += num_requests
        self.num_bytes += num_bytes
        self.num_tokens += num_tokens

    def note(self, answer: str) -> None:
        self.answers[answer] += 1

    def fault(self, text: str) -> None:
        if text in self.faults or len(self.faults) < _FAULTS_MAX:
            self.faults[text] += 1


class Attacker:
    """One client of the hostile tenant. Its methods raise nothing that a server can cause."""

    def __init__(self, access: Access, tally: Tally, rng: random.Random, seconds: float) -> None:
        """`seconds`: how long the attack lasts."""
        self.access, self.tally, self.rng, self.seconds = access, tally, rng, seconds
        self._http = access.http()
        self._bounded_http = access.http(access.bounded_key or access.key)
        self.channel = access.channel()

    async def close(self) -> None:
        await self._http.aclose()
        await self._bounded_http.aclose()
        await self.channel.close(None)

    def letters(self, count: int) -> str:
        """Random text, so that no cache knows it."""
        return self.rng.randbytes(count).translate(_LETTERS).decode()

    def words(self, num_bytes: int) -> str:
        """Random words with spaces, as a prompt has them."""
        return self.rng.randbytes(num_bytes).translate(_WORDS).decode()

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        is_bounded: bool = False,
    ) -> httpx.Response | None:
        """Sends a body, JSON unless it is bytes, and takes the answer. None if none came."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.request("POST", path, content, headers, is_bounded=is_bounded)
        if answer is not None and not isinstance(body, bytes):
            self.tally.num_tokens += _num_tokens(body)
        return answer

    async def request(
        self,
        method: str,
        path: str,
        content: bytes = b"",
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        is_bounded: bool = False,
    ) -> httpx.Response | None:
        """Sends a request. None if no answer came."""
        self.tally.num_requests += 1
        named = {"Content-Type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        client = self._bounded_http if is_bounded else self._http
        try:
            response = await client.request(method, path, content=content, headers=named)
        except httpx.TimeoutException:
            self.tally.note("no answer")
            return None
        except (httpx.HTTPError, ssl.SSLError, OSError) as error:
            self.tally.note(type(error).__name__)
            return None
        self.tally.load(len(content))
        self.tally.note(str(response.status_code))
        self._check(f"{method} {path[:40]}", response)
        return response

    def _check(self, what: str, response: httpx.Response) -> None:
        if response.status_code >= 500 and response.status_code not in (503, 504):
            self.tally.fault(f"{what}: {response.status_code}: {response.text[:120]}")
        if response.status_code >= 400:
            self.check_error(what, response.text)

    def check_error(self, what: str, text: str) -> None:
        """An error names no worker to a tenant."""
        for name in self.access.worker_ids:
            if name in text:
                self.tally.fault(f"{what}: an error names the worker {name}")

    async def complete(self, prompt: str, max_tokens: int, **parameters: Any) -> httpx.Response | None:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | parameters
        return await self.post(COMPLETIONS, body)

    async def generate(self, request: generation_pb2.GenerationRequest) -> None:
        """The same over gRPC."""
        self.tally.num_requests += 1
        try:
            call = generation_pb2_grpc.GenerationStub(self.channel).Generate(
                request, metadata=self.access.metadata, timeout=60
            )
            async for _ in call:
                pass
            self.tally.note("OK")
            self.tally.load(request.ByteSize(), request.sampling.max_tokens * max(request.n, 1))
        except grpc.aio.AioRpcError as error:
            self.tally.load(request.ByteSize())
            self.tally.note(error.code().name)
            self.check_error("gRPC", error.details() or "")
            if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                self.tally.fault(f"gRPC: {error.code().name}: {(error.details() or '')[:120]}")

    def head(self, method: str, path: str, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
        """The first lines of a request, without the empty one."""
        host, port = self.access.http_address
        named = {"Host": f"{host}:{port}", "Authorization": f"Bearer {self.access.key}", **headers}
        return "\r\n".join([f"{method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in named.items()), ""]).encode()

    async def leave(self, path: str, body: Mapping[str, Any]) -> None:
        """Sends a whole request and closes the connection without waiting for its answer."""
        content = json.dumps(body).encode()
        self.tally.num_requests += 1
        self.tally.load(len(content), _num_tokens(body))
        head = self.head("POST", path, {**JSON, "Content-Length": str(len(content))})
        await self.send_raw(head + b"\r\n" + content, stays_s=0.02)

    async def send_raw(
        self, raw: bytes, *, piece: bytes = b"", every_s: float = 2.0, stays_s: float | None = None
    ) -> None:
        """Sends bytes over a connection of its own, then a piece each so often, until the server closes it, or after
        `stays_s`, or at the end of the attack. Answers are not read beyond their first line."""
        first = b""
        try:
            async with asyncio.timeout(self.seconds if stays_s is None else max(stays_s, 5.0)):
                reader, writer = await self.access.connect()
                try:
                    writer.write(raw)
                    await writer.drain()
                    if stays_s is not None:
                        await asyncio.sleep(stays_s)
                        self.tally.note("left")
                        return
                    while not first:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(every_s):
                                first = await reader.readline()
                                break
                        writer.write(piece)
                        await writer.drain()
                    self.tally.note(first.decode(errors="replace").split(" ")[1] if b" " in first else "hung up")
                finally:
                    writer.transport.abort()
        except TimeoutError:
            self.tally.note("stayed")
        except (OSError, ssl.SSLError):
            self.tally.note("hung up")


def _num_tokens(body: Mapping[str, Any]) -> int:
    return int(body.get("max_tokens") or 0) * int(body.get("n") or 1)
