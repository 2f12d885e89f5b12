"""The delaying proxy with a real echo server on loopback, and what `network_delay` makes of slices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest

from benchmarks.shared.delaying_proxy import Delay, proxy
from benchmarks.shared.worker_pair import WorkerProcessHandle
from benchmarks.speculation.modes import Mode, ModeSlice
from benchmarks.speculation.network_delay import DIRECT, PLAIN, draw, modes, parse_arguments, summarize
from tests.benchmarks.figures import slice_of, window_of


@contextlib.asynccontextmanager
async def echo_server() -> AsyncIterator[str]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def echo_through(delay: Delay) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with echo_server() as server, proxy(server, delay) as address, connected(address) as streams:
        yield streams


class TestProxy:
    @pytest.mark.parametrize("delay_s", [0.0, 0.02])
    async def test_everything_arrives_in_order(self, delay_s: float) -> None:
        async with echo_through(lambda: delay_s) as (reader, writer):
            sent = b"".join(bytes([i % 251]) * (1 + 37 * i) for i in range(300))
            for start in range(0, len(sent), 9973):
                writer.write(sent[start : start + 9973])
                await writer.drain()
            assert await reader.readexactly(len(sent)) == sent

    async def test_nothing_overtakes_when_delays_differ(self) -> None:
        numbers = count()
        async with echo_through(lambda: 0.03 if next(numbers) % 3 == 0 else 0.0) as (reader, writer):
            sent = [f"{i:04d}".encode() for i in range(60)]
            for piece in sent:
                writer.write(piece)
                await asyncio.sleep(0)  # pieces of their own, as far as the kernel likes
            assert await reader.readexactly(4 * len(sent)) == b"".join(sent)

    async def test_nothing_arrives_before_its_delay(self) -> None:
        loop = asyncio.get_running_loop()
        async with echo_through(lambda: 0.05) as (reader, writer):
            started = loop.time()
            writer.write(b"once")
            assert await reader.readexactly(4) == b"once"
            assert loop.time() - started >= 0.1

    async def test_pieces_travel_at_the_same_time(self) -> None:
        """Were each held back after the one before it, a hundred of them would take a hundred delays each way."""
        num_pieces, delay_s = 100, 0.1
        loop = asyncio.get_running_loop()
        async with echo_through(lambda: delay_s) as (reader, writer):

            async def send() -> None:
                for _ in range(num_pieces):
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.001)

            started = loop.time()
            sending = asyncio.create_task(send())
            await reader.readexactly(num_pieces)
            await sending
            assert loop.time() - started < num_pieces * delay_s

    async def test_the_end_arrives_after_all_that_was_sent(self) -> None:
        async with echo_through(lambda: 0.01) as (reader, writer):
            writer.write(b"last")
            assert await reader.readexactly(4) == b"last"
            writer.write_eof()
            assert await reader.read() == b""

    async def test_a_target_that_is_not_there_closes_the_connection(self) -> None:
        async with echo_server() as server:
            pass
        async with proxy(server, lambda: 0.0) as address, connected(address) as (reader, _):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""

    async def test_it_runs_as_a_process_and_ends_when_told(self) -> None:
        async with echo_server() as server:
            handle = await WorkerProcessHandle.start(
                "benchmarks.shared.delaying_proxy", "--target-address", server, "--round-trip-ms", "1"
            )
            try:
                async with connected(handle.address) as (reader, writer):
                    writer.write(b"hello")
                    assert await reader.readexactly(5) == b"hello"
            finally:
                assert await handle.stop() == 0


def test_every_delay_has_workers_of_its_own_beside_plain_and_direct() -> None:
    found = modes([0.0, 2.5])
    assert found == [
        Mode(PLAIN, draft_arguments=None),
        Mode(DIRECT),
        Mode("0 ms", round_trip_ms=0.0),
        Mode("2.5 ms", round_trip_ms=2.5),
    ]
    assert parse_arguments([]).delays == [0.0, 1.0, 5.0, 20.0]


def test_speeds_are_ratios_to_plain_decoding_and_can_be_drawn(tmp_path: Path) -> None:
    def slices(speed: float) -> list[ModeSlice]:
        return [slice_of(window_of(speed * each)) for each in (1.0, 1.1, 0.9)]

    summary = summarize({PLAIN: slices(100.0), DIRECT: slices(200.0), "5 ms": slices(150.0)})
    assert summary["5 ms"]["speedup"] == 1.5
    assert summary[DIRECT]["speedup"] == 2.0
    result = {"round_trips_ms": [5.0], "batch": {"1": summary}, "load": {"target": "t"}}
    draw(result, tmp_path / "delay.svg")
    assert (tmp_path / "delay.svg").read_text().startswith("<svg")
