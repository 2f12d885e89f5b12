"""Background tasks: restarted after unexpected errors, and ended reliably."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from outrider.errors import detached

_log = logging.getLogger(__name__)

AGAIN_S: Final = 0.2
RESTART_S: Final = 0.5


async def keep_going(
    work: Callable[[], Awaitable[None]],
    what: str,
    on_failure: Callable[[], None] | None = None,
    pause_s: float = RESTART_S,
) -> None:
    """Runs endless work, and restarts it after an unexpected error.

    A task that dies of one reports it to nobody until it is awaited, which may be never, and its state would go stale.
    `on_failure` is called each time. Cancelling ends it.
    """
    while True:
        try:
            await work()
        except Exception:
            _log.exception("%s failed; restarting in %g s", what, pause_s)
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
            interruption = detached(error)
    if interruption is not None:
        raise interruption


async def end_tasks(*tasks: asyncio.Task[None] | None) -> None:
    """Cancels tasks and waits for their end. Raises the error that one of them had failed with.

    Repeats the cancellation if necessary: one that meets a call of grpc.aio while it is being set up, or redis-py's own
    work, is swallowed there, and the task goes on.
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
