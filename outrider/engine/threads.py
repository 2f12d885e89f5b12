"""Numbers of threads of steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

SPIN_COUNT: Final = 1000
"""Turns, some microseconds, that an OpenMP thread waits for its next part before it sleeps. By default it waits for
milliseconds, in which a draft worker on its core cannot run."""


def wait_briefly() -> None:
    """Makes OpenMP's threads sleep soon, unless the environment says how they wait. Only before torch is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Runs what is within with so many of torch's threads; None leaves them as they are."""
    import torch

    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
