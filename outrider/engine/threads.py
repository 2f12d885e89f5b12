"""Threads of steps, and their cores."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Final

SPIN_COUNT: Final = 1000
"""Turns, some microseconds, that an OpenMP thread waits for its next part before it sleeps. By default it waits for
milliseconds, in which a draft worker on its core cannot run."""


def cores_of(words: str | None) -> list[int]:
    """The cores that `--cpu-affinity` names, in its order. Raises ValueError."""
    return [int(core) for core in words.split(",")] if words else []


def bind_threads(cores: Sequence[int]) -> None:
    """Gives each thread of a step a core of its own, in this order, and makes it sleep soon when it has nothing to do.

    Only before torch is loaded. What the environment says about OpenMP's threads stays as it is.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    if cores and not {"OMP_PROC_BIND", "OMP_PLACES"} & os.environ.keys():
        os.environ.setdefault("GOMP_CPU_AFFINITY", " ".join(map(str, cores)))


def keep_off(cores: Sequence[int]) -> None:
    """Restricts all threads that there are to other cores, and with them all that they start, but for a step's own,
    which are bound. Where a system cannot do that, nothing happens."""
    if sys.platform != "linux":
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            if left := os.sched_getaffinity(int(thread)) - set(cores):
                os.sched_setaffinity(int(thread), left)


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Runs what is within with so many of torch's threads; None leaves them as they are."""
    if count is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
