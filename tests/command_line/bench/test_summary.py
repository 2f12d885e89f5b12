"""Percentiles, rates, goodput and spreads, to the last digit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from command_line.bench.cells import TurnResult, cells
from command_line.load.load import Level, Loop, Turn
from command_line.load.summary import (
    Percentiles,
    RequestResult,
    Slo,
    Spread,
    percentile,
    percentiles_ms,
    ratios,
    spread,
    summarize,
)

LEVEL = Level(Loop.CLOSED, 1.0)


def result(index: int = 0, **changes: Any) -> RequestResult:
    """Sent at 0 s; TTFT 100 ms, E2EL 500 ms, 5 tokens in three chunks: TPOT 100 ms."""
    usual: dict[str, Any] = {
        "sent_s": 0.0, "ended_s": 0.5, "ttft_s": 0.1, "e2el_s": 0.5, "itl_s": (0.1, 0.3), "num_output_tokens": 5,
    }  # fmt: skip
    return RequestResult(index, **{**usual, **changes})


def failed(cause: str = "HTTP 503", detail: str = "full") -> RequestResult:
    return result(ttft_s=None, e2el_s=None, itl_s=(), num_output_tokens=2, cause=cause, detail=detail)


class TestPercentiles:
    def test_they_are_linear_between_neighbours(self) -> None:
        assert [percentile([1, 2, 3, 4, 5], share) for share in (0, 0.5, 0.9, 1)] == pytest.approx([1, 3, 4.6, 5])

    @pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
    @pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 1.0])
    def test_they_are_numpys(self, count: int, share: float) -> None:
        values = sorted((number * 37) % 101 / 7 for number in range(count))
        assert percentile(values, share) == pytest.approx(float(np.quantile(values, share)))

    def test_one_value_is_all_of_them_and_none_is_none(self) -> None:
        assert percentiles_ms([0.25]) == Percentiles(250.0, 250.0, 250.0, 1)
        assert percentiles_ms([None, 0.25]) == Percentiles(250.0, 250.0, 250.0, 1)
        assert percentiles_ms([None]) is None
        assert percentiles_ms([]) is None


class TestTpot:
    def test_is_the_time_after_the_first_token_over_the_tokens_after_it(self) -> None:
        assert result().tpot_s == pytest.approx(0.1)

    @pytest.mark.parametrize(
        "changes",
        [
            {"num_output_tokens": 0, "ttft_s": None, "itl_s": ()},
            {"num_output_tokens": 1, "itl_s": ()},
            {"num_output_tokens": 5, "itl_s": ()},  # one chunk only
        ],
    )
    def test_is_not_known_where_nothing_follows(self, changes: dict[str, Any]) -> None:
        assert result(**changes).tpot_s is None


class TestGoodput:
    @pytest.mark.parametrize(
        ("slo", "is_met"),
        [
            (Slo(), True),
            (Slo(ttft_ms=100.0), True),  # exactly
            (Slo(ttft_ms=99.9), False),
            (Slo(tpot_ms=100.1), True),
            (Slo(tpot_ms=99.9), False),
            (Slo(ttft_ms=200.0, tpot_ms=99.9), False),
        ],
    )
    def test_an_answer_keeps_both_promises(self, slo: Slo, is_met: bool) -> None:
        assert slo.is_met(result()) is is_met

    def test_one_token_has_no_tpot_to_miss_and_no_token_no_ttft_to_meet(self) -> None:
        assert Slo(tpot_ms=1.0).is_met(result(num_output_tokens=1, itl_s=()))
        assert not Slo(ttft_ms=1e6).is_met(result(num_output_tokens=0, ttft_s=None, itl_s=()))
        assert not Slo(tpot_ms=1e6).is_met(failed())

    def test_failed_requests_count_against_it(self) -> None:
        summary = summarize([[result(), result(ttft_s=0.4), failed(), failed()]], Slo(ttft_ms=200.0))
        assert summary.goodput_share == 0.25
        assert summary.goodput_requests_per_s == 1 / 0.5
        assert summarize([[result()]], Slo()).goodput_share is None


class TestSummary:
    def test_rates_are_over_the_time_between_first_and_last(self) -> None:
        later = result(1, sent_s=1.5, ended_s=2.0)
        summary = summarize([[result(), later]], Slo())
        assert summary.wall_s == 2.0
        assert summary.output_tokens_per_s == 10 / 2.0
        assert summary.requests_per_s == 2 / 2.0
        assert summary.itl_ms is not None
        assert summary.itl_ms.num_samples == 4, "gaps, not requests"
        assert summary.ttft_ms == Percentiles(100.0, 100.0, 100.0, 2)

    def test_time_between_rounds_is_nobodys(self) -> None:
        other = result(sent_s=1000.0, ended_s=1001.5)
        assert summarize([[result()], [other]], Slo()).wall_s == 2.0

    def test_failed_requests_bring_neither_tokens_nor_times(self) -> None:
        summary = summarize([[result(), failed(), failed("timeout", "late"), failed("timeout", "later")]], Slo())
        assert (summary.num_ok, summary.num_failed, summary.num_output_tokens) == (1, 3, 5)
        assert {cause: (each.num_requests, each.example) for cause, each in summary.failures.items()} == {
            "timeout": (2, "late"), "HTTP 503": (1, "full"),
        }  # fmt: skip
        assert next(iter(summary.failures)) == "timeout", "the most frequent first"

    def test_nothing_at_all_has_no_figures(self) -> None:
        nothing: list[list[list[RequestResult]]] = [[], [[]], [[failed()]]]
        for rounds in nothing:
            summary = summarize(rounds, Slo(ttft_ms=1.0))
            assert summary.ttft_ms is summary.tpot_ms is summary.itl_ms is summary.e2el_ms is None
            assert summary.output_tokens_per_s == summary.requests_per_s == 0.0

    def test_acceptance_is_weighted_by_steps(self) -> None:
        many = result(mean_acceptance_length=3.0, num_spec_steps=9)
        few = result(mean_acceptance_length=1.0, num_spec_steps=1)
        assert summarize([[many, few, result()]], Slo()).mean_acceptance_length == pytest.approx(2.8)
        unknown = [result(mean_acceptance_length=value) for value in (1.0, 2.0)]
        assert summarize([unknown], Slo()).mean_acceptance_length == 1.5
        assert summarize([[result()]], Slo()).mean_acceptance_length is None

    def test_answers_without_usage_are_counted(self) -> None:
        assert summarize([[result(), result(is_counted_by_usage=False)]], Slo()).num_counted_by_chunks == 1


class TestRounds:
    def test_a_spread_is_of_what_is_known(self) -> None:
        assert spread([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
        assert spread([None]) is None

    def test_ratios_leave_out_rounds_in_which_somebody_did_nothing(self) -> None:
        assert ratios([2.0, 0.0, 9.0, 3.0], [1.0, 5.0, 0.0, 6.0]) == [2.0, 0.5]

    def turn(self, number: int, server: int, wall_s: float) -> TurnResult:
        return TurnResult(Turn(number, LEVEL, server), (result(ended_s=wall_s),), 0.1 * (number + 1), 7.0 - number)

    def test_servers_are_compared_round_by_round(self) -> None:
        # A machine that is half as fast in the second round and a server that is always twice as fast.
        walls = [(0, 0, 1.0), (0, 1, 0.5), (1, 1, 1.0), (1, 0, 2.0)]
        first, second = cells(["a", "b"], [self.turn(*each) for each in walls], Slo())
        assert (first.server, second.server) == ("a", "b")
        assert first.against_first is None
        assert second.against_first == Spread(2.0, 2.0, 2.0, 2)
        assert first.over_rounds["output_tokens_per_s"] == Spread(3.75, 2.5, 5.0, 2)
        tpot = first.over_rounds["tpot_ms_p50"]
        assert tpot is not None
        assert tpot.median == pytest.approx(100.0)
        assert tpot.num_rounds == 2
        assert first.client_cpu_share == pytest.approx(0.2)
        assert first.client_stall_ms_max == 7.0

    def test_a_round_that_was_cut_short_is_compared_with_nothing(self) -> None:
        taken = [self.turn(0, 0, 1.0), self.turn(0, 1, 0.5), self.turn(1, 1, 9.0)]
        _, second = cells(["a", "b"], taken, Slo())
        assert second.against_first == Spread(2.0, 2.0, 2.0, 1)
