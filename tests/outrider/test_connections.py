"""Draft workers' connections take turns on a loop, whatever one of them sends. The clock is the tests' own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from outrider.concurrency.loop_share import BURST_S, SHARE_MAX
from outrider.hint_service.connections import FLOODED_S, NEWCOMER_S, SLICE_S, Connection, Connections

PIECE_S = 0.0002
TURN_S = 1e-5


class World:
    """A loop whose clock the work of connections and the sleep of their streams move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.processor_s = 0.0
        self.connections = Connections(lambda: self.now, lambda: self.processor_s)
        self.taken: list[str] = []
        self.spent_s: dict[str, float] = {}
        self._sleeping: list[tuple[float, int, asyncio.Future[None]]] = []
        monkeypatch.setattr("outrider.hint_service.connections.asyncio.sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        if seconds > 0.0:
            self._sleeping.append((self.now + seconds, id(future), future))
        else:
            asyncio.get_running_loop().call_soon(future.set_result, None)
        await future

    async def turn(self) -> None:
        """A turn of the loop. When nobody has anything to do in it, time passes until somebody has."""
        num_taken = len(self.taken)
        turn = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turn.set_result, None)
        await turn
        self.now += TURN_S
        if len(self.taken) == num_taken and self._sleeping:
            self.now = max(self.now, min(self._sleeping)[0])
        due = [future for at, _, future in self._sleeping if at <= self.now]
        self._sleeping = [each for each in self._sleeping if each[0] > self.now]
        for future in due:
            if not future.done():
                future.set_result(None)

    async def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            await self.turn()

    def message(self, name: str, num_pieces: int, *, is_preempted: bool = False) -> Iterator[None]:
        for _ in range(num_pieces):
            self.now += PIECE_S
            self.processor_s += 0.0 if is_preempted else PIECE_S
            self.taken.append(name)
            self.spent_s[name] = self.spent_s.get(name, 0.0) + PIECE_S
            yield

    async def flood(self, connection: Connection, name: str = "flood") -> None:
        while True:
            await self.connections.until_due(connection)
            await self.connections.take(connection, self.message(name, 100))

    def apart(self, address: str) -> Connection:
        """A connection that is not new any more."""
        connection = self.connections.join(address)
        self.now += NEWCOMER_S + 1.0
        return connection

    @asynccontextmanager
    async def flooding(self, *connections: Connection) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.flood(each)) for each in connections]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_a_message_goes_in_slices_and_others_in_between(world: World) -> None:
    first, other = world.apart("a"), world.apart("b")
    both = [
        asyncio.create_task(world.connections.take(first, world.message("long", 40))),
        asyncio.create_task(world.connections.take(other, world.message("short", 1))),
    ]
    await asyncio.gather(*both)
    assert world.taken.index("short") <= SLICE_S / PIECE_S + 1
    assert world.taken.count("long") == 40


@pytest.mark.parametrize("num_streams", [1, 12])
async def test_a_flood_has_a_share_whatever_number_of_streams_it_opens(world: World, num_streams: int) -> None:
    connections = [world.apart("a"), *(world.connections.join("a") for _ in range(num_streams - 1))]
    began = world.now
    async with world.flooding(*connections):
        await world.run(9.0)
    allowance = 2 * BURST_S + num_streams * 2 * SLICE_S  # its own burst, and that of those who flood
    assert 0.8 * SHARE_MAX * 9.0 < world.spent_s["flood"] <= SHARE_MAX * (world.now - began) + allowance


async def test_connections_that_flood_have_one_share_together(world: World) -> None:
    connections = [world.apart(str(number)) for number in range(3)]
    began = world.now
    async with world.flooding(*connections):
        await world.run(9.0)
    # Each has its own until it has exceeded it: at first they have the whole loop.
    assert world.spent_s["flood"] <= SHARE_MAX * (world.now - began) + 1.0


async def test_connections_that_come_again_and_again_have_one_share_together(world: World) -> None:
    began = world.now
    while world.now < began + 5.0:
        connection = world.connections.join(f"port {world.now}")
        async with world.flooding(connection):
            await world.run(0.1)
        world.connections.leave(connection)
    assert world.spent_s["flood"] <= SHARE_MAX * (world.now - began) + 2 * BURST_S


@pytest.mark.parametrize("num_floods", [1, 6])
async def test_an_honest_connection_waits_for_no_more_than_a_slice_of_each_flood(world: World, num_floods: int) -> None:
    honest = world.apart("honest")
    floods = [world.apart(str(number)) for number in range(num_floods)]
    again = [world.connections.join(each.address) for each in floods]
    slice_len = SLICE_S / PIECE_S + 1
    async with world.flooding(*floods, *again):
        for _ in range(200):
            await world.run(0.003)
            before = len(world.taken)
            task = asyncio.create_task(world.connections.take(honest, world.message("honest", 1)))
            while not task.done():
                await world.turn()
            assert world.taken[before:].index("honest") <= 2 * num_floods * slice_len


async def test_time_in_which_others_have_the_processor_makes_nobody_a_flood(world: World) -> None:
    honest = world.apart("honest")
    for _ in range(1000):
        await world.connections.take(honest, world.message("honest", 1, is_preempted=True))
        await world.turn()
    assert honest.apart_from_s < world.now


async def test_a_flood_is_logged_once_and_forgiven_when_it_is_over(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    connection = world.apart("ipv4:192.0.2.1:7")
    async with world.flooding(connection):
        await world.run(2.0)
    assert [record.getMessage() for record in caplog.records] == [
        "the draft worker at ipv4:192.0.2.1:7 sends too much, and is read more slowly"
    ]
    assert world.now + FLOODED_S / 2 < connection.apart_from_s <= world.now + FLOODED_S


def test_a_connection_is_forgotten_with_its_last_stream(world: World) -> None:
    connections = [world.connections.join("a") for _ in range(3)]
    assert len({id(each) for each in connections}) == 1
    for connection in connections:
        world.connections.leave(connection)
    assert not world.connections._by_address
