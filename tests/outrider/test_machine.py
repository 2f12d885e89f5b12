"""Tests of machine detection: the order of the usable cores, and whose memory it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.engine.kv.kv_plan import GIB, MIB
from outrider.engine.loading import machine


@pytest.mark.parametrize(
    ("cpulists", "expected"),
    [
        ((), [0, 1, 2, 3, 6, 7]),
        (("0-7",), [0, 1, 2, 3, 6, 7]),
        (("0-1,6-7", "2-3,4"), [0, 1, 6, 7, 2, 3]),
        (("0,2,4,6", "1,3,5,7"), [0, 2, 6, 1, 3, 7]),
        (("4-7", "", "0-3"), [6, 7, 0, 1, 2, 3]),
        (("what", "0-1"), [2, 3, 6, 7, 0, 1]),
    ],
)
def test_cores_of_one_numa_node_are_side_by_side(
    cpulists: tuple[str, ...], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, cpulist in enumerate(cpulists):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpulist}\n")
    monkeypatch.setattr(machine, "_NODES", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 6, 7}, raising=False)
    assert machine.usable_cores() == expected


def test_a_containers_limit_is_its_memory_without_the_files_it_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    there = machine.machine_memory()
    assert not there.is_own, "no limit"
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{900 * MIB}\n")
    assert not machine.machine_memory().is_own
    (tmp_path / "memory.max").write_text(f"{1000 * MIB}\n")
    found = machine.machine_memory()
    assert (found.total, found.free, found.is_own) == (1000 * MIB, 100 * MIB, True)
    (tmp_path / "memory.stat").write_text(f"anon {200 * MIB}\nactive_file 5\ninactive_file {700 * MIB}\n")
    assert machine.machine_memory().free == machine.available_memory() == 800 * MIB
    (tmp_path / "memory.max").write_text(f"{1 << 60}\n")
    assert not machine.machine_memory().is_own, "the machine has less"
    assert there.total > GIB // 4
