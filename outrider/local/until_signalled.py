"""Runs a command's coroutine until it ends or a signal cancels it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_signalled(main: Callable[[], Awaitable[int]], end_early: Callable[[], bool] = lambda: False) -> int:
    """Runs `main` to its end; SIGINT or SIGTERM cancel it, so that it cleans up. Returns its exit status,
    or 128 + n after signal n.

    `end_early` is called first: where it returns true, `main` ends by itself soon, and is not cancelled.
    """

    async def guarded() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main())
        received: list[int] = []

        def cancel(number: int) -> None:
            if end_early():
                return
            received.append(number)
            task.cancel()

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, cancel, number)
        try:
            return await task
        except asyncio.CancelledError:
            if not received:
                raise
            return 128 + received[0]

    return asyncio.run(guarded())
