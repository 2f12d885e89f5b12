"""A TCP proxy on loopback that delays data: `python -m benchmarks delaying_proxy --help`.

Each piece of data is forwarded when its own delay has passed. Pieces are delayed concurrently, as on a long line, so
a delay limits no bandwidth, and none overtakes another. Data in flight is kept in memory without a bound; the two
ends have their own flow control.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import selectors
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable

from outrider.worker.worker_process import pin_to_cores

PIECE_BYTES = 65536
Delay = Callable[[], float]
"""Returns the delay of the next piece, in seconds."""


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: Delay) -> None:
    """Forwards one direction until its end, which is delayed like the data before it."""
    loop = asyncio.get_running_loop()
    under_way: deque[tuple[float, bytes]] = deque()  # (when due on the loop's clock, data; b"" is the end)
    has_more = asyncio.Event()

    async def receive() -> None:
        due, data = 0.0, b"-"
        while data:
            data = await reader.read(PIECE_BYTES)
            due = max(due, loop.time() + delay())  # nothing overtakes
            under_way.append((due, data))
            has_more.set()

    async def forward() -> None:
        while True:
            await has_more.wait()
            due, data = under_way[0]
            if (wait_s := due - loop.time()) > 0.0:
                await asyncio.sleep(wait_s)
            under_way.popleft()
            if not under_way:
                has_more.clear()
            if not data:
                return
            writer.write(data)
            await writer.drain()

    async with asyncio.TaskGroup() as both:
        both.create_task(receive())
        both.create_task(forward())


@contextlib.asynccontextmanager
async def proxy(target_address: str, delay: Delay) -> AsyncIterator[str]:
    """Forwards connections to `target_address` both ways; yields the proxy's own host:port."""
    host, port = target_address.rsplit(":", 1)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        pumps: list[asyncio.Task[None]] = []
        ends = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            ends.append(far_writer)
            pumps = [
                asyncio.create_task(pump(reader, far_writer, delay)),
                asyncio.create_task(pump(far_reader, writer, delay)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except ConnectionError:
            pass  # connection refused: closed, as without a proxy
        finally:
            for running in pumps:
                running.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in ends:
                end.close()
                with contextlib.suppress(ConnectionError):
                    await end.wait_closed()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve_until_stopped(target_address: str, round_trip_ms: float) -> None:
    """Prints its address as one line of JSON on stdout, as the workers do."""
    is_over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, is_over.set)
    one_way_s = round_trip_ms / 2e3
    async with proxy(target_address, lambda: one_way_s) as address:
        print(json.dumps({"address": address}), flush=True)
        await is_over.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target-address", required=True, help="host:port")
    parser.add_argument("--round-trip-ms", type=float, required=True, help="round trip; 50 %% each way")
    parser.add_argument("--cpu-affinity", default=None, help="cores to run on; default: any")
    arguments = parser.parse_args()
    if arguments.cpu_affinity is not None:
        pin_to_cores(arguments.cpu_affinity)
    # Unlike epoll, select does not round waits up to whole milliseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(serve_until_stopped(arguments.target_address, arguments.round_trip_ms))


if __name__ == "__main__":
    main()
