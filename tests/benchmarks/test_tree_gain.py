"""Tests of the possible gain of a step that verifies a whole hint tree: counted on real engines, priced by measured
step times."""

from __future__ import annotations

import pytest

from benchmarks.speculation.tree_gain import PATH, TREE, Generated, generate, sampling_of, steps_of, summarize
from command_line.tune.times import StepTimes
from tests import models
from tests.engine.sequences import text
from tests.exactness.cases import LARGE_PROMPTS
from tests.exactness.heads import WIDTH, head_engine
from tests.exactness.in_process import LARGE, engine


def test_a_draft_that_is_never_wrong_gives_all_of_its_path_and_one_token_more() -> None:
    engine = models.engine("llama")
    said = generate(engine, text(12, 1, engine.vocab_size), sampling_of(0.0, 0, 30))
    assert set(steps_of(engine, said, 3, 0)) == {(4, 4)}
    engine.allocator.check_integrity([])


def test_a_draft_that_knows_the_seed_of_a_sampled_text_is_never_wrong_either() -> None:
    engine = models.engine("llama")
    said = generate(engine, text(12, 1, engine.vocab_size), sampling_of(1.0, 7, 30))
    other = generate(engine, text(12, 1, engine.vocab_size), sampling_of(1.0, 8, 30))
    assert said.output != other.output
    assert set(steps_of(engine, said, 3, 0)) == {(4, 4)}


def test_a_tree_holds_what_its_rows_are_worth_at_the_most() -> None:
    engine, other = models.engine("llama"), models.engine("llama", "float32", 1)
    said = generate(engine, text(12, 1, engine.vocab_size), sampling_of(0.0, 0, 60))
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
    assert summary[TREE]["over_path"] == pytest.approx(1.0)
    assert summary[TREE]["over_path_free_rows"] == {"3": pytest.approx(1.0), "7": pytest.approx(1.5)}


def test_what_stood_earlier_in_the_text_is_a_branch_that_costs_its_rows() -> None:
    other = models.engine("llama", "float32", 1)
    prompt = text(12, 1, other.vocab_size)
    said = Generated(prompt, [*prompt, *prompt], sampling_of(0.0, 0, 24))
    for has_lookup in (False, True):
        steps = steps_of(other, said, 4, 0, has_lookup=has_lookup)
        assert all(5 <= rows <= (9 if has_lookup else 5) for rows, _ in steps)
        assert (max(tokens for _, tokens in steps) == 5) is has_lookup


def test_a_head_drafts_behind_the_features_of_its_target() -> None:
    target = engine(LARGE, "tree gain")
    head = head_engine(target)
    said = generate(target, list(LARGE_PROMPTS[2]), sampling_of(0.0, 0, 30))
    assert len(said.features) == 2 * WIDTH * (len(said.prompt) + len(said.output) - 1)
    steps = steps_of(head, said, 3, 2)
    assert sum(tokens for _, tokens in steps) >= 30 - 4, "the text was gone through"
    head.allocator.check_integrity([])
