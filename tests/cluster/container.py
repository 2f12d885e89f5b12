"""A container: a process in namespaces of its own, on a read-only root with what its image and its volumes have.

The root is made by a shell script, as the first thing that runs in the new namespaces. Everything that it mounts goes
with them. Only folders of the system, the image's and the volumes are there; nothing else of this machine is visible.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster.images import VENV, write_programs
from tests.cluster.network import CommandError, command, inside
from tests.cluster.pod_plan import ContainerPlan
from tests.images.stages import CONFIGURATION, SYSTEM

FILES: Final = Path("/run/outrider")
"""Folder of everything in a run: a file system in memory that only this process sees."""
ROOT: Final = FILES / "root"
ETC: Final = FILES / "etc"
PROGRAMS: Final = FILES / "venv-bin"
_OUTPUT_END_S: Final = 2.0
_DEVICES: Final = ("full", "null", "random", "urandom", "zero")
_USERS: Final = "root:x:0:0::/:/bin/sh\nredis:x:999:999::/data:/bin/sh\noutrider:x:10001:10001::/tmp:/bin/sh\n"
_GROUPS: Final = "root:x:0:\nredis:x:999:\noutrider:x:10001:\n"


@dataclass(frozen=True, slots=True)
class Place:
    """The surroundings of a container: its pod, and what is mounted."""

    pod: str
    shared_group: int
    volumes: Mapping[str, Path]
    hosts: Path
    memory_group: Path | None


def prepare() -> None:
    """Makes what all containers have in common.

    In /etc: of this machine what a base image has as well, and the images' users.
    """
    ROOT.mkdir()
    write_programs(PROGRAMS)
    ETC.mkdir()
    for name in (*CONFIGURATION, "alternatives"):
        path = Path("/etc") / name
        if path.is_dir():
            shutil.copytree(path, ETC / name, symlinks=True, ignore_dangling_symlinks=True)
        elif path.is_file():
            shutil.copy2(path, ETC / name)
    for name in ("shadow", "gshadow"):
        (ETC / name).unlink(missing_ok=True)
    for name, text in (("passwd", _USERS), ("group", _GROUPS), ("hosts", ""), ("nsswitch.conf", "hosts: files\n")):
        (ETC / name).write_text(text)


def root_script(plan: ContainerPlan, place: Place) -> str:
    """The script that makes the root and becomes the container's process. Pure."""
    root = str(ROOT)
    lines = ["set -e"]
    if place.memory_group is not None:
        lines.append(f"echo 0 > {place.memory_group}/cgroup.procs")
    lines += [
        f"echo {place.pod} > /proc/sys/kernel/hostname",
        f"mount -t tmpfs -o mode=755,size=8m root {root}",
        f"cd {root}",
    ]

    def bind(source: Path | str, path: str, *, is_read_only: bool = True) -> None:
        target = shlex.quote(f"{root}{path}")
        lines.append(f"mkdir -p {target}")
        lines.append(f"mount --bind {shlex.quote(str(source))} {target}")
        if is_read_only:
            lines.append(f"mount -o remount,bind,ro {target}")

    for name in SYSTEM:
        original = Path("/") / name
        if original.is_symlink():
            lines.append(f"ln -s {os.readlink(original)} {name}")
        elif original.is_dir():
            bind(original, f"/{name}")
    lines += [f"cp -a {ETC} etc", f"mount --bind {place.hosts} etc/hosts"]
    prefix = os.path.realpath(sys.base_prefix)
    if not Path(prefix).is_relative_to("/usr"):
        bind(prefix, prefix)
    for path, folder in plan.image.folders.items():
        bind(folder, path)
        if path == VENV:
            bind(PROGRAMS, f"{VENV}/bin")
    lines += ["mkdir -p proc sys dev tmp", "mount -t proc proc proc", "mount -t tmpfs -o mode=755,size=64k dev dev"]
    for name in _DEVICES:
        lines += [f"touch dev/{name}", f"mount --bind /dev/{name} dev/{name}"]
    lines += ["ln -s /proc/self/fd dev/fd", "mkdir dev/shm", "mount -t tmpfs -o mode=1777,size=64m shm dev/shm"]
    lines += _control_groups(plan, place)
    for mount in plan.mounts:
        bind(place.volumes[mount.volume], mount.path, is_read_only=mount.is_read_only)
    words = [*_as_user(plan, place), *plan.words]
    lines += [f"mount -o remount,ro {root}", f"exec chroot {root} {shlex.join(words)}"]
    return "\n".join(lines)


def _as_user(plan: ContainerPlan, place: Place) -> list[str]:
    """The words before a command that is to run with the container's user and environment."""
    environment = [f"{name}={value}" for name, value in plan.environment.items()]
    return [
        *("setpriv", f"--reuid={plan.user}", f"--regid={plan.group}", f"--groups={place.shared_group}"),
        *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--pdeathsig=KILL"),
        *("env", "-i", f"--chdir={plan.image.workdir}", *environment),
    ]


def _control_groups(plan: ContainerPlan, place: Place) -> list[str]:
    """Shows the container its limit of memory as version 2 of control groups does, whichever this machine has."""
    lines = [
        "mount --rbind /sys sys",
        "mount -o remount,bind,ro sys",
        "mount -t tmpfs -o size=64k groups sys/fs/cgroup",
    ]
    if place.memory_group is not None and plan.memory_bytes is not None:
        usage = next(
            path for name in ("memory.current", "memory.usage_in_bytes") if (path := place.memory_group / name).exists()
        )
        lines.append(f"echo {plan.memory_bytes} > sys/fs/cgroup/memory.max")
        for name, path in (("memory.current", usage), ("memory.stat", place.memory_group / "memory.stat")):
            lines += [f"touch sys/fs/cgroup/{name}", f"mount --bind {path} sys/fs/cgroup/{name}"]
    return [*lines, "mount -o remount,ro sys/fs/cgroup"]


class _Output(asyncio.Protocol):
    """Copies what a container prints to the end of its log."""

    def __init__(self, log: Path) -> None:
        self.has_ended = asyncio.Event()
        self._file = log.open("ab", buffering=0)

    def data_received(self, data: bytes) -> None:
        self._file.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._file.close()
        self.has_ended.set()


class Container:
    """A running container."""

    def __init__(self, process: asyncio.subprocess.Process, as_user: Sequence[str], output: _Output) -> None:
        self._process, self._as_user, self._output = process, as_user, output

    @classmethod
    async def start(cls, plan: ContainerPlan, place: Place, log: Path) -> Container:
        """Returns at once; what the container prints goes to the end of the log."""
        words = [
            *inside(place.pod),
            *("unshare", "--mount", "--propagation", "private", "--uts", "--ipc", "--pid", "--fork", "--kill-child"),
            *("sh", "-c", root_script(plan, place)),
        ]
        # A pipe that belongs to the container's user, who may open it as /proc/1/fd/2: containerd's are such.
        read_end, write_end = os.pipe()
        os.fchown(write_end, plan.user, plan.group)
        output = _Output(log)
        await asyncio.get_running_loop().connect_read_pipe(lambda: output, os.fdopen(read_end, "rb"))
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,  # Ctrl-C is for the node, which ends its pods in order
            )
        finally:
            os.close(write_end)
        return cls(process, _as_user(plan, place), output)

    async def execute(self, words: Sequence[str]) -> bool:
        """Runs a command in the container; returns whether it succeeded."""
        namespaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd")
        for child in self._children():
            with suppress(CommandError):
                await command("nsenter", f"--target={child}", *namespaces, *self._as_user, *words)
                return True
        return False

    async def wait(self) -> int:
        """Waits for its end; returns the exit status, or minus the signal that ended it."""
        status = await self._process.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_END_S):
                await self._output.has_ended.wait()
        return status

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        """Sends the container's first process a signal, as a runtime does. Nothing happens if it has ended."""
        with suppress(ProcessLookupError):
            children = self._children()
            for child in children:
                os.kill(child, number)
            if not children and number is signal.SIGKILL and self.is_running:  # it has hardly begun
                self._process.kill()

    def _children(self) -> list[int]:
        """The container's first process, once it has begun."""
        pid = self._process.pid
        with suppress(FileNotFoundError):
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []
