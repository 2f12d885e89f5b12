"""Tasks that run beside something, for as long as it does."""

from __future__ import annotations

import asyncio
import contextlib


async def end_tasks(*tasks: asyncio.Task[None] | None) -> None:
    """Cancels them and waits for their end. Raises what one of them had failed with."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    for task in begun:
        with contextlib.suppress(asyncio.CancelledError):
            await task
