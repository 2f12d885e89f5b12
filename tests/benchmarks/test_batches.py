"""How the figures of a batch beside other requests are compared."""

from __future__ import annotations

import math

from benchmarks.serving.batches import Turn, compare, known

NAN = math.nan


def a_round(gap_ms: float, batch_tokens_per_s: float) -> dict[str, Turn]:
    return {
        "alone": Turn(1.0, 10.0, 5.0, 8.0, 100.0),
        "beside": Turn(2.0, gap_ms, 5.0, 16.0, 50.0),
        "offline": Turn(1.0, 10.0, 5.0, 8.0, 400.0),
        "batch": Turn(NAN, NAN, NAN, NAN, batch_tokens_per_s),
    }


def test_ratios_are_of_one_round_each() -> None:
    found = compare([a_round(10.0, 380.0), a_round(11.0, 360.0), a_round(30.0, 100.0)])
    assert found["itl_p99_ms_beside_over_alone"]["median"] == 1.1
    assert found["ttft_p99_ms_beside_over_alone"]["median"] == 2.0
    assert found["batch_over_offline"]["median"] == 0.9


def test_what_a_turn_does_not_measure_counts_for_nothing() -> None:
    assert known([1.0, NAN]) == [1.0]
