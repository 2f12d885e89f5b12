"""Counts and times of one request, and what the client sees of its tokens."""

from __future__ import annotations

import pytest

from coordinator.observability.statistics import RequestTimes, SpeculationCounts, times_to_json
from coordinator.output.text_output import TextOutput
from outrider.text.detokenizer import IncrementalDetokenizer, StopStringMatcher
from protos.outrider.v1 import common_pb2
from tests.coordinator.conftest import ClusterFactory

PLAIN = common_pb2.TOKEN_ORIGIN_PLAIN


def counts() -> SpeculationCounts:
    made = SpeculationCounts()
    for drafted, accepted in ((5, 5), (5, 0), (0, 0), (3, 2), (5, 2)):
        made.add_step(drafted, accepted)
    return made


def test_rates_and_histograms_follow_their_definitions() -> None:
    stats = counts().to_json(num_speculative_tokens=0, is_detailed=True)
    assert stats["num_steps"] == 5
    assert stats["num_spec_steps"] == 4
    assert stats["num_draft_tokens"] == 18
    assert stats["num_accepted_draft_tokens"] == 9
    assert stats["mean_acceptance_length"] == pytest.approx(1 + 9 / 4)
    assert stats["draft_acceptance_rate"] == pytest.approx(9 / 18)
    assert stats["acceptance_histogram"] == [1, 0, 2, 0, 0, 1]
    assert stats["acceptance_histogram_by_draft_length"] == {"3": [0, 0, 1], "5": [1, 0, 1, 0, 0, 1]}
    assert stats["num_spec_tokens"] == 5
    assert stats["per_step_drafted"] == [5, 5, 3, 5]
    assert stats["per_step_accepted"] == [5, 0, 2, 2]


def test_the_message_and_the_json_agree() -> None:
    message = counts().to_proto()
    assert list(message.acceptance_histogram) == [1, 0, 2, 0, 0, 1]
    assert list(message.draft_length_histogram) == [0, 0, 0, 1, 0, 3]
    assert (message.num_steps, message.num_spec_steps) == (5, 4)


def test_without_hints_means_are_those_of_plain_decoding() -> None:
    made = SpeculationCounts()
    made.add_step(0, 0)
    stats = made.to_json(num_speculative_tokens=0, is_detailed=False)
    assert stats["mean_acceptance_length"] == 1.0
    assert stats["draft_acceptance_rate"] == 0.0
    assert stats["acceptance_histogram"] == [0]
    assert "per_step_accepted" not in stats


@pytest.mark.parametrize(("num_speculative_tokens", "expected"), [(0, [0, 1, 1, 0]), (4, [0, 1, 1, 0, 0])])
def test_a_histogram_of_accepted_hints_has_an_entry_for_each_number(
    num_speculative_tokens: int, expected: list[int]
) -> None:
    made = SpeculationCounts()
    made.add_step(3, 1)
    made.add_step(2, 2)
    stats = made.to_json(num_speculative_tokens=num_speculative_tokens, is_detailed=False)
    assert stats["acceptance_histogram"] == expected
    assert len(expected) == stats["num_spec_tokens"] + 1


def test_times_are_milliseconds_from_arrival() -> None:
    times = RequestTimes(arrival_s=100.0)
    assert times.chunk(100.5) is None
    assert times.chunk(100.7) == pytest.approx(0.2)
    assert times.chunk(100.9) == pytest.approx(0.2)
    times.end_s = 101.0
    shown = times_to_json([(times, 9)])
    assert shown["time_to_first_token_ms"] == pytest.approx(500)
    assert shown["generation_time_ms"] == pytest.approx(1000)
    assert shown["mean_itl_ms"] == pytest.approx(200)
    assert shown["time_per_output_token_ms"] == pytest.approx(50)
    assert shown["tokens_per_second"] == pytest.approx(9)
    assert shown["queue_time_ms"] is None


def output(clusters: ClusterFactory, *stop: str) -> TextOutput:
    return TextOutput(IncrementalDetokenizer(clusters.tokenizer), StopStringMatcher(stop))


def test_tokens_behind_a_stop_string_are_dropped(clusters: ClusterFactory) -> None:
    token_ids = clusters.tokenizer.encode("abc STOP def")
    made = output(clusters, "STOP")
    visible = made.push(token_ids, [PLAIN] * len(token_ids))
    assert visible.text == "abc "
    assert made.stop_string == "STOP"
    assert len(visible.token_ids) == len(visible.origins) == len(visible.pieces) < len(token_ids)
    assert clusters.tokenizer.decode(made.token_ids) == "abc STOP"
    assert made.finish() == ""


def test_the_first_min_tokens_are_shown_whatever_they_spell(clusters: ClusterFactory) -> None:
    token_ids = clusters.tokenizer.encode("STOP a STOP b STOP")
    num_first = len(clusters.tokenizer.encode("STOP a ST"))
    for size in (1, 3, len(token_ids)):
        made = TextOutput(IncrementalDetokenizer(clusters.tokenizer), StopStringMatcher(["STOP"]), min_tokens=num_first)
        text = ""
        for start in range(0, len(token_ids), size):
            if made.stop_string is None:
                step = token_ids[start : start + size]
                text += made.push(step, [PLAIN] * len(step)).text
        # The second one began too early to count.
        assert text + made.finish() == "STOP a STOP b "
        assert made.stop_string == "STOP"


def test_an_end_before_min_tokens_matches_nothing(clusters: ClusterFactory) -> None:
    token_ids = clusters.tokenizer.encode("a STOP")
    made = TextOutput(IncrementalDetokenizer(clusters.tokenizer), StopStringMatcher(["STOP"]), min_tokens=100)
    assert made.push(token_ids, [PLAIN] * len(token_ids)).text + made.finish() == "a STOP"
    assert made.stop_string is None


def test_counts_of_texts_add_up_and_what_is_unknown_of_one_is_unknown_of_all() -> None:
    known, other = counts(), counts()
    for made in (known, other):
        made.add_end(common_pb2.SpeculationStats(num_hint_bytes=10, num_forced_tokens=1), is_complete=True)
    both = SpeculationCounts.merged([known, other])
    assert (both.num_steps, both.num_draft_tokens, both.num_hint_bytes, both.num_forced_tokens) == (
        10,
        36,
        20,
        2,
    )
    assert SpeculationCounts.merged([known, counts()]).num_hint_bytes is None
    partial = counts()
    partial.add_end(common_pb2.SpeculationStats(num_hint_bytes=10, num_stale_hints=4), is_complete=False)
    assert (partial.num_hint_bytes, partial.num_stale_hints) == (None, 4)


def test_times_of_texts_that_ran_side_by_side_are_not_added() -> None:
    first, second = RequestTimes(arrival_s=0.0), RequestTimes(arrival_s=0.0)
    for at in (1.0, 2.0, 3.0):
        first.chunk(at)
    for at in (1.5, 2.5):
        second.chunk(at)
    first.end_s, second.end_s = 3.0, 4.0
    shown = times_to_json([(first, 3), (second, 2)])
    assert shown["time_to_first_token_ms"] == pytest.approx(1000)
    assert shown["generation_time_ms"] == pytest.approx(4000)
    assert shown["mean_itl_ms"] == shown["time_per_output_token_ms"] == pytest.approx(1000)
    assert shown["tokens_per_second"] == pytest.approx(5 / 4)


def test_the_same_tokens_in_other_steps_are_the_same_text(clusters: ClusterFactory) -> None:
    token_ids = clusters.tokenizer.encode("naïve 中文 and STO, then STOP here")
    results = set()
    for size in (1, 2, 3, 5, len(token_ids)):
        made, text = output(clusters, "STOP", "zzz"), ""
        for start in range(0, len(token_ids), size):
            if made.stop_string is None:
                step = token_ids[start : start + size]
                text += made.push(step, [PLAIN] * len(step)).text
        results.add((text + made.finish(), tuple(made.token_ids)))
    assert len(results) == 1
    assert results.pop()[0] == "naïve 中文 and STO, then "


def test_held_back_text_comes_out_at_the_end(clusters: ClusterFactory) -> None:
    token_ids = clusters.tokenizer.encode("abc STO")
    made = output(clusters, "STOP")
    assert made.push(token_ids, [PLAIN] * len(token_ids)).text + made.finish() == "abc STO"
