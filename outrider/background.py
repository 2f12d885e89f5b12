"""Tasks that run beside something, for as long as it does."""

from __future__ import annotations

import asyncio
from typing import Final

AGAIN_S: Final = 0.2


async def end_tasks(*tasks: asyncio.Task[None] | None) -> None:
    """Cancels them and waits for their end. Raises what one of them had failed with.

    More than once where need be: a cancellation that meets a call of grpc.aio while it is being set up, or redis-py's
    own work, is swallowed there, and the task goes on.
    """
    begun = {task for task in tasks if task is not None}
    pending = begun
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
    for task in begun:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
