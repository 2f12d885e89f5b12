"""The reference itself: SplitMix64's published numbers, transformers' own `generate`, probabilities that add up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from outrider.engine.sampling.randomness import Purpose, key
from outrider.sampling_params import SamplingParams
from tests.exactness.cases import LARGE_PROMPTS, SMALL_CASES, SMALL_PROMPT, large_params, small_params
from tests.exactness.in_process import LARGE, SMALL, hugging_face_model, reference
from tests.exactness.reference import Ending, exponentials, split_mix

GENERATE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition-penalty-1.8": {"repetition_penalty": 1.8},
    "repetition-penalty-0.6": {"repetition_penalty": 0.6},
    "bad-words": {},
    "logit-bias": {},
    "allowed-token-ids": {},
}


def test_the_generator_is_split_mix() -> None:
    """Its first outputs for the seed 1234567, as its authors' C code gives them."""
    assert [split_mix(1234567, index) for index in range(1, 6)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_noise_starts_from_the_products_key() -> None:
    """The stream's seed is the one that workers speak of, derived anew."""
    seed, position = 0xDEAD_BEEF_0BAD_CAFE, 1234
    first = split_mix(key(seed, position, Purpose.GUMBEL), 1)
    assert exponentials(seed, position, 1) == [-math.log(((first >> 12) + 0.5) * 2.0**-52)]


def test_noise_is_exponential() -> None:
    values = torch.tensor(exponentials(3, 5, 20_000), dtype=torch.float64)
    assert float(values.min()) > 0.0
    assert float(values.mean()) == pytest.approx(1.0, abs=0.04)
    assert float((values > 1.0).double().mean()) == pytest.approx(math.exp(-1.0), abs=0.02)


@pytest.mark.parametrize("case", GENERATE_ARGUMENTS)
@pytest.mark.parametrize("prompt", LARGE_PROMPTS, ids=len)
def test_greedy_text_is_that_of_generate(case: str, prompt: tuple[int, ...]) -> None:
    """transformers' own loop, with a cache, for the parameters that it knows by these names."""
    params = large_params(case, "greedy")
    arguments = dict(GENERATE_ARGUMENTS[case])
    if params.bad_words:
        arguments["bad_words_ids"] = [list(word) for word in params.bad_words]
    if params.logit_bias:
        arguments["sequence_bias"] = [[[token_id], float(bias)] for token_id, bias in params.logit_bias]
    if params.allowed_token_ids:
        allowed = sorted(params.allowed_token_ids)
        arguments["prefix_allowed_tokens_fn"] = lambda batch, text: allowed
    generated = (
        hugging_face_model(LARGE)
        .generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=params.max_tokens,
            eos_token_id=list(LARGE.end_of_sequence_ids),
            pad_token_id=0,
            **arguments,
        )[0, len(prompt) :]
        .tolist()
    )
    output = reference(LARGE).greedy(prompt, params)
    end = [] if output.ending.stop_token_id is None else [output.ending.stop_token_id]
    assert generated == output.token_ids + end


@pytest.mark.parametrize("case", SMALL_CASES)
def test_probabilities_of_all_outputs_add_up(case: str) -> None:
    joint = reference(SMALL).joint(SMALL_PROMPT, small_params(case))
    assert sum(joint.values()) == pytest.approx(1.0, abs=1e-6)


def test_a_grammars_mask_is_honoured() -> None:
    """Here: even tokens, and after two of them nothing at all."""
    even = torch.arange(SMALL.vocab_size) % 2 == 0
    joint = reference(SMALL).joint(
        SMALL_PROMPT,
        SamplingParams(max_tokens=3, ignore_eos=True),
        lambda output: even & (len(output) < 2),
    )
    assert {len(token_ids) for token_ids, _ in joint} == {2}
    assert {ending for _, ending in joint} == {Ending(is_complete=True)}
    assert sum(joint.values()) == pytest.approx(1.0)
