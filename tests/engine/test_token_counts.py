"""Counts that are kept while a text grows give the penalties that counting the whole text gives, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.engine.sampling.logit_context import LogitContext, TokenCounts
from outrider.engine.sampling.logit_processing import process
from outrider.sampling_params import SamplingParams
from tests.counting import CountingList
from tests.engine import one_by_one

VOCAB_SIZE = 60


def random_params(chance: random.Random) -> SamplingParams:
    penalty = [-2.0, -0.3, 0.0, 0.7, 2.0]
    return SamplingParams(
        repetition_penalty=chance.choice([0.1, 0.6, 1.0, 1.3]),
        presence_penalty=chance.choice(penalty),
        frequency_penalty=chance.choice(penalty),
        bad_words=((1, 2), (3,)) if chance.random() < 0.3 else (),
        max_tokens=100,
    )


def random_rows(chance: random.Random) -> list[list[int]]:
    """Continuations as those of a path, of branches beside it, and of a tree's nodes, with ids that a draft lacks."""
    rows: list[list[int]] = [[]]
    for _ in range(chance.randint(0, 7)):
        rows.append([*chance.choice(rows), chance.randrange(VOCAB_SIZE + 5)])
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_counts_that_are_kept_give_the_same_bits_as_the_whole_text(seed: int) -> None:
    """The text begins with a prompt and perhaps replayed output, and grows by one or more tokens a step; hints that
    were counted on are accepted, rejected or replaced."""
    chance = random.Random(seed)
    params = random_params(chance)
    some = range(VOCAB_SIZE) if seed % 2 else range(6)
    text = chance.choices(some, k=chance.choice([1, 5, 300]))
    num_prompt_tokens = chance.randint(1, len(text))
    counts: dict[int, TokenCounts] = {}
    for _ in range(25):
        rows = random_rows(chance)
        logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(len(text)))
        kept = process(logits, params, LogitContext(text, num_prompt_tokens, rows, counts=counts))
        expected = one_by_one.process(logits, params, LogitContext(text, num_prompt_tokens, rows))
        assert torch.equal(kept, expected)
        said = chance.choice([chance.choice(rows), [chance.choice(some)], chance.choices(some, k=9), []])
        text += [token_id for token_id in said if token_id < VOCAB_SIZE or seed % 3 == 0]


def test_a_step_reads_what_is_new_however_long_the_text() -> None:
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=100)
    chance = random.Random(1)
    text, counts = CountingList(chance.choices(range(VOCAB_SIZE), k=50_000)), dict[int, TokenCounts]()
    logits = torch.randn(3, VOCAB_SIZE)
    num_new = 0
    for step in range(20):
        process(logits, params, LogitContext(text, 40_000, [[], [1], [1, 7]], counts=counts))
        num_read = text.take_num_read()
        assert num_read == 2 * num_new or not step  # of the whole text, and of the output
        num_new = chance.randint(0, 5)
        text += chance.choices(range(VOCAB_SIZE), k=num_new)


def test_parameters_without_counts_read_no_text() -> None:
    text = CountingList(range(1000))
    process(torch.randn(1, VOCAB_SIZE), SamplingParams(min_tokens=3, max_tokens=9), LogitContext(text, 1000, [[]]))
    assert text.num_read == 0
