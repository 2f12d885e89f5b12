"""Loads a model beside the event loop, which answers probes and scrapes meanwhile, and watches that it gets on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from outrider.concurrency import time_slices
from outrider.worker.stall_watch import LoadWatch, WorkDone

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 5.0
ResultT = TypeVar("ResultT")


def start_beside(work: Callable[[], ResultT], name: str) -> asyncio.Future[ResultT]:
    """Runs `work` on a thread of its own, which nothing can interrupt: a process that does not wait for it must end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[ResultT] = loop.create_future()

    def settle(result: ResultT | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        time_slices.use_default_slices()
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


async def watch_progress(longest_idle_s: float, interval_s: float = LOOK_EVERY_S) -> None:
    """Returns when this process has done nothing to speak of for as long."""
    watch = LoadWatch(interval_s, work_done(), time.monotonic())
    while True:
        await asyncio.sleep(interval_s)
        if watch.look(work_done(), time.monotonic()) > longest_idle_s:
            return


def work_done(folder: Path = Path("/proc/self")) -> WorkDone:
    """Reads what this process has done; nothing where the system does not tell."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    num_bytes = 0
    with contextlib.suppress(OSError, ValueError):
        told = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
        num_bytes = int(told.get("rchar", 0)) + int(told.get("read_bytes", 0))
    return WorkDone(usage.ru_utime + usage.ru_stime, num_bytes, usage.ru_majflt)
