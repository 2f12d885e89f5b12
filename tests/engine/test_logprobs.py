"""Log probabilities are those of the softmax, with ranks; what was ruled out has none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.logprobs import ScoredRows
from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.engine.sampling.transfers import to_host

VOCAB_SIZE = 30


def random_logits(seed: int, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 5


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    rows = ScoredRows(logits, torch.tensor(token_ids, dtype=torch.int64), num_top)
    return rows.read(to_host(rows.scores()))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5),
    num_top=st.sampled_from([0, 1, 5, VOCAB_SIZE, VOCAB_SIZE + 5]),
    num_ruled_out=st.sampled_from([0, 3, VOCAB_SIZE - 1]),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
)
def test_they_are_those_of_the_softmax(
    seed: int, token_ids: list[int], num_top: int, num_ruled_out: int, scale: float
) -> None:
    logits = random_logits(seed, len(token_ids)) * scale
    for row in logits:
        row[torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))[:num_ruled_out]] = -torch.inf
    before = logits.clone()
    results = token_logprobs(logits, token_ids, num_top)
    assert torch.equal(logits, before)
    expected = torch.log_softmax(logits.double(), dim=-1)
    for row, (result, token_id) in enumerate(zip(results, token_ids, strict=True)):
        exact = expected[row].tolist()
        assert result.logprob == pytest.approx(exact[token_id], rel=1e-5, abs=1e-5)
        assert result.rank == 1 + int((logits[row] > logits[row, token_id]).sum())
        assert len(result.top) == min(num_top, VOCAB_SIZE)
        assert [value for _, value in result.top] == pytest.approx(
            sorted(exact, reverse=True)[: len(result.top)], rel=1e-5, abs=1e-5
        )
        for top_id, value in result.top:
            assert value == pytest.approx(exact[top_id], rel=1e-5, abs=1e-5)
        assert len({top_id for top_id, _ in result.top}) == len(result.top)
        if result.rank == 1 and num_top and sum(value == exact[token_id] for value in exact) == 1:
            assert result.top[0][0] == token_id


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), shift=st.sampled_from([-300.0, 12.5, 1000.0]))
def test_only_differences_of_logits_matter(seed: int, shift: float) -> None:
    logits = random_logits(seed, 1)
    (plain,), (shifted,) = token_logprobs(logits, [4], 3), token_logprobs(logits + shift, [4], 3)
    assert shifted.logprob == pytest.approx(plain.logprob, abs=1e-3)
    assert (shifted.rank, [t for t, _ in shifted.top]) == (plain.rank, [t for t, _ in plain.top])


def test_a_token_that_was_ruled_out_comes_after_all_others() -> None:
    logits = random_logits(0, 1)
    logits[0, [4, 5]] = -torch.inf
    (result,) = token_logprobs(logits, [4], 2)
    assert (result.logprob, result.rank) == (-math.inf, VOCAB_SIZE - 1)
    message = result.to_proto()
    assert (message.logprob, message.rank) == (-math.inf, VOCAB_SIZE - 1)


def test_a_certain_token_has_logprob_zero() -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, 7] = -3.0
    assert token_logprobs(logits, [7], 1) == [TokenLogprobs(0.0, 1, ((7, 0.0),))]


def test_tokens_that_are_alike_share_a_rank() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 3] = 1.0
    assert [token_logprobs(logits, [token_id], 0)[0].rank for token_id in (3, 4, 29)] == [1, 2, 2]


def test_no_tokens_have_no_log_probabilities() -> None:
    assert token_logprobs(torch.zeros(0, VOCAB_SIZE), [], 5) == []


def test_a_row_does_not_depend_on_its_company() -> None:
    logits = random_logits(3, 6)
    together = token_logprobs(logits, [1, 2, 3, 4, 5, 6], 4)
    assert together == [token_logprobs(logits[i : i + 1], [i + 1], 4)[0] for i in range(6)]
