"""Watch on the processes of Ray that a coordinator needs.

Without its raylet nothing that dies is replaced, without notice: replicas serve on as orphans until the last one has
gone. Without its GCS all of Ray ends by itself after a minute. So a coordinator that has lost either ends at once, and
its supervisor starts a whole one; clients go on at another meanwhile.

Linux only: elsewhere none is found, and none is missed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping
from typing import Final, Self

from outrider.local.tether import descendants

NAMES: Final = ("gcs_server", "raylet")
KILL_S: Final = 3.0


class RayProcesses:
    """Watches processes by descriptors, so that a reused pid is never taken for one of them."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """`pids`: process ids by name; the processes stay ours to reap."""
        self._descriptors: dict[int, str] = {}
        self._gone: str | None = None
        for name, pid in pids.items():
            try:
                self._descriptors[os.pidfd_open(pid)] = name
            except ProcessLookupError:  # it has ended since it was found
                self._gone = name

    @classmethod
    def of_this_process(cls) -> Self:
        """Watches the processes that Ray has started below this one."""
        return cls(_children(os.getpid()))

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def lost(self) -> str | None:
        """The name of a process that has ended, or None."""
        if self._gone is not None or not self._descriptors:
            return self._gone
        ended, _, _ = select.select(list(self._descriptors), [], [], 0)
        return self._descriptors[ended[0]] if ended else None


def kill_descendants() -> None:
    """Sends SIGKILL to every process below this one, for a few seconds at most, including those started meanwhile."""
    deadline_s = time.monotonic() + KILL_S
    while (found := descendants()) and time.monotonic() < deadline_s:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _children(parent: int) -> dict[str, int]:
    """Pids by name of this process' children that are Ray's; empty without /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                # A process may vanish between the listing and the look.
                with contextlib.suppress(OSError, IndexError), open(f"/proc/{entry}/stat", "rb") as file:
                    head, _, tail = file.read().rpartition(b")")
                    name = head.partition(b"(")[2].decode(errors="replace")
                    if name in NAMES and int(tail.split()[1]) == parent:
                        found[name] = int(entry)
    return found
