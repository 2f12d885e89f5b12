"""The relay that the chaos suite breaks things with: what is broken looks broken from both ends, and heals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest

from tests.e2e.chaos.links import Link

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class EchoLink(Link):
    """A link to an echo, and who has dialled it."""

    def __init__(self, server_address: tuple[str, int]) -> None:
        super().__init__("test", server_address)
        self.dialled: list[asyncio.StreamWriter] = []

    async def dial(self) -> Ends:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.dialled.append(writer)
        return reader, writer


@asynccontextmanager
async def echoing() -> AsyncIterator[EchoLink]:
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    link = EchoLink(("127.0.0.1", server.sockets[0].getsockname()[1]))
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


async def say(ends: Ends, data: bytes, within_s: float = 5.0) -> bytes:
    """What comes back, as much as was said."""
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
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await say(before, b"x")
        assert await say(await link.dial(), b"again") == b"again"


async def test_a_refusing_link_resets_what_comes_until_it_opens() -> None:
    async with echoing() as link:
        link.refuse()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
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
        for reader, _ in (before, late):
            async with asyncio.timeout(5):
                assert await reader.readexactly(9) == b"under way"


async def test_the_end_of_a_stalled_connection_is_not_heard_of() -> None:
    async with echoing() as link:
        ends = await link.dial()
        await say(ends, b"x")
        link.stall()
        ends[1].close()
        await asyncio.sleep(0.1)
        assert len(link.relays) == 1
        link.open()
        async with asyncio.timeout(5):
            while link.relays:  # noqa: ASYNC110 - the relay has nothing to wait for
                await asyncio.sleep(0.01)


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
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await say(await link.dial(), b"x")
