"""A long run of the simulator goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.__main__ import main, run_logged
from tests.simulation.seed_log import SeedLog, blocks_left


def test_what_was_run_is_left_out_and_the_rest_is_cut_into_blocks() -> None:
    done = [range(30, 40), range(10, 15), range(12, 20)]
    assert [*blocks_left(range(8, 45), done, 6)] == [
        *(range(8, 10), range(20, 26), range(26, 30)),
        range(40, 45),
    ]
    assert [*blocks_left(range(10, 20), done, 6)] == []
    assert [*blocks_left(range(5), [], 50)] == [range(5)]
    assert [*blocks_left(range(35), done, 50)] == [range(10), range(20, 30)]


def test_a_log_has_what_was_appended_though_its_last_line_was_cut_off(tmp_path: Path) -> None:
    log = SeedLog(tmp_path / "seeds.log", "abc")
    assert log.runs() == []
    log.append(range(5, 7), {"num_runs": 2}, {6: "I2: wrong"})
    with (tmp_path / "seeds.log").open("a") as file:
        file.write('{"first": 7, "num_')
    assert log.runs() == [range(5, 7)]
    log.append(range(7, 9), {"num_runs": 2}, {})
    assert log.runs() == [range(5, 7), range(7, 9)]


def test_a_run_with_a_log_goes_on_behind_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "seeds.log"
    assert main(["--first", "3", "--seeds", "2", "--processes", "1", "--log", str(path)]) == 0
    assert "2 runs in" in capsys.readouterr().out
    log = SeedLog(path, "abc")
    *_, summary = run_logged(3, 3, 1, log)
    assert summary.num_runs == 1
    assert log.runs() == [range(3, 5), range(5, 6)]
    assert main(["--first", "3", "--seeds", "3", "--processes", "1", "--log", str(path)]) == 0
    assert "0 runs in" in capsys.readouterr().out
