"""Requests are drawn as the fleet file says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from command_line.simulator.fleet import Fleet, RequestKind, TargetPool
from command_line.simulator.traffic import draw

LONG = TargetPool(kv_tokens=200_000, max_model_len=100_000)


def test_a_request_depends_on_the_seed_and_its_number_alone() -> None:
    fleet = Fleet()
    first = draw(fleet, 7)
    again = draw(fleet.with_pools(9, 1), 7)
    assert (first.prompt, first.text.token_ids, first.text.ranks) == (
        *(again.prompt, again.text.token_ids),
        again.text.ranks,
    )
    assert draw(fleet, 8).prompt != first.prompt != draw(replace(fleet, seed=1), 7).prompt


@pytest.mark.parametrize("streaks", [0.0, 0.6])
def test_guesses_hold_as_often_and_in_as_long_runs_as_was_said(streaks: float) -> None:
    kind = RequestKind(
        output_tokens=(60_000, 60_000), acceptance=0.7, streaks=streaks, alternatives=0.5, certainty=0.25
    )
    text = draw(Fleet(target=LONG, kinds=(kind,)), 0).text
    right = [rank == 0 for rank in text.ranks]
    assert sum(right) / len(right) == pytest.approx(0.7, abs=0.02)
    after_right = [b for a, b in itertools.pairwise(right) if a]
    assert sum(after_right) / len(after_right) == pytest.approx(0.7 + 0.3 * streaks, abs=0.02)
    missed = [rank for rank in text.ranks if rank]
    assert sum(rank <= 4 for rank in missed) / len(missed) == pytest.approx(0.5, abs=0.02)
    usual = max(set(text.levels), key=text.levels.count)
    assert sum(level == usual for level in text.levels) / len(right) == pytest.approx(0.75, abs=0.02)


def test_kinds_come_by_their_shares_and_lengths_within_their_bounds() -> None:
    kinds = (
        RequestKind(share=3.0, prompt_tokens=(10, 20), output_tokens=(5, 6)),
        RequestKind(share=1.0, prompt_tokens=(100, 100), shared_prefix=40, output_tokens=(7, 7)),
    )
    requests = [draw(Fleet(kinds=kinds), number) for number in range(800)]
    long = [request for request in requests if len(request.prompt) == 100]
    assert len(long) == pytest.approx(200, abs=45)
    assert len({tuple(request.prompt[:40]) for request in long}) == 1
    assert len({tuple(request.prompt[40:]) for request in long}) == len(long)
    assert {len(request.prompt) for request in requests} - {100} == set(range(10, 21))
    assert {request.num_output_tokens for request in requests} == {5, 6, 7}


def test_recorded_agreement_is_replayed() -> None:
    fleet = Fleet(kinds=(RequestKind(output_tokens=(5, 5)),), texts=((0, 4, 1),))
    assert draw(fleet, 0).text.ranks == [0, 5, 1, 0, 5]
