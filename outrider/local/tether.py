"""Runs a command so that nothing it starts outlives it, or the process that asked for it.

python -I -S tether.py PARENT_PID GRACE_S COMMAND [ARGUMENT ...]

A tether stands between the supervisor and each process it starts, because some of these start a family of their own
(Ray does). It adopts orphaned descendants. When the command ends, a SIGTERM comes or the supervisor vanishes, it ends
the whole family before it exits itself: SIGTERM to the command first, SIGKILL to whatever is left GRACE_S seconds
later, or at once on SIGQUIT. Its exit status is the command's, 128 + n for a death by signal n.

It uses only the standard library's core and runs by itself, without site packages, in a few milliseconds. On systems
other than Linux a vanished supervisor is detected by polling and only direct descendants are reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from types import FrameType

POLL_S = 0.2  # interval of checks for a vanished parent, beside Linux' signal
REAP_S = 3.0  # how long to look for descendants after the command has ended
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def words(grace_s: float) -> list[str]:
    """The beginning of a command line that runs what follows it tethered to this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(grace_s)]


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _start(command: list[str]) -> int:
    """Forks and executes `command`, which dies with this process whatever happens to it. Returns its pid."""
    tether_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != tether_pid:
            os._exit(1)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def descendants() -> list[int]:
    """Pids of every process below this one, by /proc; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                # A process may vanish between the two reads.
                with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
                    children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    frontier = [os.getpid()]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _reap(pid: int) -> int | None:
    """Collects every child that has ended; returns the status of `pid` if it is among them."""
    status: int | None = None
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, raw = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                break
            if ended == pid:
                status = os.waitstatus_to_exitcode(raw)
    return status


def _kill_family() -> None:
    """Sends SIGKILL to every descendant until none is left; what forks meanwhile is found in the next round."""
    deadline = time.monotonic() + REAP_S
    while time.monotonic() < deadline:
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(0)
        if not descendants():
            return
        time.sleep(0.01)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def hold(parent_pid: int, grace_s: float, command: list[str]) -> int:
    """Runs `command` to its end or ours. Returns the exit status to leave with."""
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_read, False)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    received: set[int] = set()

    def remember(number: int, frame: FrameType | None) -> None:
        received.add(number)

    for number in STOP_SIGNALS:
        signal.signal(number, remember)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    pid = _start(command)
    kill_at: float | None = None
    status: int | None = None
    while status is None:
        if kill_at is None and (received or os.getppid() != parent_pid):
            kill_at = time.monotonic() + grace_s
            _signal(pid, signal.SIGTERM)
        if signal.SIGQUIT in received or (kill_at is not None and time.monotonic() >= kill_at):
            _signal(pid, signal.SIGKILL)
        select.select([wakeup_read], [], [], POLL_S)
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup_read, 512)
        status = _reap(pid)
    _kill_family()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(hold(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
