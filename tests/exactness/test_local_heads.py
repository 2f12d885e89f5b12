"""I2 with a draft head beside the target: alone, or where a draft worker is late, lost or hostile, it changes no text
and no distribution."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from outrider.engine.sampling.randomness import mix
from target_worker.scheduling.head_turns import DraftsLocally
from tests.exactness.cases import LARGE_CASES, LARGE_PROMPTS, SMALL_CASES, SMALL_PROMPT, large_params, small_params
from tests.exactness.drafts import make_draft
from tests.exactness.finite_language import LARGE_LANGUAGE, SMALL_LANGUAGE
from tests.exactness.in_process import LARGE, SMALL, Bridge, Manner, Request, Result, TinyModel, engine
from tests.exactness.local_heads import LOCAL_HEADS, make_local_head
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


def head_of(kind: str, tiny: TinyModel, right: Mapping[str, Sequence[int]], luck: int) -> DraftsLocally:
    return make_local_head(kind, engine(tiny, f"beside {kind}"), right, luck)


def bridge_of(
    kind: str,
    tiny: TinyModel,
    right: Mapping[str, Sequence[int]],
    luck: int,
    draft: str = "none",
    num_blocks: int | None = None,
) -> Bridge:
    """A target with a head of its own, and perhaps a draft worker."""
    return Bridge(
        tiny,
        make_draft(draft, tiny, luck),
        luck,
        Manner(on_time=0.1, unrest=0.02),
        num_blocks,
        role=f"beside {kind}",
        local_head=head_of(kind, tiny, right, luck),
    )


def run_texts(case: str, mode: str, kind: str, draft: str, *, are_moved: bool = False) -> list[Result]:
    """One session of each prompt, all of them at once."""
    params, luck = large_params(case, mode), luck_of(case, mode, kind, draft)
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
        )
        for prompt, text in zip(LARGE_PROMPTS, texts, strict=True)
    ]
    right = {request.session_id: [*request.prompt, *request.right_text] for request in requests}
    return bridge_of(kind, LARGE, right, luck, draft).run(requests)


def num_accepted(results: Sequence[Result]) -> int:
    return sum(result.ended.stats.num_accepted_head_tokens for result in results if result.ended is not None)


@pytest.mark.parametrize("kind", LOCAL_HEADS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", LARGE_CASES)
def test_text_is_that_of_the_reference(case: str, mode: str, kind: str) -> None:
    """Greedy and coupled, without a draft worker or beside a good or a hostile one."""
    draft = ("none", "good", "hostile")[luck_of(case, kind) % 3]
    for result, expected in zip(run_texts(case, mode, kind, draft), expected_outputs(case, mode), strict=True):
        check_same(result, expected)


@pytest.mark.parametrize("kind", LOCAL_HEADS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["none", "everything", "grammar"])
def test_a_session_that_moved_follows_it_from_where_it_was(case: str, mode: str, kind: str) -> None:
    results = run_texts(case, mode, kind, "none", are_moved=True)
    for result, expected in zip(results, expected_outputs(case, mode), strict=True):
        check_same(result, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_head_that_is_right_mostly_saves_steps(mode: str) -> None:
    """Otherwise the tests above would show little."""
    results = run_texts("ignore-eos", mode, "guessing", "none")
    for result in results:
        assert len(result.steps) < len(result.token_ids) / 1.5
    assert num_accepted(results) > sum(len(result.token_ids) for result in results) / 3


@pytest.mark.parametrize("kind", LOCAL_HEADS)
@pytest.mark.parametrize("mode", MODES)
def test_little_kv_changes_nothing(mode: str, kind: str) -> None:
    requests = requests_of(mode, "none")
    texts = [each.token_ids for each in Bridge(LARGE, None, 1, Manner()).run(requests)]
    right = {each.session_id: [*each.prompt, *text] for each, text in zip(requests, texts, strict=True)}
    plenty = bridge_of(kind, LARGE, right, 1).run(requests)
    bridge = bridge_of(kind, LARGE, right, 1, num_blocks=JUST_ENOUGH)
    little = bridge.run(requests)
    assert bridge._target.scheduler.num_preemptions >= 5
    assert [heard(each) for each in little] == [heard(each) for each in plenty]
    assert [each.token_ids for each in little] == texts


@pytest.mark.parametrize("kind", LOCAL_HEADS)
@pytest.mark.parametrize("case", SMALL_CASES)
def test_samples_follow_the_reference(case: str, kind: str) -> None:
    """I2, rejection: the joint distribution of whole outputs, under one of both rules."""
    params, luck = small_params(case), luck_of(case, kind)
    language, rule = language_of(case, SMALL_LANGUAGE), ("block", "token")[luck % 2]
    drawn, requests = Drawn(), []
    for index in range(NUM_SESSIONS):
        requests.append(
            Request(
                f"s{index}",
                SMALL_PROMPT,
                params,
                seed=mix(luck ^ index),
                rule=rule,
                grammar=None if language is None else language.grammar,
            )
        )
    rng = random.Random(luck)
    right = {each.session_id: [*SMALL_PROMPT, *rng.choices(range(SMALL.vocab_size), k=4)] for each in requests}
    draft = ("none", "good")[luck // 2 % 2]
    for result in bridge_of(kind, SMALL, right, luck, draft).run(requests):
        assert result.ended is not None
        drawn.counts[tuple(result.token_ids), result.ending] += 1
        drawn.verified += result.ended.stats.num_head_tokens
        drawn.accepted += result.ended.stats.num_accepted_head_tokens
    if params.max_tokens > 1:
        assert drawn.verified >= 20, "the hints were hardly used: this shows nothing"
    check_distribution(drawn, params, language)
