"""Choices between sources of hints know the record of earlier steps, and nothing that was drawn (I4)."""

from __future__ import annotations

import itertools
import operator

import pytest

from outrider.hints.acceptance import BlockAcceptance
from target_worker.hints.choices import drawn_chances, new_presence, observe_presence


def expected(presence: BlockAcceptance, num_hints: int) -> float:
    return sum(itertools.accumulate(presence.chances(num_hints), operator.mul))


def test_a_draft_that_is_slow_promises_no_more_than_it_sends() -> None:
    presence = new_presence()
    assert expected(presence, 8) > 5.0
    for _ in range(100):  # one hint a step, and it is right
        observe_presence(presence, num_matched=1, num_verified=1, was_all=True)
    assert expected(presence, 8) == pytest.approx(1.0, abs=0.25)


def test_hints_that_were_not_judged_do_not_count() -> None:
    """They may be verified in a later step; whether they are there may follow from their values."""
    few, many = new_presence(), new_presence()
    observe_presence(few, num_matched=1, num_verified=3, was_all=True)
    observe_presence(many, num_matched=1, num_verified=8, was_all=False)
    assert few == many
    kept = new_presence()
    observe_presence(kept, num_matched=3, num_verified=3, was_all=False)  # there were more than the step verified
    assert kept.chances(8)[3] > 0.9


def test_what_is_known_before_drawn_hints_stays() -> None:
    assert drawn_chances([], [0.5] * 4) == [0.5] * 4
    assert drawn_chances([1.0, 1.0], [0.5] * 4) == [1.0, 1.0, 0.5, 0.5]
