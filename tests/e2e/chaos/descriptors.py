"""A process that can open nothing more: no file, no connection, of its own or of those who come to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def exhausted(pid: int) -> Iterator[int]:
    """Lowers the limit to what the process holds, for as long as the context is open. Yields how many that are; a
    number that it gives back it may use again. Raises psutil.Error where there is no such process."""
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    held = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    # The limit is not a count: it lies above the highest number that may be given out, and the lowest free is next.
    lowest_free = next(number for number in range(len(held) + 1) if number not in held)
    process.rlimit(psutil.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield len(held)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # it did not survive that
            process.rlimit(psutil.RLIMIT_NOFILE, before)
