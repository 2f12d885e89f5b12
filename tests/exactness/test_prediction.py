"""I2 with what clients predict: right, edited, another request's output or nonsense, it changes no text and no
distribution."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.engine.sampling.randomness import mix
from tests.exactness.cases import LARGE_CASES, LARGE_PROMPTS, SMALL_CASES, SMALL_PROMPT, large_params, small_params
from tests.exactness.drafts import make_draft
from tests.exactness.finite_language import LARGE_LANGUAGE, SMALL_LANGUAGE
from tests.exactness.in_process import LARGE, SMALL, Bridge, Manner, Request, Result
from tests.exactness.test_every_parameter import (
    MODES,
    NUM_SESSIONS,
    Drawn,
    check_distribution,
    check_same,
    expected_outputs,
    language_of,
    luck_of,
)
from tests.exactness.test_preemption import JUST_ENOUGH, heard, requests_of

KINDS = ("right", "edited", "another", "nonsense", "long")


def predicted(kind: str, right: Sequence[int], another: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    nonsense = [rng.randrange(LARGE.vocab_size) for _ in range(500)]
    match kind:
        case "right":
            return tuple(right)
        case "edited":
            cut = rng.randrange(len(right) + 1)
            return (*right[:cut], *nonsense[: rng.randrange(4)], *right[cut + rng.randrange(4) :])
        case "another":
            return tuple(another)
        case "nonsense":
            return tuple(nonsense[:40])
        case _:  # many times longer than the context
            return (*nonsense, *right, *nonsense)


def run_texts(case: str, mode: str, kind: str, draft: str, *, are_moved: bool = False) -> list[Result]:
    """One session of each prompt, all of them at once."""
    params, luck = large_params(case, mode), luck_of(case, mode, kind, draft)
    rng = random.Random(luck)
    language = language_of(case, LARGE_LANGUAGE)
    texts = [output.token_ids for output in expected_outputs(case, mode)]
    requests = [
        Request(
            f"s{len(prompt)}",
            prompt,
            params,
            params.seed if params.seed is not None and mode == "coupled" else luck,
            right_text=tuple(text),
            num_given=len(text) // 2 if are_moved else 0,
            grammar=None if language is None else language.grammar,
            prediction=predicted(kind, text, another, rng),
        )
        for prompt, text, another in zip(LARGE_PROMPTS, texts, texts[1:] + texts[:1], strict=True)
    ]
    return Bridge(LARGE, make_draft(draft, LARGE, luck), luck, Manner(unrest=0.02)).run(requests)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", LARGE_CASES)
def test_text_is_that_of_the_reference(case: str, mode: str, kind: str) -> None:
    """Greedy and coupled, without a draft worker or beside a good or a hostile one."""
    draft = ("none", "good", "hostile")[luck_of(case, kind) % 3]
    for result, expected in zip(run_texts(case, mode, kind, draft), expected_outputs(case, mode), strict=True):
        check_same(result, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["none", "everything", "grammar"])
def test_a_session_that_moved_follows_it_from_where_it_was(case: str, mode: str) -> None:
    results = run_texts(case, mode, "right", "none", are_moved=True)
    for result, expected in zip(results, expected_outputs(case, mode), strict=True):
        check_same(result, expected)
        assert result.ended is not None
        stats = result.ended.stats
        if case == "none" and len(expected.token_ids) > 10:
            assert stats.num_accepted_prediction_tokens > len(expected.token_ids) / 4


@pytest.mark.parametrize("mode", MODES)
def test_a_right_prediction_is_accepted(mode: str) -> None:
    """Otherwise the tests above would show little."""
    for result in run_texts("ignore-eos", mode, "right", "none"):
        assert result.ended is not None
        assert result.ended.stats.num_accepted_prediction_tokens >= 0.9 * len(result.token_ids)
        assert len(result.steps) < len(result.token_ids) / 3


@pytest.mark.parametrize("mode", MODES)
def test_little_kv_changes_nothing(mode: str) -> None:
    plain = requests_of(mode, "none")
    rng, texts = random.Random(1), [each.token_ids for each in Bridge(LARGE, None, 1, Manner()).run(plain)]
    requests = [
        replace(each, prediction=predicted("edited", text, (), rng)) for each, text in zip(plain, texts, strict=True)
    ]
    plenty = Bridge(LARGE, None, 1, Manner()).run(requests)
    bridge = Bridge(LARGE, None, 1, Manner(), JUST_ENOUGH)
    little = bridge.run(requests)
    assert bridge._target.scheduler.num_preemptions >= 5
    assert [heard(each) for each in little] == [heard(each) for each in plenty]
    assert [each.token_ids for each in little] == texts


@pytest.mark.parametrize("case", SMALL_CASES)
def test_samples_follow_the_reference(case: str) -> None:
    """I2, rejection: the joint distribution of whole outputs, under one of both rules."""
    params, luck = small_params(case), luck_of(case, "prediction")
    language, rule = language_of(case, SMALL_LANGUAGE), ("block", "token")[luck % 2]
    drawn, rng = Drawn(), random.Random(luck)
    requests = [
        Request(
            f"s{index}",
            SMALL_PROMPT,
            params,
            seed=mix(luck ^ index),
            rule=rule,
            grammar=None if language is None else language.grammar,
            prediction=tuple(rng.choices(range(SMALL.vocab_size), k=rng.randrange(1, 7))),
        )
        for index in range(NUM_SESSIONS)
    ]
    for result in Bridge(SMALL, None, luck, Manner()).run(requests):
        assert result.ended is not None
        drawn.counts[tuple(result.token_ids), result.ending] += 1
        drawn.verified += result.ended.stats.num_prediction_tokens
        drawn.accepted += result.ended.stats.num_accepted_prediction_tokens
    if params.max_tokens > 1:
        assert drawn.verified > NUM_SESSIONS / 10, "hints were hardly used, so this shows nothing"
        assert drawn.accepted > 0
    check_distribution(drawn, params, language)
