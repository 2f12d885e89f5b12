"""The chaos suite's slow clients read nothing until they are told to, and know how their answer ended."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import grpc.aio
import pytest

from outrider.errors import LostByOwnPause, WorkerFailed, WorkerLost, WorkerSilent, WorkerUnanswered, WorkerUnreached
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.chaos.client import is_own_word
from tests.e2e.chaos.slow_clients import Ending, UnreadGrpc, UnreadHttp

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices": [{"text": "' + b"x" * 1000 + b'"}]}\n\n'


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server of one connection, which answers it and closes it; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join(30)
            assert not thread.is_alive()


def ending_of(content: bytes) -> Ending:
    with serving(lambda connection: connection.sendall(content)) as url:
        client = UnreadHttp(url, None, None, "x")
        try:
            return client.read_rest(20)
        finally:
            client.close()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (HEAD + EVENT * 100 + b"data: [DONE]\n\n", "complete"),
        (HEAD + EVENT * 100 + b'data: {"error": {"code": "slow_reader"}}\n\n', "told"),
        (HEAD + EVENT * 100 + b'data: {"error": {"code": "unavailable"}}\n\n', "refused"),
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\nno room", "refused"),
        (HEAD + EVENT, "cut"),
    ],
    ids=["complete", "told", "an error", "refused", "in the middle"],
)
def test_how_an_answer_ended_is_known(content: bytes, what: str) -> None:
    ending = ending_of(content)
    assert (ending.what, ending.num_bytes) == (what, len(content))


def test_what_is_not_read_is_not_taken() -> None:
    sent = []

    def send_until_full(connection: socket.socket) -> None:
        connection.settimeout(0.5)
        try:
            for _ in range(10_000):
                sent.append(connection.send(EVENT))
        except TimeoutError:
            sent.append(0)

    with serving(send_until_full) as url:
        client = UnreadHttp(url, None, None, "x")
        deadline_s = time.monotonic() + 20
        while not sent or sent[-1] != 0:
            assert time.monotonic() < deadline_s, "the server never had to wait"
            time.sleep(0.05)
        client.close()
    assert sum(sent) < 1 << 20


def test_a_slow_client_reads_as_much_as_it_says() -> None:
    with serving(lambda connection: connection.sendall(HEAD + EVENT)) as url:
        client = UnreadHttp(url, None, None, "x")
        assert client.read_slowly(100, time.monotonic() + 2.5) is None
        ending = client.read_rest(20)
        client.close()
    assert ending.num_bytes == len(HEAD + EVENT)


class Endless(generation_pb2_grpc.GenerationServicer):
    """Sends messages for as long as they are taken, then ends the call as `status` says."""

    def __init__(self, num_messages: int, status: grpc.StatusCode) -> None:
        self.num_sent = 0
        self._num_messages, self._status = num_messages, status

    async def Generate(
        self,
        request: generation_pb2.GenerationRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> AsyncIterator[generation_pb2.GenerationChunk]:
        for _ in range(self._num_messages):
            yield generation_pb2.GenerationChunk(text="x" * 1000)
            self.num_sent += 1
        await context.abort(self._status, "the end")


@pytest.mark.parametrize(
    ("status", "what"),
    [(grpc.StatusCode.ABORTED, "told"), (grpc.StatusCode.UNAVAILABLE, "cut")],
    ids=["told", "gone"],
)
async def test_over_grpc_what_is_not_read_is_not_taken_and_the_end_is_known(status: grpc.StatusCode, what: str) -> None:
    server, servicer = grpc.aio.server(), Endless(2000, status)
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as threads:
        client = await loop.run_in_executor(threads, lambda: UnreadGrpc(f"127.0.0.1:{port}", None, None, "x"))
        async with asyncio.timeout(20):
            before = -1
            while servicer.num_sent == 0 or servicer.num_sent != before:
                before = servicer.num_sent
                await asyncio.sleep(0.3)
        assert 0 < servicer.num_sent < 500
        ending = await loop.run_in_executor(threads, lambda: client.read_rest(20))
        client.close()
    await server.stop(None)
    assert ending.what == what
    assert ending.num_bytes >= 2000 * 1000


def test_the_systems_words_are_told_from_those_of_its_connections() -> None:
    """Found: a stream whose targets had been lost for a minute said so, and counted as cut off without a word."""
    kinds = [WorkerFailed, WorkerLost, WorkerSilent, LostByOwnPause, WorkerUnreached, WorkerUnanswered]
    assert all(is_own_word(kind("UNAVAILABLE: Stream removed (Socket closed)").told) for kind in kinds)
    assert not is_own_word("Stream removed (Socket closed)")
