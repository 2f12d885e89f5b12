"""Control groups of our own: less memory or less of a processor for one process, of either version of the interface.

They lie below the group that this process is in, so whatever bounds that bounds them, and nothing else of the machine
is touched. Making one takes the right to (root, or a delegated group), and with version 2 controllers that are on where
we are; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
PERIOD_US: Final = 100_000
GONE_S: Final = 5.0
"""For members of a group that have just been killed to leave it."""


_NEIGHBOUR: Final = """
import time
open({group!r}, "w").write("0")
taken = []
while sum(map(len, taken)) < {num_bytes}:
    taken.append(bytearray(b"x" * (1 << 18)))
time.sleep(600)
"""


class Controller(Enum):
    MEMORY = "memory"
    CPU = "cpu"


class GroupError(OSError):
    """A control group could not be made or set."""


@dataclass(frozen=True)
class Place:
    """A folder in which control groups can be made, and the version of their interface."""

    folder: Path
    is_version_2: bool


def find_place(controller: Controller, membership: str, root: Path = ROOT) -> Place | None:
    """The place below the control group that the lines of `membership` (/proc/self/cgroup) name for the controller."""
    for line in membership.splitlines():
        _, names, path = line.split(":", 2)
        if controller.value in names.split(","):
            # Mounted under the controllers' names, together or each for itself.
            for name in (names, controller.value):
                folder = root / name / path.lstrip("/")
                if folder.is_dir():
                    return Place(folder, is_version_2=False)
    for line in membership.splitlines():
        number, names, path = line.split(":", 2)
        if number == "0" and not names:
            for mount in (root, root / "unified"):
                folder = mount / path.lstrip("/")
                file = folder / "cgroup.subtree_control"
                if file.is_file() and controller.value in file.read_text().split():
                    return Place(folder, is_version_2=True)
    return None


@functools.cache
def why_not(controller: Controller) -> str | None:
    """The reason why no control group of this controller can be made, found out by making one; None if it can."""
    try:
        with group(controller) as made:
            made.limit_cpu(1.0) if controller is Controller.CPU else made.limit_memory(1 << 40)
    except OSError as error:
        return f"no control group of {controller.value} can be made here ({error})"
    return None


@contextmanager
def group(controller: Controller) -> Iterator[Group]:
    """A new group. Its members are where we are again when the context ends. Raises OSError."""
    place = find_place(controller, Path("/proc/self/cgroup").read_text())
    if place is None:
        raise GroupError(f"this process is in no group with {controller.value} that groups could be made below")
    made = Group(place.folder / f"outrider-chaos-{uuid.uuid4().hex[:12]}", place.is_version_2)
    try:
        yield made
    finally:
        made.remove()


class Group:
    """One group. It is made at once; `remove` is owed."""

    def __init__(self, folder: Path, is_version_2: bool) -> None:
        """Raises OSError."""
        self._folder = folder
        self._is_version_2 = is_version_2
        folder.mkdir()

    def take(self, pid: int) -> None:
        """The process with all of its threads, and what it starts from now on. Raises OSError."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    @contextmanager
    def crowded(self, num_bytes: int) -> Iterator[None]:
        """While the context is open another member takes so much memory; those that there are die for it first."""
        for pid in self.members():
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        code = _NEIGHBOUR.format(group=str(self._folder / "cgroup.procs"), num_bytes=num_bytes)
        neighbour = subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
        try:
            yield
        finally:
            neighbour.kill()
            neighbour.wait()

    def members(self) -> list[int]:
        return [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]

    def limit_memory(self, num_bytes: int) -> None:
        """Limits the memory of all members together. Memory that they hold in the group and cannot give back counts;
        memory that a process had before it joined stays with the group that it came from. Raises OSError."""
        self._write("memory.max" if self._is_version_2 else "memory.limit_in_bytes", num_bytes)

    def memory_bytes(self) -> int:
        """The memory that its members have allocated since they joined."""
        return int(self._read("memory.current" if self._is_version_2 else "memory.usage_in_bytes"))

    def peak_bytes(self) -> int | None:
        """The most memory that they had at once, with the file cache; None where the kernel does not count it."""
        with contextlib.suppress(FileNotFoundError):
            return int(self._read("memory.peak" if self._is_version_2 else "memory.max_usage_in_bytes"))
        return None

    def num_killed(self) -> int:
        """The number of processes that the kernel has ended for lack of memory."""
        told = self._read("memory.events" if self._is_version_2 else "memory.oom_control")
        counts = dict(line.split() for line in told.splitlines())
        return int(counts.get("oom_kill", 0))

    def limit_cpu(self, num_cores: float) -> None:
        """Limits the processor time of all members together to that of `num_cores`, in every 100 ms. Raises OSError."""
        quota_us = int(num_cores * PERIOD_US)
        if self._is_version_2:
            self._write("cpu.max", f"{quota_us} {PERIOD_US}")
        else:
            self._write("cpu.cfs_period_us", PERIOD_US)
            self._write("cpu.cfs_quota_us", quota_us)

    def remove(self) -> None:
        """Moves its members to the parent group and removes the group."""
        deadline_s = time.monotonic() + GONE_S
        while True:
            for pid in self.members():
                with contextlib.suppress(OSError):  # it has just ended
                    (self._folder.parent / "cgroup.procs").write_text(str(pid))
            try:
                self._folder.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.02)

    def _read(self, name: str) -> str:
        return (self._folder / name).read_text()

    def _write(self, name: str, value: object) -> None:
        (self._folder / name).write_text(str(value))
