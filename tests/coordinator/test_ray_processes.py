"""Processes of Ray are known by their names, and missed when they end, whoever reaps them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.hosting import ray_serve
from coordinator.hosting.ray_processes import NAMES, RayProcesses
from tests.e2e.system import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they are watched on Linux alone")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Some of this one's children, called as Ray's are."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    for name in NAMES:
        (tmp_path / name).symlink_to(sleep)
    started = {name: subprocess.Popen([str(tmp_path / name), "60"]) for name in NAMES}
    try:
        for name, process in started.items():  # until then it has our name
            comm = Path(f"/proc/{process.pid}/comm")
            eventually(comm.read_text, f"{name}\n".__eq__, f"{name} runs")
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", NAMES)
def test_one_that_ends_is_missed(name: str, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    with closing(RayProcesses.of_this_process()) as watched:
        assert watched.lost() is None
        processes[name].kill()
        eventually(watched.lost, lambda found: found == name, f"{name} is missed")
        processes[name].wait()
        assert watched.lost() == name


def test_a_coordinator_whose_ray_is_lost_waits_no_longer(
    processes: dict[str, subprocess.Popen[bytes]],
) -> None:
    processes["raylet"].kill()
    with pytest.raises(ray_serve.RayLost, match="raylet"):
        ray_serve._wait(threading.Event())


def test_a_coordinator_that_is_to_stop_blames_nobody(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    stop = threading.Event()
    stop.set()
    ray_serve._wait(stop)


def test_one_that_ended_before_it_could_be_watched_is_missed(
    processes: dict[str, subprocess.Popen[bytes]],
) -> None:
    pids = {name: process.pid for name, process in processes.items()}
    processes["raylet"].kill()
    processes["raylet"].wait()  # nothing is left of it, not even a zombie
    with closing(RayProcesses(pids)) as watched:
        assert watched.lost() == "raylet"


def test_where_there_are_none_none_is_missed() -> None:
    with closing(RayProcesses({})) as watched:
        assert watched.lost() is None
