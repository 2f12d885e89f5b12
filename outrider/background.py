"""Tasks that run beside something, for as long as it does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

_log = logging.getLogger(__name__)

AGAIN_S: Final = 0.2
RESTART_S: Final = 0.5


async def keep_going(
    work: Callable[[], Awaitable[None]],
    what: str,
    on_failure: Callable[[], None] | None = None,
    pause_s: float = RESTART_S,
) -> None:
    """Runs work that has no end, and begins it again where an error ends it that nobody foresaw.

    A task that dies of one says so to nobody until it is awaited, which may be never: what it kept fresh would stay as
    it was. `on_failure` is told each time. Cancelling ends it.
    """
    while True:
        try:
            await work()
        except Exception:
            _log.exception("%s failed; it begins again in %g s", what, pause_s)
            if on_failure is not None:
                on_failure()
        await asyncio.sleep(pause_s)


async def until_ended(*tasks: asyncio.Task[Any]) -> None:
    """Waits until the tasks have ended, so that what they use can be closed. Raises none of their errors.

    A waiter that is cancelled meanwhile goes on waiting, and raises the cancellation afterwards.
    """
    interruption: asyncio.CancelledError | None = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is not None:
        raise interruption


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
