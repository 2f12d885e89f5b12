"""A draft whose context ends within the text: hints up to its limit, none after, and the text is the reference's."""

from __future__ import annotations

import pytest

from outrider.sampling_params import SamplingParams
from tests.exactness.cases import LARGE_PROMPTS
from tests.exactness.in_process import LARGE, Bridge, Manner, ModelDraft, Request, Result, reference
from tests.exactness.test_every_parameter import check_same, luck_of

NUM_OUTPUT_TOKENS = 40


@pytest.mark.parametrize("is_head", [False, True], ids=["model", "head"])
@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_it_hints_up_to_its_limit_and_changes_nothing(mode: str, *, is_head: bool) -> None:
    prompt = LARGE_PROMPTS[0]
    limit = len(prompt) + NUM_OUTPUT_TOKENS // 2
    temperature, seed = (0.0, None) if mode == "greedy" else (0.9, 7)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    decode = reference(LARGE).greedy if mode == "greedy" else reference(LARGE).coupled
    expected = decode(prompt, params, None)
    luck = luck_of("short draft", mode, is_head)
    draft = ModelDraft(LARGE, luck, is_head=is_head, max_model_len=limit)
    (result,) = Bridge(LARGE, draft, luck, Manner(on_time=1.0)).run([Request("a", prompt, params, seed or luck)])
    check_same(result, expected)
    before, after = hints_by_limit(result, limit - len(prompt))
    assert after == 0
    assert before > 0


def test_a_session_beyond_the_limit_costs_another_no_hints() -> None:
    """In vLLM one long session takes the hints of all in its batch (its issue 58080)."""
    short, long = sorted(LARGE_PROMPTS, key=len)[0], sorted(LARGE_PROMPTS, key=len)[-1]
    limit = len(short) + NUM_OUTPUT_TOKENS + 2
    assert limit < len(long) + NUM_OUTPUT_TOKENS
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    luck = luck_of("beside a long one")
    given = [*long][: limit - NUM_OUTPUT_TOKENS // 4] if len(long) >= limit else [*long]
    requests = [Request("short", short, params, luck), Request("long", tuple(given), params, luck)]
    results = Bridge(LARGE, ModelDraft(LARGE, luck, max_model_len=limit), luck, Manner(on_time=1.0)).run(requests)
    for result, request in zip(results, requests, strict=True):
        check_same(result, reference(LARGE).greedy(request.prompt, params, None))
    _, after = hints_by_limit(results[0], NUM_OUTPUT_TOKENS * 3 // 4)
    assert after > 0, "the short one has hints to its end"


def hints_by_limit(result: Result, num_tokens: int) -> tuple[int, int]:
    """Hints verified in steps that began before the output had so many tokens, and in later ones."""
    before = after = length = 0
    for step in result.steps:
        if length < num_tokens:
            before += step.num_draft_tokens
        else:
            after += step.num_draft_tokens
        length += len(step.token_ids)
    assert length >= num_tokens
    return before, after
