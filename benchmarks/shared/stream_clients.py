"""Clients of many streams in one process, cheap enough to feed a coordinator.

Commands come as lines of JSON on standard input, and each has one line as its answer:

    {"do": "open", "protocol": "http", "address": "127.0.0.1:8000", "model": "m", "num": 100, "per_s": 200,
     "prompt_tokens": 16, "output_tokens": [60, 100], "repeats": true, "stamps": false, "token_ids": [...]}
    {"do": "begin"}         forget what was counted
    {"do": "end"}           what was counted since
    {"do": "close"}         ends all streams

The protocol is http, grpc, or target: gRPC to a target worker itself, without a coordinator.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio
import uvloop

from benchmarks.shared.step_stamps import ALPHABET, delays_s
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc, target_pb2, target_pb2_grpc

_TEXT: Final = b'"text":"'
_CHANNELS: Final = 4
_TIMEOUT_S: Final = 3600.0
_LINE_BYTES_MAX: Final = 1 << 20


@dataclass(slots=True)
class Counts:
    """Counts of what all streams of a process received since the last `begin`. Times are in seconds."""

    began_s: float = 0.0
    num_chunks: int = 0
    num_tokens: int = 0
    delays_s: list[float] = field(default_factory=list)  # of stamped steps, from the target's commit
    ttft_s: list[float] = field(default_factory=list)  # of requests that ended
    tpot_s: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)

    def fail(self, cause: str) -> None:
        self.failures[cause] = self.failures.get(cause, 0) + 1

    def to_json(self, now_s: float) -> dict[str, Any]:
        return {
            "seconds": now_s - self.began_s,
            "num_chunks": self.num_chunks,
            "num_tokens": self.num_tokens,
            "delays_ms": [round(each * 1e3, 2) for each in self.delays_s],
            "ttft_ms": [round(each * 1e3, 2) for each in self.ttft_s],
            "tpot_ms": [round(each * 1e3, 3) for each in self.tpot_s],
            "failures": self.failures,
        }


@dataclass(frozen=True, slots=True)
class Order:
    """Streams to open, and their requests."""

    protocol: str
    address: str
    model: str
    num: int
    per_s: float
    prompt_tokens: int
    output_tokens: tuple[int, int]  # of a request: the least and the most, all equally likely
    repeats: bool  # a request that ends is followed by another
    stamps: bool
    token_ids: Sequence[int]  # of the stamps' characters


Run = Callable[[Order, int], AsyncIterator[str]]
"""One request of so many output tokens: the texts of its chunks."""


def events_of(buffer: bytearray) -> list[bytes]:
    """Takes the complete server-sent events from the beginning of a buffer; chunk sizes between them are skipped."""
    events = []
    while (end := buffer.find(b"\n\n")) >= 0:
        start = buffer.find(b"data: ", 0, end)
        if start >= 0:
            events.append(bytes(buffer[start + 6 : end]))
        del buffer[: end + 2]
    return events


def text_of(event: bytes) -> str:
    """The text of a completion's event, which has no escapes; empty if it has none."""
    start = event.find(_TEXT)
    if start < 0:
        return ""
    start += len(_TEXT)
    return event[start : event.index(b'"', start)].decode("ascii")


class Clients:
    """All streams of this process."""

    def __init__(self) -> None:
        self.counts = Counts(time.monotonic())
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: dict[str, list[grpc.aio.Channel]] = {}
        self._numbers = itertools.count()
        self._chance = random.Random(os.getpid())

    async def open(self, order: Order) -> int:
        """Starts the streams, `per_s` of them a second; returns how many run now."""
        run = {"http": self._http, "grpc": self._grpc, "target": self._target}[order.protocol]
        begin_s = time.monotonic()
        for index in range(order.num):
            await asyncio.sleep(max(begin_s + index / order.per_s - time.monotonic(), 0.0))
            task = asyncio.create_task(self._keep(run, order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return len(self._tasks)

    async def close(self) -> int:
        """Ends all streams; returns how many there were."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for channel in itertools.chain(*self._channels.values()):
            await channel.close(None)
        self._channels.clear()
        return len(tasks)

    async def _keep(self, run: Run, order: Order) -> None:
        while True:
            await self._one(run, order, self._chance.randint(*order.output_tokens))
            if not order.repeats:
                return

    async def _one(self, run: Run, order: Order, max_tokens: int) -> None:
        sent_s, first_s, now_s, num_tokens = time.monotonic(), None, 0.0, 0
        try:
            async for text in run(order, max_tokens):
                now_s, counts = time.monotonic(), self.counts
                if first_s is None:
                    first_s = now_s
                num_tokens += len(text)
                counts.num_chunks += 1
                counts.num_tokens += len(text)
                if order.stamps:
                    counts.delays_s.extend(delays_s(text, now_s))
        except (grpc.aio.AioRpcError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            told = error.code().name if isinstance(error, grpc.aio.AioRpcError) else f"{type(error).__name__}: {error}"
            self.counts.fail(told[:200])
            await asyncio.sleep(0.1)
            return
        if num_tokens != max_tokens:
            self.counts.fail(f"ended after {num_tokens} of {max_tokens} tokens")
        elif first_s is not None:
            self.counts.ttft_s.append(first_s - sent_s)
            if num_tokens > 1:
                self.counts.tpot_s.append((now_s - first_s) / (num_tokens - 1))

    def _prompt(self, order: Order) -> list[int]:
        """A prompt of its own for each request, so that no target is preferred for all."""
        return self._chance.choices(order.token_ids, k=order.prompt_tokens)

    async def _http(self, order: Order, max_tokens: int) -> AsyncIterator[str]:
        host, _, port = order.address.rpartition(":")
        body = json.dumps(
            {"model": order.model, "prompt": self._prompt(order), "max_tokens": max_tokens, "temperature": 0}
            | {"ignore_eos": True, "stream": True}
        ).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {order.address}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise OSError(status.decode(errors="replace").strip())
            buffer = bytearray()
            while data := await reader.read(1 << 16):
                buffer += data
                for event in events_of(buffer):
                    if event == b"[DONE]":
                        return
                    if event.startswith(b'{"error"'):
                        raise OSError(event.decode(errors="replace"))
                    if text := text_of(event):
                        yield text
            raise OSError("the stream was cut off")
        finally:
            writer.close()

    async def _grpc(self, order: Order, max_tokens: int) -> AsyncIterator[str]:
        stub = generation_pb2_grpc.GenerationStub(self._channel(order.address))
        request = generation_pb2.GenerationRequest(
            model=order.model,
            prompt_token_ids=generation_pb2.TokenPrompt(token_ids=self._prompt(order)),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True).to_proto(),
        )
        async for chunk in stub.Generate(request, timeout=_TIMEOUT_S):
            if chunk.text:
                yield chunk.text

    async def _target(self, order: Order, max_tokens: int) -> AsyncIterator[str]:
        stub = target_pb2_grpc.TargetStub(self._channel(order.address))
        prompt, characters = self._prompt(order), dict(zip(order.token_ids, ALPHABET, strict=True))
        request = target_pb2.GenerateRequest(
            session_id=f"{os.getpid()}-{next(self._numbers)}",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True).to_proto(),
        )
        async for event in stub.Generate(request, timeout=_TIMEOUT_S):
            if event.WhichOneof("event") == "step":
                yield "".join(characters[token_id] for token_id in event.step.token_ids)

    def _channel(self, address: str) -> grpc.aio.Channel:
        channels = self._channels.setdefault(address, [])
        if len(channels) < _CHANNELS:
            options = (("grpc.use_local_subchannel_pool", 1), ("outrider.number", len(channels)))
            channels.append(grpc.aio.insecure_channel(address, options=options))
            return channels[-1]
        return self._chance.choice(channels)


async def _serve() -> None:
    loop, clients = asyncio.get_running_loop(), Clients()
    reader = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps({"event": "ready", "pid": os.getpid()}), flush=True)
    while line := await reader.readline():
        asked = json.loads(line)
        answer: dict[str, Any] = {}
        match asked.pop("do"):
            case "open":
                answer["open"] = await clients.open(Order(**asked))
            case "begin":
                clients.counts = Counts(time.monotonic())
            case "end":
                answer = clients.counts.to_json(time.monotonic())
            case "close":
                answer["open"] = await clients.close()
        print(json.dumps(answer), flush=True)
    await clients.close()


def main() -> None:
    uvloop.run(_serve())


if __name__ == "__main__":
    main()
