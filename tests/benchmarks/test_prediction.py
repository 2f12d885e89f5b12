"""Edits of the benchmark `prediction`: as many as it says, of every kind, the same for the same seed."""

from __future__ import annotations

import difflib
import random

import pytest

from benchmarks.sources.prediction import edited

LINES = [f"    line_{number} = {number}" for number in range(100)]


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_the_share_of_lines_is_edited(share: float) -> None:
    after = edited("\n".join(LINES), share, random.Random(1)).split("\n")
    changes = [each for each in difflib.ndiff(LINES, after) if each[0] in "+-"]
    num_edits = round(share * len(LINES))
    assert num_edits <= len(changes) <= 2 * num_edits
    assert after[-1] == LINES[-1]


def test_a_text_of_two_lines_is_edited_too() -> None:
    assert edited("a\nb", 0.05, random.Random(1)) != "a\nb"


def test_the_same_seed_gives_the_same_edits() -> None:
    text = "\n".join(LINES)
    assert edited(text, 0.05, random.Random(3)) == edited(text, 0.05, random.Random(3))
    assert edited(text, 0.05, random.Random(3)) != edited(text, 0.05, random.Random(4))
