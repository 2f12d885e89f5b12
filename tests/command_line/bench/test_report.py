"""Tests of the warnings and failures that `outrider bench` reports beside the figures."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from command_line.bench import report
from command_line.bench.cells import Cell, TurnResult, cells
from command_line.load.load import Level, Loop, Turn
from command_line.load.summary import RequestResult, Slo

OK = RequestResult(0, 0.0, 0.5, ttft_s=0.1, e2el_s=0.5, itl_s=(0.4,), num_output_tokens=5)
FAILED = RequestResult(0, 0.0, 0.1, cause="timeout", detail="[bold]no answer[/bold]")


def turn(*results: RequestResult, loop: Loop = Loop.CLOSED, cpu: float = 0.1, stall_ms: float = 1.0) -> TurnResult:
    return TurnResult(Turn(0, Level(loop, 4.0), 0), results or (OK,), cpu, stall_ms)


def cells_of(*turns: TurnResult) -> list[Cell]:
    return cells(["it"], turns, Slo())


@pytest.mark.parametrize(
    ("measured", "warning"),
    [
        (turn(cpu=0.95), "used 95% of a core"),
        (turn(stall_ms=120.0), "stood still for up to 120 ms"),
        (turn(replace(OK, late_s=0.08), loop=Loop.OPEN), "80 ms after their time"),
        (turn(OK, replace(OK, is_counted_by_usage=False)), "no usage with 1 answers"),
        (turn(OK, OK, OK), "only 2 prompts"),
    ],
)
def test_whatever_keeps_figures_from_meaning_what_they_seem_is_said(measured: TurnResult, warning: str) -> None:
    (said,) = report.warnings(cells_of(measured), 2)
    assert warning in said


def test_a_good_run_is_left_alone() -> None:
    assert report.warnings(cells_of(turn()), 2) == []
    assert report.failures(cells_of(turn())) == []
    assert report.warnings([], 2) == []


def test_failures_are_told_in_the_servers_words_to_the_letter() -> None:
    (line,) = report.failures(cells_of(turn(OK, FAILED)))
    assert line.plain == "it, concurrency 4: 1 × timeout [bold]no answer[/bold]"


def test_figures_that_nobody_has_take_no_row() -> None:
    console = Console(width=100, file=StringIO())
    with console.capture() as captured:
        console.print(report.table(cells_of(turn()), ["it"]))
    shown = captured.get()
    assert "TPOT, ms" in shown
    assert "goodput" not in shown
    assert "acceptance" not in shown
    assert "against" not in shown


def test_a_level_without_an_answer_is_a_gap_in_the_chart() -> None:
    good = turn()
    bad = TurnResult(Turn(0, Level(Loop.CLOSED, 1.0), 0), (FAILED,), 0.1, 1.0)
    throughput, tpot = report.panels(cells_of(good, bad), ["it"])
    assert list(throughput.labels) == ["1", "4"], "by load, whatever the order"
    assert [list(line.values) for line in throughput.lines] == [[None, 10.0]]
    assert [line.is_dashed for line in tpot.lines] == [False, True]
    assert [list(line.values) for line in tpot.lines] == [[None, pytest.approx(100.0)]] * 2
