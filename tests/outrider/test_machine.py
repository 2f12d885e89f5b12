"""Tests of machine detection: the order of the usable cores."""

from __future__ import annotations

from pathlib import Path

import pytest

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
