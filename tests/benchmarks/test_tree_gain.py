"""Tests of the possible gain of a step that verifies a whole hint tree: counted on real engines, priced by measured
step times."""

from __future__ import annotations

import pytest

from benchmarks.speculation.tree_gain import PATH, TREE, generate, steps_of, summarize
from command_line.tune.times import StepTimes
from tests import models
from tests.engine.sequences import text


def test_a_draft_that_is_never_wrong_gives_all_of_its_path_and_one_token_more() -> None:
    engine = models.engine("llama")
    said = generate(engine, text(12, 1, engine.vocab_size), 30)
    assert set(steps_of(engine, said, 3, 0)) == {(4, 4)}
    engine.allocator.check_integrity([])


def test_a_tree_holds_what_its_rows_are_worth_at_the_most() -> None:
    engine, other = models.engine("llama"), models.engine("llama", "float32", 1)
    said = generate(engine, text(12, 1, engine.vocab_size), 60)
    for num_alternatives in (0, 4):
        steps = steps_of(other, said, 6, num_alternatives)
        assert all(7 <= rows <= 8 and 1 <= tokens <= rows for rows, tokens in steps)
        assert sum(tokens for _, tokens in steps) >= 60 - 2 * 7, "the text was gone through"


def test_trees_are_judged_by_tokens_for_time() -> None:
    times = StepTimes.measured([(1, 10.0), (4, 10.0), (8, 20.0)])
    steps = {PATH: {3: [(4, 2), (4, 4)], 7: [(8, 4)]}, TREE: {3: [(4, 3)], 7: [(8, 6)]}}
    summary = summarize(steps, times)
    assert summary[PATH]["best"] == 3
    assert summary[PATH]["speedup"] == pytest.approx(3.0)
    assert summary[TREE]["by_num_hints"]["7"]["speedup"] == pytest.approx(3.0)
    assert summary["tree_over_path"] == pytest.approx(1.0)
