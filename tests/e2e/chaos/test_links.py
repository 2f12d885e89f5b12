"""The relay that the chaos suite breaks things with: what is broken looks broken from both ends, and heals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import cast

import pytest

from tests.e2e.chaos.links import Direction, Link

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BROKEN = (ConnectionError, asyncio.IncompleteReadError)


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class DialledLink(Link):
    """A link, and who has dialled it."""

    def __init__(self, server_address: tuple[str, int]) -> None:
        super().__init__("test", server_address)
        self.dialled: list[asyncio.StreamWriter] = []

    async def dial(self) -> Ends:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.dialled.append(writer)
        return reader, writer


@asynccontextmanager
async def linked(protocol: Callable[[], asyncio.Protocol]) -> AsyncIterator[DialledLink]:
    """A link to a server that speaks it."""
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    link = DialledLink(("127.0.0.1", server.sockets[0].getsockname()[1]))
    await link.start()
    try:
        yield link
    finally:
        await link.stop()
        for writer in link.dialled:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        server.close()


async def eventually(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.01)


async def heard(ends: Ends, data: bytes) -> None:
    """Returns once exactly these bytes have arrived."""
    async with asyncio.timeout(5):
        assert await ends[0].readexactly(len(data)) == data


def echoing() -> AbstractAsyncContextManager[DialledLink]:
    return linked(Echo)


async def say(ends: Ends, data: bytes, within_s: float = 5.0) -> bytes:
    """Sends `data` and returns the same number of bytes from the other end."""
    reader, writer = ends
    writer.write(data)
    async with asyncio.timeout(within_s):
        return await reader.readexactly(len(data))


async def test_what_goes_in_comes_out_however_much_it_is() -> None:
    async with echoing() as link:
        data = bytes(range(256)) * 40_000
        assert await say(await link.dial(), data) == data


async def test_a_cut_resets_what_stands_and_takes_what_comes() -> None:
    async with echoing() as link:
        before = await link.dial()
        await say(before, b"x")
        assert link.cut() == 1
        with pytest.raises(BROKEN):
            await say(before, b"x")
        assert await say(await link.dial(), b"again") == b"again"


async def test_a_refusing_link_resets_what_comes_until_it_opens() -> None:
    async with echoing() as link:
        link.refuse()
        with pytest.raises(BROKEN):
            await say(await link.dial(), b"x")
        link.open()
        assert await say(await link.dial(), b"again") == b"again"


async def test_a_stalled_link_passes_nothing_and_loses_nothing() -> None:
    async with echoing() as link:
        before = await link.dial()
        await say(before, b"x")
        link.stall()
        late = await link.dial()
        for ends in (before, late):
            with pytest.raises(TimeoutError):
                await say(ends, b"under way", within_s=0.1)
        link.open()
        for ends in (before, late):
            await heard(ends, b"under way")


async def test_the_end_of_a_stalled_connection_is_not_heard_of() -> None:
    async with echoing() as link:
        ends = await link.dial()
        await say(ends, b"x")
        link.stall()
        ends[1].close()
        await asyncio.sleep(0.1)
        assert len(link.relays) == 1
        link.open()
        await eventually(lambda: not link.relays)


async def test_a_fault_may_concern_some_callers_only() -> None:
    async with echoing() as link:
        meant, other = await link.dial(), await link.dial()
        await say(meant, b"x")
        await say(other, b"x")
        port = meant[1].get_extra_info("sockname")[1]
        assert link.stall(lambda caller: caller == port) == 1
        assert await say(other, b"passes") == b"passes"
        with pytest.raises(TimeoutError):
            await say(meant, b"x", within_s=0.1)


async def test_a_delayed_link_keeps_the_order() -> None:
    async with echoing() as link:
        link.delay_s = 0.05
        ends = await link.dial()
        began_s = asyncio.get_running_loop().time()
        data = b"".join(bytes([number]) * 1000 for number in range(50))
        assert await say(ends, data) == data
        assert asyncio.get_running_loop().time() - began_s >= 0.1


async def test_nobody_behind_a_link_is_a_closed_connection() -> None:
    async with echoing() as link:
        link.server_address = ("127.0.0.1", 1)
        with pytest.raises(BROKEN):
            await say(await link.dial(), b"x")


class Talker(asyncio.Protocol):
    """Speaks when it is told to, and keeps what it hears."""

    def __init__(self) -> None:
        self.heard = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def say(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


@asynccontextmanager
async def talking() -> AsyncIterator[tuple[DialledLink, Talker, Ends]]:
    """A link to a talker, and one connection over it, which stands."""
    server = Talker()
    async with linked(lambda: server) as link:
        ends = await link.dial()
        await eventually(lambda: server.transport is not None)
        yield link, server, ends


async def test_a_link_stalled_towards_the_server_lets_the_caller_hear() -> None:
    async with talking() as (link, server, ends):
        assert link.stall(directions=Direction.TO_SERVER) == 1
        ends[1].write(b"unheard")
        server.say(b"heard")
        await heard(ends, b"heard")
        assert server.heard == b""
        link.open()
        await eventually(lambda: server.heard == b"unheard")


async def test_a_link_stalled_towards_the_caller_lets_the_server_hear() -> None:
    async with talking() as (link, server, ends):
        link.stall(directions=Direction.TO_CALLER)
        ends[1].write(b"heard")
        server.say(b"unheard")
        await eventually(lambda: server.heard == b"heard")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ends[0].readexactly(1)
        link.open()
        await heard(ends, b"unheard")


async def test_no_connection_comes_about_with_one_direction_alone() -> None:
    server = Talker()
    async with linked(lambda: server) as link:
        link.stall(directions=Direction.TO_CALLER)
        _, writer = await link.dial()
        writer.write(b"late")
        await asyncio.sleep(0.1)
        assert server.transport is None
        link.open()
        await eventually(lambda: server.heard == b"late")


async def test_the_servers_end_is_not_heard_of_where_it_is_not_heard() -> None:
    async with talking() as (link, server, ends):
        link.stall(directions=Direction.TO_CALLER)
        assert server.transport is not None
        server.transport.abort()
        ends[1].write(b"x" * 1000)  # the relay hears of the end by writing at the latest
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ends[0].read(1)
        link.open()
        async with asyncio.timeout(5):
            assert await ends[0].read(1) == b""


async def test_what_is_delayed_one_way_holds_up_nothing_the_other_way() -> None:
    async with talking() as (link, server, ends):
        link.stall(directions=Direction.TO_SERVER)
        link.delay_s = 0.01
        ends[1].write(b"unheard")
        for _ in range(3):
            server.say(b"heard")
            await heard(ends, b"heard")
