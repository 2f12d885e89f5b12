"""Control groups: found in both versions of the interface, and what is bounded is bounded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.chaos.cgroups import Controller, Group, find_place, group, why_not

GROWS = "input(); hoard = [bytearray(b'x' * (1 << 20)) for _ in range(256)]; print('survived', flush=True)"
BURNS = """
import time
input()
began = time.monotonic()
while time.monotonic() < began + 1.0:
    pass
print(time.process_time())
"""

needs_memory = pytest.mark.skipif(why_not(Controller.MEMORY) is not None, reason=f"{why_not(Controller.MEMORY)}")
needs_cpu = pytest.mark.skipif(why_not(Controller.CPU) is not None, reason=f"{why_not(Controller.CPU)}")


@contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that does it once it is told a line."""
    words = [sys.executable, "-c", code]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_version_1_is_found_below_its_controllers_own_mount(tmp_path: Path) -> None:
    folder = tmp_path / "cpu,cpuacct" / "system" / "one"
    folder.mkdir(parents=True)
    place = find_place(Controller.CPU, "5:memory:/\n4:cpu,cpuacct:/system/one\n0::/\n", tmp_path)
    assert place is not None
    assert (place.folder, place.is_version_2) == (folder, False)


def test_version_2_is_found_where_its_controller_is_handed_on(tmp_path: Path) -> None:
    folder = tmp_path / "user.slice"
    folder.mkdir()
    (folder / "cgroup.subtree_control").write_text("cpu memory\n")
    place = find_place(Controller.MEMORY, "0::/user.slice\n", tmp_path)
    assert place is not None
    assert (place.folder, place.is_version_2) == (folder, True)
    (folder / "cgroup.subtree_control").write_text("pids\n")
    assert find_place(Controller.MEMORY, "0::/user.slice\n", tmp_path) is None


def test_each_version_is_told_its_limits_in_its_own_words(tmp_path: Path) -> None:
    new, old = Group(tmp_path / "new", is_version_2=True), Group(tmp_path / "old", is_version_2=False)
    for made in (new, old):
        made.limit_cpu(0.1)
        made.limit_memory(1 << 20)
    assert (tmp_path / "new" / "cpu.max").read_text() == "10000 100000"
    assert (tmp_path / "new" / "memory.max").read_text() == "1048576"
    assert (tmp_path / "old" / "cpu.cfs_quota_us").read_text() == "10000"
    assert (tmp_path / "old" / "memory.limit_in_bytes").read_text() == "1048576"


@needs_memory
def test_a_process_that_outgrows_its_group_is_killed_and_no_other() -> None:
    with python(GROWS) as grows, python(GROWS) as other, group(Controller.MEMORY) as made:
        made.take(grows.pid)
        made.limit_memory(32 << 20)
        assert made.members() == [grows.pid]
        assert grows.communicate("\n", timeout=30)[0] == ""
        assert grows.returncode == -9
        assert made.num_killed() == 1
        assert "survived" in other.communicate("\n", timeout=30)[0]


@needs_memory
def test_a_process_is_killed_for_what_its_neighbour_takes() -> None:
    with python(GROWS) as stays, group(Controller.MEMORY) as made:
        made.take(stays.pid)
        made.limit_memory(16 << 20)
        with made.crowded(64 << 20):
            assert stays.wait(30) == -9
        assert made.num_killed() >= 1


@needs_cpu
def test_a_process_gets_the_share_of_a_core_that_its_group_has() -> None:
    with python(BURNS) as burns, group(Controller.CPU) as made:
        made.take(burns.pid)
        made.limit_cpu(0.1)
        burnt_s = float(burns.communicate("\n", timeout=30)[0])
    assert burnt_s < 0.6, "in a second, with what it took to start"


@needs_memory
def test_a_group_goes_and_its_members_stay() -> None:
    with python(GROWS) as stays:
        with group(Controller.MEMORY) as made:
            made.take(stays.pid)
            made.limit_memory(32 << 20)
        assert "survived" in stays.communicate("\n", timeout=30)[0]
        with pytest.raises(OSError, match=r"No such file"):
            made.members()
