"""A TCP proxy on loopback that holds every piece of data back for a random moment: a bad network between workers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

PIECE_BYTES = 65536


@contextlib.asynccontextmanager
async def delaying_proxy(target_address: str, *, delay_s_max: float, seed: int = 0) -> AsyncIterator[str]:
    """Forwards connections to `target_address`; yields the proxy's own host:port. Order is kept, time is not."""
    host, port = target_address.rsplit(":", 1)
    rng = random.Random(seed)
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(PIECE_BYTES):
            await asyncio.sleep(rng.uniform(0.0, delay_s_max))
            writer.write(data)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        pumps = [
            asyncio.create_task(pump(reader, far_writer)),
            asyncio.create_task(pump(far_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for running in pumps:
                running.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, far_writer):
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
