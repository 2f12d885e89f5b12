"""An OpenAI-compatible server on loopback whose answers are written by the test, byte for byte."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

# Bytes to send, seconds to wait, or None: hang up at once.
Part = bytes | float | None
Answer = Callable[[dict[str, Any]], Sequence[Part]]

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunked(data: bytes) -> bytes:
    """One chunk of a body in HTTP's chunked coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    """A chunk of a completion."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage_event(num_tokens: int, **metrics: Any) -> bytes:
    """The last chunk, with usage and what an Outrider says beside it."""
    return event({"choices": [], "usage": {"completion_tokens": num_tokens}, "metrics": metrics})


def streamed(*events: bytes) -> list[Part]:
    """A whole answer, each of these in an HTTP chunk of its own."""
    return [SSE, *map(chunked, events), END]


def reply(status: str, body: bytes, kind: str = "application/json") -> list[Part]:
    """An answer that is no stream."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return [head.encode() + body]


def two_words(body: dict[str, Any]) -> list[Part]:
    """A good answer: two chunks of text with three tokens, and statistics of speculation."""
    statistics = {"mean_acceptance_length": 1.5, "num_spec_steps": 2}
    return streamed(
        text_event("a"),
        text_event(" b", "stop"),
        usage_event(3, speculative_decoding=statistics),
        DONE,
    )


@dataclass
class FakeServer:
    """Answers POSTs by `answer`; remembers who asked for what."""

    answer: Answer = two_words
    models: Sequence[Part] = field(
        default_factory=lambda: reply("200 OK", b'{"data": [{"id": "first"}, {"id": "second"}]}')
    )
    num_awaited: int = 0  # no request is answered before so many came at once
    are_all_here: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)  # request line and headers
    num_connections: int = 0
    num_running: int = 0
    num_running_max: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                sent = await reader.readexactly(int(lengths[0].partition(":")[2])) if lengths else b""
                self.heads.append(head)
                if not await (self.answer_post(writer, sent) if sent else self.write(writer, self.models)):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer_post(self, writer: asyncio.StreamWriter, sent: bytes) -> bool:
        """Whether the connection goes on."""
        self.bodies.append(json.loads(sent))
        self.num_running += 1
        self.num_running_max = max(self.num_running, self.num_running_max)
        try:
            if self.num_running_max >= self.num_awaited:
                self.are_all_here.set()
            await self.are_all_here.wait()  # whoever asks has a timeout
            return await self.write(writer, self.answer(self.bodies[-1]))
        finally:
            self.num_running -= 1

    async def write(self, writer: asyncio.StreamWriter, parts: Sequence[Part]) -> bool:
        """Whether the connection goes on."""
        for part in parts:
            if part is None:
                return False
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                writer.write(part)
                await writer.drain()
        return True


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """The server on a free port, on a thread of its own until the end of the block."""
    loop = asyncio.new_event_loop()

    async def begin() -> asyncio.Server:
        return await asyncio.start_server(server.serve, "127.0.0.1", 0)

    async def end(listening: asyncio.Server) -> None:
        listening.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close

    def on_loop(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout=10)

    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        listening = on_loop(begin())
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            yield server
        finally:
            on_loop(end(listening))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)
        loop.close()


def dead_url() -> str:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
