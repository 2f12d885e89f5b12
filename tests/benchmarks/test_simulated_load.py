"""How a prediction is compared with a real run; the comparison itself is a long test."""

from __future__ import annotations

import json

import pytest

from benchmarks.scaling.simulated_load import compare, disagreements, main, measured

REAL = {"tokens_per_s": 100.0, "ttft_p50_ms": 50.0, "tpot_p50_ms": 20.0, "ttft_p90_ms": 80.0}


def test_the_clients_figures_get_the_simulators_names() -> None:
    counted = {"num_tokens": 500, "seconds": 2.0, "ttft_ms": [10.0, 30.0, 20.0], "tpot_ms": [5.0]}
    assert measured(counted) == {
        "tokens_per_s": 250.0, "ttft_p50_ms": 20.0, "ttft_p90_ms": 30.0, "tpot_p50_ms": 5.0, "tpot_p90_ms": 5.0,
    }  # fmt: skip


def test_only_checked_figures_that_are_too_far_off_are_named() -> None:
    simulated = {"tokens_per_s": 109.0, "ttft_p50_ms": 44.0, "tpot_p50_ms": 20.0, "ttft_p90_ms": 8.0}
    assert disagreements(compare(REAL, simulated), 0.1) == ["ttft_p50_ms: predicted is 0.88 of measured"]
    assert not disagreements(compare(REAL, simulated), 0.2)


def test_a_prediction_of_nothing_agrees_with_nothing() -> None:
    assert disagreements(compare(REAL, {"tokens_per_s": 100.0}), 0.1) == ["tpot_p50_ms", "ttft_p50_ms"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_real_coordinator_serves_as_predicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks"])
    status = main()
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert set(json.loads(printed.out)["levels"]) == {"50", "200"}
