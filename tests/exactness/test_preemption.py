"""I2, bit for bit: sessions that give their KV back again and again say what they say when there is plenty of it.

Real engines, and a real draft or a hostile one. Compared are texts, ends, and every log probability as a float.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from target_worker.messages import PromptScored
from tests.exactness.cases import LARGE_CASES, LARGE_PROMPTS
from tests.exactness.drafts import make_draft
from tests.exactness.finite_language import LARGE_LANGUAGE
from tests.exactness.in_process import LARGE, MAX_MODEL_LEN, Bridge, Manner, Request, Result
from tests.exactness.test_logprobs import params_of

BLOCK_SIZE = 8
JUST_ENOUGH = 1 + MAX_MODEL_LEN // BLOCK_SIZE  # for one session of the longest


def requests_of(mode: str, case: str) -> list[Request]:
    """Three of each prompt, with log probabilities of all there is."""
    params = params_of(mode, case, num_logprobs=5, are_processed=False)
    # Long texts: nothing may end them early.
    params = replace(params, num_prompt_logprobs=3, max_tokens=100, ignore_eos=True, stop_token_ids=frozenset())
    return [Request(f"{prefix}{len(prompt)}", prompt, params, seed=9) for prefix in "abc" for prompt in LARGE_PROMPTS]


def run(requests: list[Request], draft: str, num_blocks: int | None) -> tuple[list[Result], int]:
    """Results, and how often somebody was preempted."""
    bridge = Bridge(LARGE, make_draft(draft, LARGE, luck=1), 1, Manner(unrest=0.02), num_blocks)
    results = bridge.run(requests)
    num_preemptions = bridge._target.scheduler.num_preemptions
    assert bridge._target._metrics.num_preemptions._value.get() == num_preemptions
    assert num_preemptions == sum(each.ended.num_preemptions for each in results if each.ended is not None)
    return results, num_preemptions


def heard(result: Result) -> tuple[object, ...]:
    """All that must not depend on KV. Prompt tokens are scored once each, in order."""
    scored = [each for each in result.other_actions if isinstance(each, PromptScored)]
    position = 1
    for each in scored:
        assert each.first_position == position
        position += len(each.logprobs)
    return (
        result.token_ids,
        result.ending,
        [each for step in result.steps for each in step.logprobs or []],
        [logprobs for each in scored for logprobs in each.logprobs],
    )


@pytest.mark.parametrize("draft", ["none", "good", "hostile"])
@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_little_kv_changes_nothing(mode: str, draft: str) -> None:
    case = "everything" if draft == "good" else "none"
    assert case in LARGE_CASES
    plenty, num_preemptions = run(requests_of(mode, case), draft, None)
    assert num_preemptions == 0
    little, num_preemptions = run(requests_of(mode, case), draft, JUST_ENOUGH)
    assert num_preemptions >= 5
    assert [heard(each) for each in little] == [heard(each) for each in plenty]


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_a_grammar_goes_on_where_it_was(mode: str) -> None:
    requests = [
        replace(each, grammar=LARGE_LANGUAGE.grammar, sampling=replace(each.sampling, ignore_eos=False))
        for each in requests_of(mode, "none")
    ]
    plenty, _ = run(requests, "hostile", None)
    # Its sentences are short: others, which are not and came before them, take their KV away.
    others = [replace(each, session_id=f"o{each.session_id}") for each in requests_of(mode, "none")[:3]]
    little, _ = run([*others, *requests], "hostile", JUST_ENOUGH)
    assert sum(each.ended.num_preemptions for each in little[3:] if each.ended is not None) >= 2
    assert [heard(each) for each in little[3:]] == [heard(each) for each in plenty]
