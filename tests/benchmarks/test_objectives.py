"""The figures that `objectives` makes of slices: goodput by level, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

from benchmarks.serving import objectives
from benchmarks.serving.objectives import (
    FREE,
    PLAIN,
    draw,
    level_name,
    parse_arguments,
    plain_tpot_ms,
    shares_met,
    summarize,
)
from benchmarks.speculation.mixed import BAD, GOOD, Kind
from benchmarks.speculation.modes import ModeSlice
from tests.benchmarks.figures import slice_of, window_of
from tests.benchmarks.test_mixed import GREEDY, measured

KINDS: dict[tuple[int, ...], Kind] = {(1, 1): Kind(GOOD, [[1, 1]], GREEDY), (2, 2): Kind(BAD, [[2, 2]], GREEDY)}


def timed(tokens_per_s: float, *tpot_ms: float) -> ModeSlice:
    own = slice_of(replace(window_of(tokens_per_s), tpot_ms=list(tpot_ms)))
    recorded = measured(0.01, 0.02, 1)[0].recorded
    return ModeSlice(own.window, own.counters, recorded, 0.0, 1.0)


SLICES = {
    PLAIN: [timed(100.0, 10.0, 10.0), timed(100.0, 10.0, 12.0)],
    FREE: [timed(150.0, 5.0, 15.0), timed(150.0, 5.0, 15.0)],
    level_name(1.1): [timed(120.0, 7.0, 11.0), timed(130.0, 7.0, 12.0)],
}


def test_each_mode_is_judged_by_the_level() -> None:
    assert shares_met(SLICES[FREE], 11.0) == [0.5, 0.5]
    assert shares_met([timed(1.0)], 11.0) == []
    summary = summarize(SLICES, KINDS, [1.1], 10.0)
    (point,) = summary["curve"]
    assert point["tpot_ms"] == 11.0
    assert {name: each["median"] for name, each in point["goodput"].items()} == {
        "plain": 0.75, "free": 0.5, "honoured": 0.75,
    }  # fmt: skip
    assert point["honoured"]["tokens_per_s_over_plain"]["median"] == 1.25
    assert summary[FREE]["tpot_p99_over_plain"]["median"] == pytest.approx((1.5 + 1.25) / 2)


def test_a_kind_of_which_no_request_ended_has_no_time() -> None:
    idle = {name: [replace(timed(100.0), recorded=[])] for name in SLICES}
    summary = summarize(idle, KINDS, [1.1], 10.0)
    assert summary[PLAIN][GOOD] == {"tpot_ms_p50": None, "requests": 0}


@pytest.mark.parametrize("tpot_ms", [[], [100.0]])
async def test_requests_longer_than_a_slice_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tpot_ms: list[float]
) -> None:
    ran = replace(window_of(1.0), tpot_ms=tpot_ms)
    monkeypatch.setattr(objectives, "run_slice", AsyncMock(return_value=ran))
    asked = parse_arguments(["--seconds", "4", "--tokens", "150"])
    with pytest.raises(SystemExit, match=r"150 tokens take longer here than a slice of 4 s.*--tokens"):
        await plain_tpot_ms(MagicMock(), [[1]], asked)


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    result = {"batch": {"8": summarize(SLICES, KINDS, [1.1], 10.0)}, "load": {"target": "t"}}
    draw(result, tmp_path / "curve.svg")
    drawn = (tmp_path / "curve.svg").read_text()
    assert all(name in drawn for name in ("goodput", "tokens/s over plain", "p99 TPOT over plain", "honoured"))


def test_levels_are_of_one_number_of_streams() -> None:
    assert parse_arguments([]).batch == [8]
    with pytest.raises(SystemExit):
        parse_arguments(["--batch", "1", "8"])
