"""Every parameter before sampling does what transformers' processor does, row by row, whatever else is decided (I2)."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process

from outrider.engine.sampling.logit_processing import NEVER, LogitContext, process
from outrider.engine.sampling.sampling import draft_distributions, probabilities, sample_draft
from outrider.grammar import GrammarCompiler
from outrider.hints.hint_tree import Hint
from outrider.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from tests import grammars
from tests.engine.verification_cases import coupled_choice, verify_one
from tests.schemas.walk import permitted_token_ids

VOCAB_SIZE = 40
FEW = st.integers(0, 5)  # few tokens, so that words recur
ANY = st.integers(0, VOCAB_SIZE - 1)
ENDS = frozenset({7, 9})
PENALTIES = st.sampled_from([-2.0, -0.3, 0.0, 0.0, 0.7, 2.0])

PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([0.1, 0.6, 1.0, 1.0, 1.3, 10.0]),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    logit_bias=st.dictionaries(ANY, st.sampled_from([-100.0, -1.5, 0.25, 100.0]), max_size=4).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    bad_words=st.lists(st.lists(FEW, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
    allowed_token_ids=st.frozensets(ANY, max_size=12),
    min_tokens=st.integers(0, 9),
    max_tokens=st.just(9),
)


def random_logits(seed: int, num_rows: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4


def of_transformers(
    logits: torch.Tensor, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
) -> torch.Tensor:
    """One row after transformers' processors for one whole text.  # [1, vocab_size]"""
    input_ids = torch.tensor([token_ids])
    steps: list[Any] = []
    if params.logit_bias:
        steps.append(logits_process.SequenceBiasLogitsProcessor([[[t], b] for t, b in params.logit_bias]))
    if params.repetition_penalty != 1.0:
        steps.append(logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(lambda _, scores: openai_penalties(scores, params, token_ids[num_prompt_tokens:]))
    if params.bad_words:
        steps.append(logits_process.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_tokens:
        steps.append(
            logits_process.MinNewTokensLengthLogitsProcessor(num_prompt_tokens, params.min_tokens, sorted(ENDS))
        )
    for step in steps:
        logits = step(input_ids, logits)
    if params.allowed_token_ids:
        allowed = sorted(params.allowed_token_ids)
        if bool((logits[0, allowed] == NEVER).all()):  # transformers would permit them again
            return torch.full_like(logits, NEVER)
        logits = logits_process.PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1)(input_ids, logits)
    return logits


def openai_penalties(scores: torch.Tensor, params: SamplingParams, output: Sequence[int]) -> torch.Tensor:
    """mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, as OpenAI writes it."""
    scores = scores.clone()
    for j in set(output):
        count = list(output).count(j)
        scores[0, j] -= count * params.frequency_penalty + float(count > 0) * params.presence_penalty
    return scores


def check_rows(params: SamplingParams, token_ids: list[int], num_prompt: int, continuations: list[list[int]]) -> None:
    """Each row against transformers, and against itself alone."""
    logits = random_logits(len(token_ids), len(continuations))
    before = logits.clone()
    text = LogitContext(token_ids, num_prompt, continuations, ENDS)
    together = process(logits, params, text)
    assert torch.equal(logits, before), "the input was changed"
    assert together.shape == logits.shape
    assert together.dtype == torch.float32
    assert not together.isnan().any()
    for row, said in enumerate(continuations):
        whole = [*token_ids, *said]
        own = logits[row : row + 1]
        alone = process(own, params, LogitContext(token_ids, num_prompt, [said], ENDS))
        assert torch.equal(alone[0], together[row]), "a row depends on the batch composition"
        committed = process(own, params, LogitContext(whole, num_prompt, [[]], ENDS))
        assert torch.equal(committed[0], together[row]), "a row depends on whether its text is committed"
        expected = of_transformers(own, params, whole, num_prompt)
        if params.presence_penalty or params.frequency_penalty:  # sums in another order
            torch.testing.assert_close(together[row : row + 1], expected, rtol=1e-6, atol=1e-5)
            assert torch.equal(together[row] == NEVER, expected[0] == NEVER)
        else:
            assert torch.equal(together[row : row + 1], expected)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    params=PARAMS,
    token_ids=st.lists(FEW | ANY, min_size=5, max_size=25),
    num_output=st.integers(0, 9),
    hints=st.lists(FEW | ANY, max_size=6),
)
def test_a_block_of_hints_is_processed_as_transformers_would_process_each_text(
    params: SamplingParams, token_ids: list[int], num_output: int, hints: list[int]
) -> None:
    num_prompt = max(len(token_ids) - num_output, 1)
    check_rows(params, token_ids, num_prompt, [hints[:length] for length in range(len(hints) + 1)])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    params=PARAMS,
    token_ids=st.lists(FEW, min_size=5, max_size=12),
    continuations=st.lists(st.lists(FEW, max_size=5), min_size=1, max_size=5),
)
def test_the_nodes_of_a_tree_are_processed_each_by_its_own_branch(
    params: SamplingParams, token_ids: list[int], continuations: list[list[int]]
) -> None:
    check_rows(params, token_ids, 3, continuations)


def test_nothing_to_do_gives_the_logits_themselves() -> None:
    logits = random_logits(0, 3)
    assert process(logits, SamplingParams(), LogitContext([1, 2], 2, [[], [3], [3, 4]], ENDS)) is logits


@pytest.mark.parametrize("num_said", range(4))
def test_min_tokens_counts_output_and_hints_and_no_prompt(num_said: int) -> None:
    hints = [11, 12, 13]
    text = LogitContext([1] * 10 + [2] * num_said, 10, [hints[:length] for length in range(4)], ENDS)
    processed = process(random_logits(0, 4), SamplingParams(min_tokens=3), text)
    is_forbidden = [(row[sorted(ENDS)] == NEVER).all().item() for row in processed]
    assert is_forbidden == [num_said + length < 3 for length in range(4)]
    assert not (processed[:, [t for t in range(VOCAB_SIZE) if t not in ENDS]] == NEVER).any()


class TestBadWords:
    def forbidden(self, words: Sequence[tuple[int, ...]], token_ids: list[int], said: Sequence[int] = ()) -> list[int]:
        params = SamplingParams(bad_words=tuple(words))
        processed = process(random_logits(0, 1), params, LogitContext(token_ids, 1, [list(said)]))
        return [int(t) for t in torch.nonzero(processed[0] == NEVER)[:, 0]]

    def test_a_word_is_cut_off_before_its_last_token_wherever_it_began(self) -> None:
        words = [(3,), (1, 2, 4), (2, 5), (9, 1, 2, 6)]
        assert self.forbidden(words, [1, 2]) == [3, 4, 5]
        assert self.forbidden(words, [1], [2]) == [3, 4, 5]
        assert self.forbidden(words, [9, 1], [2]) == [3, 4, 5, 6]
        assert self.forbidden(words, [8], [9, 1, 2]) == [3, 4, 5, 6]

    def test_a_word_longer_than_the_text_is_not_matched_by_a_part_of_it(self) -> None:
        assert self.forbidden([(1, 2, 4)], [2]) == []
        assert self.forbidden([(1, 1, 1, 4)], [1, 1]) == []
        assert self.forbidden([(1, 1, 1, 4)], [1], [1]) == []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    params=PARAMS,
    beyond=st.lists(st.integers(VOCAB_SIZE, VOCAB_SIZE + 20), min_size=1, max_size=5),
    token_ids=st.lists(FEW, min_size=5, max_size=12),
    hints=st.lists(FEW | st.integers(VOCAB_SIZE, VOCAB_SIZE + 5), max_size=4),
)
def test_ids_beyond_the_vocabulary_are_passed_over(
    params: SamplingParams, beyond: list[int], token_ids: list[int], hints: list[int]
) -> None:
    """A draft model may have fewer rows than its target: what remains means what it meant."""
    if not params.allowed_token_ids:
        params = dataclasses.replace(params, allowed_token_ids=frozenset(range(VOCAB_SIZE)))
    wider = dataclasses.replace(
        params,
        logit_bias=(*params.logit_bias, *((t, 50.0) for t in beyond)),
        bad_words=(*params.bad_words, *((t,) for t in beyond), (token_ids[-1], beyond[0])),
        allowed_token_ids=params.allowed_token_ids | set(beyond),
    )
    rows = [hints[:length] for length in range(len(hints) + 1)]
    text = LogitContext([*token_ids, beyond[0], token_ids[-1]], 3, rows, ENDS)
    logits = random_logits(1, len(rows))
    narrow = process(logits, wider, dataclasses.replace(text, end_token_ids=ENDS | set(beyond)))
    assert torch.equal(narrow, process(logits, params, text))
    # The same as with a layer that has these rows, which nobody then looks at.
    wide_logits = torch.cat([logits, random_logits(2, len(rows), 30)], dim=1)
    assert torch.equal(narrow, process(wide_logits, wider, text)[:, :VOCAB_SIZE])


def test_only_tokens_that_the_model_lacks_may_be_allowed_and_no_row_is_alive() -> None:
    params = SamplingParams(allowed_token_ids=frozenset({VOCAB_SIZE + 3}))
    text = LogitContext([1], 1, [[], [2]])
    assert bool((process(random_logits(0, 2), params, text) == NEVER).all())
    assert verify_one(random_logits(0, 2), [Hint(1, 0, 2)], params, 0, text).token_ids == []


@pytest.mark.parametrize(("bad_words", "said"), [((), [0, 1, 2, 0]), (((1, 2), (1, 0), (1, 1)), [0, 1])])
def test_rows_are_alive_up_to_the_first_without_a_token(
    bad_words: tuple[tuple[int, ...], ...], said: list[int]
) -> None:
    params = SamplingParams(temperature=0.0, bad_words=bad_words)
    logits = torch.eye(3)[[0, 1, 2, 0]]
    hints = [Hint(row + 1, row, row) for row in range(3)]
    text = LogitContext([2], 1, [[0, 1, 2][:row] for row in range(4)])
    assert verify_one(logits, hints, params, 0, text).token_ids == said


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 1e-30, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 10.0, "logit_bias": ((1, -100.0), (2, 100.0))},
        {"presence_penalty": -2.0, "frequency_penalty": -2.0, "logit_bias": ((1, 100.0),)},
    ],
)
@pytest.mark.parametrize("seed", [None, 3])
def test_extremes_that_are_permitted_give_a_distribution(extreme: dict[str, Any], seed: int | None) -> None:
    """I7: no request may end a model thread, nor have nonsense said."""
    params = SamplingParams(seed=seed, **extreme)
    text = LogitContext([1, 2, 3, 4, 5, 6] * 50, 6, [[], [7], [7, 2]], ENDS)
    processed = process(random_logits(3, 3) * 10, params, text)
    probs = probabilities(processed, params)
    assert bool(torch.isfinite(probs).all())
    np.testing.assert_allclose(probs.sum(dim=-1).numpy(), 1.0, rtol=1e-5)
    for row, token_id in enumerate(coupled_choice(probs, 5, 10)):
        assert probs[row, token_id] > 0
    for distribution in draft_distributions(probs, 8, 8):
        assert distribution.is_valid(VOCAB_SIZE)
        assert sample_draft(distribution, 1, 2) in distribution.token_ids


class TestGrammar:
    TOKENIZER_JSON = Path(__file__).parents[2] / "demo" / "target" / "tokenizer.json"
    LARGE_VOCAB_SIZE = 4096
    EOS = 1

    def test_rows_are_masked_as_by_a_prefix_constraint(self) -> None:
        compiler = GrammarCompiler(
            self.TOKENIZER_JSON, vocab_size=self.LARGE_VOCAB_SIZE, eos_token_ids=frozenset([self.EOS])
        )
        rng = random.Random(0)
        for pattern in ("(yes|no|maybe)( indeed){0,3}", "[0-9a-f]{1,6}", "(?s:.*)"):
            state = grammars.compiled(compiler, GrammarSpec(GrammarKind.REGEX, pattern))
            committed: list[int] = []
            walker, path = state.fork(), list[int]()
            while len(path) < 6 and (permitted := permitted_token_ids(walker)):
                path.append(rng.choice(permitted))
                walker.advance(path[-1:])
            state.advance(path[:1])
            committed = path[:1]
            hints = [*path[1:], 5]  # the last one is hardly ever permitted
            rows = [hints[:length] for length in range(len(hints) + 1)]
            logits = random_logits(1, len(rows), self.LARGE_VOCAB_SIZE)
            text = LogitContext([9, 9, *committed], 2, rows, frozenset([self.EOS]), state)
            processed = process(logits, SamplingParams(), text)
            assert permitted_token_ids(state) == permitted_token_ids(state.fork())
            for row, said in enumerate(rows):
                place = grammars.compiled(compiler, GrammarSpec(GrammarKind.REGEX, pattern))
                whole = [*committed, *said]
                if place.num_valid(whole) < len(whole) or self.EOS in whole:
                    assert bool((processed[row] == NEVER).all())
                    continue
                place.advance(whole)
                allowed = permitted_token_ids(place)
                constraint = logits_process.PrefixConstrainedLogitsProcessor(lambda *_, allowed=allowed: allowed, 1)
                expected = constraint(torch.tensor([[9, 9, *whole]]), logits[row : row + 1])
                assert torch.equal(processed[row : row + 1], expected)

    def test_what_other_parameters_forbid_stays_forbidden(self) -> None:
        compiler = GrammarCompiler(
            self.TOKENIZER_JSON, vocab_size=self.LARGE_VOCAB_SIZE, eos_token_ids=frozenset([self.EOS])
        )
        state = grammars.compiled(compiler, GrammarSpec(GrammarKind.REGEX, "[0-9]{1,3}"))
        allowed = permitted_token_ids(state)
        params = SamplingParams(bad_words=((allowed[0],),), logit_bias=((allowed[1], 100.0),), min_tokens=1)
        text = LogitContext([9], 1, [[], [allowed[1]]], frozenset([self.EOS]), state)
        processed = process(random_logits(0, 2, self.LARGE_VOCAB_SIZE), params, text)
        alive = [torch.nonzero(row != NEVER)[:, 0].tolist() for row in processed]
        assert alive[0] == allowed[1:]
        assert self.EOS in alive[1]
        assert int(processed[0].argmax()) == allowed[1]
        assert math.isinf(float(processed[0, allowed[0]]))
