"""Processes that stand still for a while: one, a family of them, or one that runs a part of the time only."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import psutil

PERIOD_S: Final = 0.05


@contextmanager
def stopped(family: Callable[[], Iterable[psutil.Process]]) -> Iterator[int]:
    """All of them are stopped for as long as the context is open, those too that were started while others were being
    stopped. Yields how many there were. What ended meanwhile is nobody's concern."""
    found: dict[int, psutil.Process] = {}
    try:
        while new := [process for process in family() if process.pid not in found]:
            for process in new:
                found[process.pid] = process
                _send(process, signal.SIGSTOP)
        yield len(found)
    finally:
        for process in found.values():
            _send(process, signal.SIGCONT)


async def run_part_time(process: psutil.Process, share: float, seconds: float) -> None:
    """Lets it run for this share of every period, where the kernel cannot be asked to."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    try:
        while loop.time() < end_s:
            _send(process, signal.SIGSTOP)
            await asyncio.sleep(PERIOD_S * (1 - share))
            _send(process, signal.SIGCONT)
            await asyncio.sleep(PERIOD_S * share)
    finally:
        _send(process, signal.SIGCONT)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
