"""The HTTP server of a coordinator without Ray: what it answers by itself, and which clients it waits for."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, cast

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from coordinator.hosting import http_server
from coordinator.hosting.http_server import HEAD_BYTES_MAX, HttpServer
from tests.coordinator.fakes import eventually

WITHIN_S = 20.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Site:
    """An application that answers with `told`, once it may."""

    def __init__(self) -> None:
        self.told = "hello"
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_asked = 0
        self.is_leaving = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        await self.may_answer.wait()
        await PlainTextResponse(self.told)(scope, receive, send)


class Endless(Site):
    """An application that works until its client leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.num_left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        self.num_left += 1


@asynccontextmanager
async def serving(site: Site) -> AsyncIterator[tuple[HttpServer, int]]:
    server = HttpServer(site, "127.0.0.1", 0, lambda: site.is_leaving)
    port = await server.start()
    try:
        yield server, port
    finally:
        await server.cut()
        await server.stop()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(WITHIN_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def answer_from(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the body of an answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return int(head.split()[1]), await reader.readexactly(int(length.partition(b":")[2]))


@contextmanager
def limit(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(http_server, name, value)
        yield


class TestReadiness:
    async def test_it_answers_as_ray_serve_does(self) -> None:
        site = Site()
        asked = b"GET /-/healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        async with serving(site) as (_, port), connected(port) as (reader, writer):
            writer.write(asked)
            assert await answer_from(reader) == (200, b"success")
            site.is_leaving = True
            writer.write(asked)
            assert await answer_from(reader) == (503, b"DRAINING")
        assert site.num_asked == 0


class TestConnections:
    async def test_a_connection_has_one_request_after_the_other(self) -> None:
        site = Site()
        async with serving(site) as (_, port), connected(port) as (reader, writer):
            for told in ("one", "two"):
                site.told = told
                writer.write(GET)
                assert await answer_from(reader) == (200, told.encode())

    async def test_who_leaves_is_noticed_also_behind_another_request(self) -> None:
        site = Endless()
        async with serving(site) as (server, port), connected(port) as (_, writer):
            writer.write(GET)
            await eventually(lambda: site.num_asked == 1, "the first one is at work")
            writer.write(GET)
            (connection,) = cast(set[Any], server._server.server_state.connections)
            await eventually(lambda: len(connection.pipeline) == 1, "the second one waits")
            writer.transport.abort()
            await eventually(lambda: site.num_left == 1, "it has learned that its client has left")
        assert site.num_asked == 1

    async def test_only_so_many_requests_wait_on_a_connection(self) -> None:
        site = Site()
        async with serving(site) as (_, port), connected(port) as (reader, writer):
            writer.write(GET * (http_server.PIPELINED_MAX + 1))
            for _ in range(http_server.PIPELINED_MAX + 1):
                assert await answer_from(reader) == (200, b"hello")
        site.may_answer.clear()
        async with serving(site) as (server, port), connected(port) as (reader, writer):
            writer.write(GET * 5000)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert not server._server.server_state.connections
            site.may_answer.set()

    async def test_one_that_is_idle_after_an_answer_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with limit(monkeypatch, "IDLE_MAX_S", 0.1):
            async with serving(Site()) as (_, port), connected(port) as (reader, writer):
                writer.write(GET)
                assert (await answer_from(reader))[0] == 200
                assert await reader.read() == b""

    async def test_there_are_only_so_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        site = Site()
        site.may_answer.clear()
        with limit(monkeypatch, "CONNECTIONS_MAX", 1):
            async with serving(site) as (_, port):
                async with connected(port) as (reader, writer):
                    writer.write(GET)
                    await eventually(lambda: site.num_asked == 1, "the request has come")
                    async with connected(port) as (other, _):
                        with suppress(ConnectionResetError):
                            assert await other.read() == b""
                    site.may_answer.set()
                    assert (await answer_from(reader))[0] == 200
                async with asyncio.timeout(WITHIN_S):
                    while not await self.is_answered(port):  # there is room again, once the server knows
                        pass

    async def test_those_that_say_nothing_keep_nobody_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with limit(monkeypatch, "CONNECTIONS_MAX", 3):
            async with serving(Site()) as (server, port), AsyncExitStack() as stack:
                silent = []
                for num in range(3):
                    silent.append(await stack.enter_async_context(connected(port)))
                    await self.until_there_are(server, num + 1)
                silent[1][1].write(b"GET / HT")
                for _ in range(4):
                    assert await self.is_answered(port)
                    await self.until_there_are(server, 2)
                with suppress(ConnectionResetError):
                    assert await silent[0][0].read() == b"", "the oldest has made room"
                for reader, writer in silent[1:]:
                    writer.write(GET.removeprefix(b"GET / HT") if reader is silent[1][0] else GET)
                    assert (await answer_from(reader))[0] == 200

    async def test_one_that_has_sent_requests_outlasts_those_that_have_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with limit(monkeypatch, "CONNECTIONS_MAX", 2):
            async with (
                serving(Site()) as (server, port),
                connected(port) as (reader, writer),
                connected(port) as (other, other_writer),
                AsyncExitStack() as stack,
            ):
                for mine, my in ((reader, writer), (other, other_writer)):
                    my.write(GET)
                    assert (await answer_from(mine))[0] == 200
                with suppress(ConnectionResetError):
                    silent, _ = await stack.enter_async_context(connected(port))
                    assert await reader.read() == b"", "the one that was idle for longest"
                await self.until_there_are(server, 2)
                await stack.enter_async_context(connected(port))
                with suppress(ConnectionResetError):
                    assert await silent.read() == b""
                other_writer.write(GET)
                assert (await answer_from(other))[0] == 200

    @pytest.mark.parametrize(("descriptors", "most"), [(256, 128), (1024, 512), (2048, 1536), (1 << 20, 4096)])
    def test_a_system_with_few_descriptors_gets_fewer(
        self, monkeypatch: pytest.MonkeyPatch, descriptors: int, most: int
    ) -> None:
        monkeypatch.setattr("coordinator.hosting.http_server.resource.getrlimit", lambda _: (descriptors, 1 << 20))
        assert http_server.connections_max() == most

    @pytest.mark.parametrize(
        ("limits", "wanted"),
        [
            ((1024, 524288), 16384),
            ((1024, 2048), 2048),
            ((1024, resource.RLIM_INFINITY), 16384),
            ((20000, 20000), None),
            ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
        ],
    )
    def test_a_process_takes_the_descriptors_that_it_may_have(
        self, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int | None
    ) -> None:
        given: list[tuple[int, int]] = []
        monkeypatch.setattr("coordinator.hosting.http_server.resource.getrlimit", lambda _: limits)
        monkeypatch.setattr("coordinator.hosting.http_server.resource.setrlimit", lambda _, each: given.append(each))
        http_server.raise_descriptor_limit()
        assert given == ([] if wanted is None else [(wanted, limits[1])])

    async def until_there_are(self, server: HttpServer, num: int) -> None:
        state = server._server.server_state
        await eventually(lambda: len(state.connections) == num, f"there are {num} connections")

    async def is_answered(self, port: int) -> bool:
        async with connected(port) as (reader, writer):
            writer.write(GET)
            with suppress(ConnectionResetError, asyncio.IncompleteReadError):
                return (await answer_from(reader))[0] == 200
            return False


class TestBodies:
    @pytest.mark.parametrize("more", [b"", b"x"], ids=["silent", "trickling"])
    async def test_a_body_whose_answer_is_there_is_not_waited_for_long(
        self, monkeypatch: pytest.MonkeyPatch, more: bytes
    ) -> None:
        """Found: one byte of it ended uvicorn's own wait, and there was no other."""
        with limit(monkeypatch, "HEAD_TIME_MAX_S", 0.3):
            async with serving(Site()) as (_, port), connected(port) as (reader, writer):
                writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
                assert (await answer_from(reader))[0] == 200
                writer.write(more)
                assert await reader.read() == b""

    async def test_one_that_comes_after_its_answer_does_no_harm(self) -> None:
        async with serving(Site()) as (_, port), connected(port) as (reader, writer):
            for _ in range(3):
                writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
                assert (await answer_from(reader))[0] == 200
                writer.write(b"x" * 100)


class TestHeads:
    @pytest.mark.parametrize("sent", [b"", b"GET / HT", b"\r\n"], ids=["nothing", "a part", "an empty line"])
    async def test_a_head_that_does_not_come_ends_its_connection(
        self, monkeypatch: pytest.MonkeyPatch, sent: bytes
    ) -> None:
        with limit(monkeypatch, "HEAD_TIME_MAX_S", 0.2):
            async with serving(Site()) as (_, port), connected(port) as (reader, writer):
                writer.write(sent)
                status, body = await answer_from(reader)
                assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
                assert await reader.read() == b""

    async def test_the_second_request_of_a_connection_has_no_longer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with limit(monkeypatch, "HEAD_TIME_MAX_S", 0.2):
            async with serving(Site()) as (_, port), connected(port) as (reader, writer):
                writer.write(GET)
                assert (await answer_from(reader))[0] == 200
                writer.write(b"\r\n")
                assert (await answer_from(reader))[0] == 408

    async def test_an_answer_that_takes_its_time_is_not_a_head_that_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        site = Site()
        site.may_answer.clear()
        with limit(monkeypatch, "HEAD_TIME_MAX_S", 0.1):
            async with serving(site) as (_, port), connected(port) as (reader, writer):
                writer.write(GET + b"GET /next HT")  # a part of the next one, too
                await eventually(lambda: site.num_asked == 1, "the request has come")
                await asyncio.sleep(0.3)
                site.may_answer.set()
                assert await answer_from(reader) == (200, b"hello")

    async def test_one_that_is_too_long_is_refused(self) -> None:
        site = Site()
        async with serving(site) as (_, port), connected(port) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nX: ")
            with suppress(ConnectionResetError):
                for _ in range(HEAD_BYTES_MAX // 1000 + 2):
                    writer.write(b"x" * 1000)
                    await writer.drain()
            status, body = await answer_from(reader)
        assert (status, json.loads(body)["error"]["type"]) == (431, "invalid_request_error")
        assert site.num_asked == 0

    async def test_a_body_may_be_longer_than_a_head(self) -> None:
        site = Site()
        async with serving(site) as (_, port), connected(port) as (reader, writer):
            for _ in range(2):
                writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000)
                assert await answer_from(reader) == (200, b"hello")

    async def test_what_is_not_http_is_refused_in_the_words_of_the_api(self) -> None:
        async with serving(Site()) as (_, port), connected(port) as (reader, writer):
            writer.write(b"\x16\x03\x01 hello\r\n\r\n")
            status, body = await answer_from(reader)
            assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")
            assert await reader.read() == b""


class TestStop:
    async def test_it_takes_no_more_and_gives_what_it_owes(self) -> None:
        site = Site()
        site.may_answer.clear()
        async with serving(site) as (server, port), connected(port) as (reader, writer), connected(port) as (idle, _):
            writer.write(GET)
            await eventually(lambda: site.num_asked == 1, "the request has come")
            stopping = asyncio.create_task(server.stop())
            assert await idle.read() == b""
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            assert not stopping.done()
            site.may_answer.set()
            assert await answer_from(reader) == (200, b"hello")
            await stopping

    async def test_what_is_cut_ends(self) -> None:
        site = Site()
        site.may_answer.clear()
        async with serving(site) as (server, port), connected(port) as (reader, writer):
            writer.write(GET)
            await eventually(lambda: site.num_asked == 1, "the request has come")
            stopping = asyncio.create_task(server.stop())
            await server.cut()
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            await stopping
