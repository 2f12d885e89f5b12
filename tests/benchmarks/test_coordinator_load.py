"""How the cost of a coordinator's steps is computed, and that a small run of it works."""

from __future__ import annotations

import argparse
import json
import math

import pytest

from benchmarks.scaling.coordinator_load import Level, Sample, Used, levels_of, main, summary
from benchmarks.scaling.fake_fleet import value_of

PAGE = """
# TYPE outrider_live_workers gauge
outrider_live_workers{pool="target"} 21.0
outrider_live_workers{pool="draft"} 0.0
outrider_num_requests_running{engine="0",model_name="active"} 7.0
"""


def test_cost_is_per_step_of_any_stream() -> None:
    sample = Sample(10.0, 2000, Used(0.5, 0.1, 0.2, 0.3), 3 << 20, [1.0, 2.0, 9.0], 1000, {"429": 2})
    found = sample.figures(Level("http", 90, 10), empty_bytes=1 << 20)
    assert found["cpu_us_per_step"] == 250.0
    assert (found["steps_per_s"], found["coordinator_cores"], found["steps_per_chunk"]) == (200.0, 0.05, 2.0)
    assert found["memory_kib_per_stream"] == pytest.approx(2048 / 100)
    assert (found["delay_p50_ms"], found["delay_p99_ms"], found["failures"]) == (2.0, 9.0, 2)


def test_without_a_step_there_is_no_delay() -> None:
    found = Sample(10.0, 0, Used(0.5, 0, 0, 0), 0, [], 0, {}).figures(Level("grpc", 0, 5), empty_bytes=0)
    assert math.isnan(found["delay_p50_ms"])
    assert found["coordinator_cores"] == 0.05


def test_idle_streams_come_beside_active_ones_and_never_without_a_coordinator() -> None:
    asked = argparse.Namespace(protocol=["http", "target"], active=[1, 2], idle=[30], active_beside_idle=2)
    assert list(map(str, levels_of(asked))) == ["http, 1", "http, 2", "http, 2 and 30 idle", "target, 1", "target, 2"]


def test_two_checkouts_are_compared_round_by_round() -> None:
    rounds = {
        "ours": [[{"cpu_us_per_step": 100.0}], [{"cpu_us_per_step": 300.0}]],
        "against": [[{"cpu_us_per_step": 200.0}], [{"cpu_us_per_step": 400.0}]],
    }
    found = summary(rounds, 0)
    assert found["ours"]["cpu_us_per_step"]["median"] == 200.0
    assert found["cpu_ours_over_against"]["median"] == 0.625


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("outrider_live_workers", {"pool": "target"}, 21.0),
        ("outrider_num_requests_running", {"model_name": "active"}, 7.0),
        ("outrider_num_requests_running", {"model_name": "idle"}, None),
        ("outrider_live", {"pool": "target"}, None),
    ],
)
def test_a_gauge_is_read_by_its_labels(name: str, labels: dict[str, str], value: float | None) -> None:
    assert value_of(PAGE, name, labels) == value


@pytest.mark.thorough
def test_a_small_run_measures_every_protocol(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--active", "4", "--active-beside-idle", "4", "--idle", "6", "--seconds", "1", "--settle-s", "0"]
    words += ["--steps-per-s", "20", "--protocol", "http", "grpc", "target"]
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    main()
    levels = json.loads(capsys.readouterr().out)["levels"]
    assert set(levels) == {"http, 4", "http, 4 and 6 idle", "grpc, 4", "grpc, 4 and 6 idle", "target, 4"}
    for name, each in levels.items():
        assert each["ours"]["failures"]["median"] == 0, name
        assert each["ours"]["steps_per_s"]["median"] > 0, name
        assert each["ours"]["delay_p50_ms"]["median"] > 0, name
