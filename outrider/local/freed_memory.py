"""Returns memory that a process has freed to the system, where the C library would keep it.

glibc gives each thread an arena of its own, and returns what is free in one only from its end: after forty grammars
that were refused, or a flood of large texts, a process would stay larger by hundreds of megabytes although nothing
refers to them.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Final

GROWTH: Final = 1.1
"""How much larger than after the last time a process is before it is looked at again: what it uses cannot be returned,
and looking takes some 10 ms of a thread for 100 MiB."""
_PAGE_BYTES: Final = 4096
_STATM: Final = Path("/proc/self/statm")


def return_freed_memory() -> None:
    """Returns what is free now. Does nothing without glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class FreedMemory:
    """Returns freed memory whenever the process has grown. Not thread-safe."""

    def __init__(self) -> None:
        self._num_bytes = _resident_bytes()  # after the last time

    def return_some(self) -> bool:
        """Looks whether the process has grown; returns whether it has, and free memory was returned."""
        if _resident_bytes() <= GROWTH * self._num_bytes:
            return False
        return_freed_memory()
        self._num_bytes = _resident_bytes()
        return True


def _resident_bytes() -> int:
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):  # no Linux
        return 0
