"""Tests of the part of a call that a server takes before it admits it, and of room among calls that need no key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.errors import Forbidden, Overloaded
from outrider.security import call_admission
from outrider.security.call_admission import READING_OPTIONS, UNREAD_BYTES_MAX, OpenCalls, Read, admitted
from tests.raw_calls import framed, raw_connection

UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED.value[0]
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Service:
    """A service with a method of each kind that gives back what it gets. `num_read` counts messages that were read."""

    def __init__(self) -> None:
        self.num_read = 0

    def read(self, raw: bytes) -> bytes:
        self.num_read += 1
        return raw

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        return request

    async def unary_stream(self, request: bytes, context: Any) -> AsyncGenerator[bytes]:
        yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([each async for each in requests])

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes]:
        async for request in requests:
            yield request


@asynccontextmanager
async def serving(service: Service, admission: Any) -> AsyncIterator[str]:
    server = grpc.aio.server(options=READING_OPTIONS)
    methods = {
        kind: admitted(getattr(grpc, f"{kind}_rpc_method_handler")(getattr(service, kind), service.read), admission)
        for kind in KINDS
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def anybody(context: Any, read: Read) -> AsyncGenerator[Any]:
    yield await read()


@asynccontextmanager
async def nobody(context: Any, read: Read) -> AsyncGenerator[Any]:
    if context is not None:
        raise Forbidden("nobody may")
    yield await read()


async def answer(address: str, kind: str) -> bytes:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = getattr(channel, kind)(f"/a.B/{kind}")
        called = call(iter([b"x"]) if kind.startswith("stream") else b"x", timeout=20)
        if kind.endswith("unary"):
            return bytes(await called)
        return b"".join([each async for each in called])


class TestAdmission:
    @pytest.mark.parametrize("kind", KINDS)
    async def test_each_kind_of_method_answers_as_ever(self, kind: str) -> None:
        async with serving(Service(), anybody) as address:
            assert await answer(address, kind) == b"x"

    @pytest.mark.parametrize("kind", KINDS)
    async def test_who_is_refused_is_not_read(self, kind: str) -> None:
        service = Service()
        async with serving(service, nobody) as address:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(address, kind)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, "nobody may")
        assert service.num_read == 0

    async def test_a_call_without_a_message_is_refused(self) -> None:
        async with serving(Service(), anybody) as address, raw_connection(address) as connection:
            call = await connection.begin("/a.B/unary_unary")
            await connection.send(call, b"")
            connection._http.end_stream(call)
            await connection._flush()
            assert await connection.status(call) == (3, "the call has no message")

    async def test_a_message_that_does_not_come_ends_its_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(call_admission, "READ_MAX_S", 0.05)
        async with serving(Service(), anybody) as address, raw_connection(address) as connection:
            call = await connection.begin("/a.B/unary_unary")
            await connection.send(call, framed(b"abc")[:-1], is_end=False)
            code, message = await connection.status(call)
        assert (code, "did not arrive" in message) == (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], True)

    async def test_what_nobody_reads_is_bounded_in_sum(self) -> None:
        """Found: with gRPC's probes 100 calls that nobody read had 800 MB."""
        may_read = asyncio.Event()

        @asynccontextmanager
        async def late(context: Any, read: Read) -> AsyncGenerator[Any]:
            await may_read.wait()
            yield await read()

        async with serving(Service(), late) as address, raw_connection(address) as connection:
            for _ in range(8):
                call = await connection.begin("/a.B/unary_unary")
                assert await connection.send(call, framed(bytes(4 << 20)), is_end=False) <= UNREAD_BYTES_MAX


class TestCompression:
    async def test_a_message_that_is_compressed_is_refused_and_not_expanded(self) -> None:
        service = Service()
        async with serving(service, anybody) as address, raw_connection(address) as connection:
            for encoding, message in (("gzip", framed(bytes(1 << 20), is_compressed=True)), ("deflate", framed(b"x"))):
                call = await connection.begin("/a.B/unary_unary", [("grpc-encoding", encoding)])
                await connection.send(call, message)
                code, told = await connection.status(call)
                assert (code, encoding in told) == (UNIMPLEMENTED, True)
            # Nor one that says so nowhere but in its own first byte.
            call = await connection.begin("/a.B/unary_unary")
            await connection.send(call, framed(bytes(1 << 20), is_compressed=True))
            assert (await connection.status(call))[0] != 0
        assert service.num_read == 0


class Caller:
    """The context of a call from an address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> str:
        return f"{self._address}:1"

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass


class TestOpenCalls:
    @asynccontextmanager
    async def calls(
        self, monkeypatch: pytest.MonkeyPatch, num_max: int, made_room_s: float = 0.0
    ) -> AsyncIterator[Any]:
        """A function that makes a call from an address, which lasts, and returns its task."""
        monkeypatch.setattr(call_admission, "MADE_ROOM_S", made_room_s)
        monkeypatch.setattr(call_admission, "OPEN_CALLS_MAX", num_max)
        monkeypatch.setattr(call_admission, "OPEN_READS_MAX", num_max)
        calls = OpenCalls()
        async with AsyncExitStack() as stack:

            async def call(address: str, *, is_sent: bool = True) -> asyncio.Task[Any]:
                has_begun = asyncio.Event()

                async def read() -> None:
                    has_begun.set()
                    if not is_sent:
                        await asyncio.Event().wait()

                async def last() -> None:
                    async with calls.admission(Caller(address), read):
                        await asyncio.Event().wait()

                task = asyncio.create_task(last())
                stack.callback(task.cancel)
                await has_begun.wait()
                return task

            yield call

    @pytest.mark.parametrize("is_sent", [True, False])
    async def test_who_has_most_makes_room_with_its_oldest(
        self, monkeypatch: pytest.MonkeyPatch, is_sent: bool
    ) -> None:
        async with self.calls(monkeypatch, 4) as call:
            honest = await call("honest", is_sent=is_sent)
            greedy = [await call("greedy", is_sent=is_sent) for _ in range(12)]
            late = await call("late", is_sent=is_sent)
            ended, kept = greedy[:10], [honest, *greedy[10:], late]
            told = await asyncio.gather(*ended, return_exceptions=True)
            assert all("made room, call again" in str(each) for each in told)
            assert not any(task.done() for task in kept)

    async def test_who_calls_again_at_once_is_kept_for_a_while(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Found: five clients that watch where four may ended one another 800 times a second."""
        async with self.calls(monkeypatch, 2, made_room_s=3600.0) as call:
            made = [await call("x") for _ in range(5)]
            told = (await asyncio.gather(made[2], return_exceptions=True))[0]
            assert isinstance(told, Overloaded), "of those that make room are no more either"
            assert [task.done() for task in made] == [False, False, True, False, False]
            made[0].cancel()
            assert isinstance((await asyncio.gather(made[0], return_exceptions=True))[0], asyncio.CancelledError)

    async def test_a_caller_that_leaves_is_no_more_than_that(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with self.calls(monkeypatch, 1) as call:
            first = await call("x")
            first.cancel()
            assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], asyncio.CancelledError)
            second, _ = await call("x"), await call("y")
            assert isinstance((await asyncio.gather(second, return_exceptions=True))[0], Overloaded)
