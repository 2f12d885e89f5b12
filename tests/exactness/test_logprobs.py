"""Log probabilities are those of one forward pass over the whole text, whatever the draft and the chunks were.

The text is taken as said and fed to transformers' model at once (teacher forcing); every number agrees to 1e-4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.sampling_params import SamplingParams
from target_worker.messages import PromptScored
from tests.exactness.cases import LARGE_CASES, LARGE_PROMPTS, Arguments
from tests.exactness.drafts import DRAFTS, make_draft
from tests.exactness.in_process import LARGE, Bridge, Manner, Request, Result, reference

TOLERANCE = 1e-4
MODES = ("greedy", "coupled", "rejection")


def params_of(mode: str, case: str, *, num_logprobs: int, are_processed: bool) -> SamplingParams:
    arguments: Arguments = {"max_tokens": 30}
    arguments |= LARGE_CASES[case]
    params = SamplingParams(**arguments, num_logprobs=num_logprobs, are_logprobs_processed=are_processed)
    if mode == "rejection":
        return params
    return dataclasses.replace(params, temperature=0.0) if mode == "greedy" else dataclasses.replace(params, seed=9)


def run(params: SamplingParams, draft: str, luck: int = 1) -> list[Result]:
    requests = [
        Request(f"s{index}", prompt, params, seed=params.seed if params.seed is not None else 77 + index)
        for index, prompt in enumerate(LARGE_PROMPTS)
    ]
    return Bridge(LARGE, make_draft(draft, LARGE, luck), luck, Manner(unrest=0.02)).run(requests)


def check(given: TokenLogprobs, logprobs: torch.Tensor, token_id: int, num_top: int) -> None:
    """# logprobs: [vocab_size]"""
    right = float(logprobs[token_id])
    assert given.logprob == pytest.approx(right, abs=TOLERANCE)
    surely_before, perhaps_before = logprobs > right + TOLERANCE, logprobs > right - TOLERANCE
    assert int(surely_before.sum()) + 1 <= given.rank <= max(int(perhaps_before.sum()), 1)
    assert len(given.top) == num_top
    assert len({top_id for top_id, _ in given.top}) == num_top
    best = logprobs.topk(num_top).values.tolist()
    assert [value for _, value in given.top] == pytest.approx(best, abs=TOLERANCE)
    for top_id, value in given.top:
        assert value == pytest.approx(float(logprobs[top_id]), abs=TOLERANCE)


def check_output(result: Result, prompt: Sequence[int], params: SamplingParams, *, num_logprobs: int) -> None:
    given = [each for step in result.steps for each in step.logprobs or []]
    assert len(given) == len(result.token_ids)
    model = reference(LARGE)
    logits = model.all_logits([*prompt, *result.token_ids])
    for index, (each, token_id) in enumerate(zip(given, result.token_ids, strict=True)):
        row = logits[len(prompt) + index - 1 :][:1]
        if params.are_logprobs_processed:
            row = model.scores(row, [[*prompt, *result.token_ids[:index]]], len(prompt), params)
        check(each, torch.log_softmax(row[0], dim=-1), token_id, num_logprobs)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("are_processed", [False, True], ids=["raw", "processed"])
@pytest.mark.parametrize("case", ["none", "top-k", "everything"])
def test_log_probabilities_are_those_of_the_text(case: str, are_processed: bool, mode: str, draft: str) -> None:
    num_logprobs = {"none": 0, "top-k": 20, "everything": 5}[case]
    params = params_of(mode, case, num_logprobs=num_logprobs, are_processed=are_processed)
    for result, prompt in zip(run(params, draft), LARGE_PROMPTS, strict=True):
        check_output(result, prompt, params, num_logprobs=num_logprobs)


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("are_processed", [False, True])
def test_log_probabilities_of_the_prompt_are_the_models_own(are_processed: bool, num_top: int) -> None:
    """In chunks, and every time: a prompt whose KV is known already is scored all the same."""
    params = dataclasses.replace(
        params_of("greedy", "everything", num_logprobs=1, are_processed=are_processed),
        num_prompt_logprobs=num_top,
    )
    requests = [
        Request(f"{copy}-{index}", prompt, params, seed=1)
        for copy in range(3)
        for index, prompt in enumerate(LARGE_PROMPTS)
    ]
    for request, result in zip(requests, Bridge(LARGE, None, 1, Manner()).run(requests), strict=True):
        logprobs = torch.log_softmax(reference(LARGE).all_logits(request.prompt), dim=-1)
        position = 1
        for action in result.other_actions:
            if isinstance(action, PromptScored):
                assert action.first_position == position
                for each in action.logprobs:
                    check(each, logprobs[position - 1], request.prompt[position], num_top)
                    position += 1
        assert position == len(request.prompt)


@pytest.mark.parametrize("mode", MODES)
def test_asking_for_log_probabilities_changes_no_text(mode: str) -> None:
    """Not even a sampled one: with the same seeds and no draft, the same numbers are drawn."""
    asked = params_of(mode, "everything", num_logprobs=20, are_processed=True)
    texts = [result.token_ids for result in run(asked, "none")]
    silent = dataclasses.replace(asked, num_logprobs=None)
    results = run(silent, "none")
    assert [result.token_ids for result in results] == texts
    assert all(step.logprobs is None for result in results for step in result.steps)


def test_what_was_ruled_out_has_no_probability() -> None:
    params = params_of("greedy", "allowed-token-ids", num_logprobs=20, are_processed=True)
    params = dataclasses.replace(params, allowed_token_ids=frozenset({2, 8}))
    for result in run(params, "self"):
        for step in result.steps:
            for each in step.logprobs or []:
                assert [value == -math.inf for _, value in each.top] == [False] * 2 + [True] * 18
