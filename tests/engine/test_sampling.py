"""From logits to distributions and tokens: as transformers does it, and exactly as it is said on the wire."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider.engine.compiled.kernels import coupled_choices as coupled_choices_kernel
from outrider.engine.sampling import sampling
from outrider.engine.sampling.randomness import GOLDEN, MASK_64, Purpose, key, mix, uniform
from outrider.engine.sampling.sampling import (
    _token_uniforms,
    coupled_choices,
    coupled_keys,
    draft_distributions,
    greedy_choices,
    keyed_scores,
    likely_coupled_choices,
    most_likely,
    probabilities,
    row_probabilities,
    sample_draft,
    sample_rows,
)
from outrider.hints.hint_tree import WEIGHT_TOTAL_MAX, DraftDistribution
from outrider.sampling_params import SamplingParams
from tests.engine.verification_cases import coupled_choice

ERROR_RATE = 1e-4
"""Probability that a chi-square test fails by chance for random seeds; they are fixed, so no test is flaky."""


def of_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0.0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.typical_p < 1.0:
        scores = TypicalLogitsWarper(params.typical_p)(None, scores)
    return torch.softmax(scores, dim=-1)


def fits(counts: npt.NDArray[np.int64], probs: torch.Tensor) -> bool:
    """Whether counts may come from a distribution, by chi-square."""
    shares = probs.double().numpy()
    return bool(stats.chisquare(counts, shares / shares.sum() * counts.sum()).pvalue > ERROR_RATE)


class TestProbabilities:
    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(
        seed=st.integers(0, 10**6),
        spread=st.sampled_from([0.1, 1.0, 5.0, 20.0]),
        temperature=st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.3, 2.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 40, 59, 60, 1000]),
        top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99, 1.0]),
        min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.3, 1.0]),
        typical_p=st.sampled_from([1e-6, 0.3, 0.9, 1.0, 1.0]),
        num_ruled_out=st.sampled_from([0, 30, 59]),
    )
    def test_they_are_those_of_transformers(
        self,
        seed: int,
        spread: float,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        typical_p: float,
        num_ruled_out: int,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(4, 60, generator=generator) * spread
        logits[:, torch.randperm(60, generator=generator)[:num_ruled_out]] = -torch.inf
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
        ours, theirs = probabilities(logits.clone(), params), of_transformers(logits.clone(), params)
        assert torch.equal(ours > 0, theirs > 0) or torch.allclose(ours, theirs, atol=1e-5)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours.sum(-1), torch.ones(4), rtol=1e-5, atol=1e-5)

    def test_logits_are_left_as_they_were(self) -> None:
        logits = torch.randn(2, 9)
        before = logits.clone()
        probabilities(logits, SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1))
        assert torch.equal(logits, before)

    def test_a_row_does_not_depend_on_its_company(self) -> None:
        """I2: more rows must not change a row's bits."""
        logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(1)) * 3
        params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
        together = probabilities(logits, params)
        for i in range(9):
            assert torch.equal(together[i], probabilities(logits[i : i + 1], params)[0])

    @pytest.mark.parametrize("vocab_size", [60, 999, 32_003, 151_936])
    def test_nor_does_a_row_of_the_models_own_distribution_on_rows_with_other_parameters(self, vocab_size: int) -> None:
        """I2: alone it takes a shorter way."""
        logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(2)) * 4
        logits[0, 7] = -torch.inf
        plain, other = SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.9)
        together = row_probabilities(logits, [plain, other, plain])
        assert torch.equal(together[[0, 2]], row_probabilities(logits[[0, 2]], [plain, plain]))

    @pytest.mark.parametrize("num_threads", [1, 2])
    @pytest.mark.parametrize("vocab_size", [999, 32_003, 151_936])
    def test_nor_do_a_large_vocabulary_and_several_threads_make_it_depend(
        self, vocab_size: int, num_threads: int
    ) -> None:
        """I2: a reduction that is cut among threads by the number of rows would add up in another order."""
        logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            for params in (
                SamplingParams(temperature=0.8),
                SamplingParams(temperature=0.8, top_k=50),
                SamplingParams(temperature=1.3, top_p=0.9, min_p=0.01),
                SamplingParams(temperature=0.9, typical_p=0.8),
            ):
                together = probabilities(logits, params)
                scores = keyed_scores(together, coupled_keys(5, range(40, 44)))
                assert bool(torch.isfinite(together).all())
                for i in (0, 3):
                    alone = probabilities(logits[i : i + 1], params)
                    assert torch.equal(together[i], alone[0])
                    assert torch.equal(scores[i], keyed_scores(alone, coupled_keys(5, [40 + i]))[0])
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-37, 1e-38, 1e-40, 1.4e-45])
    def test_permitted_but_tiny_temperature_means_the_most_likely_token(self, temperature: float) -> None:
        """Every temperature from 0 to 2 is permitted (I7: a request must not break the worker's loop)."""
        logits = torch.tensor([[1.0, 12.0, -30.0, 11.0]])
        probs = probabilities(logits, SamplingParams(temperature=temperature))
        assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0]]
        assert draft_distributions(probs, 32)[0].token_ids == (1,)


def sample_from(weights: torch.Tensor, number: float) -> int:
    """A token from weights that need not add up to one.  # [vocab_size]"""
    return int(sample_rows(weights[None].double(), torch.tensor([[number]], dtype=torch.float64)))


class TestSampleFrom:
    def test_number_picks_the_token_whose_share_it_falls_into(self) -> None:
        weights = torch.tensor([0.0, 0.5, 0.0, 1.5, 0.0])
        assert [sample_from(weights, n) for n in (1e-12, 0.2499, 0.2501, 0.9999999)] == [1, 1, 3, 3]

    def test_a_token_without_weight_is_never_said_even_at_the_ends(self) -> None:
        weights = torch.tensor([0.0, 0.0, 1e-30, 0.0])
        for number in (2.0**-54, 0.5, 1.0 - 2.0**-53, 1.0):
            assert sample_from(weights, number) == 2

    def test_shares_follow_the_weights(self) -> None:
        weights = torch.tensor([3.0, 1.0, 0.0, 2.0, 0.5])
        numbers = torch.tensor([[uniform(5, i, Purpose.BONUS)] for i in range(20_000)], dtype=torch.float64)
        counts = np.bincount(sample_rows(weights.double().expand(20_000, -1), numbers)[:, 0].numpy(), minlength=5)
        assert counts[2] == 0
        expected = np.array([3.0, 1.0, 2.0, 0.5]) / 6.5 * 20_000
        assert stats.chisquare(counts[[0, 1, 3, 4]], expected).pvalue > ERROR_RATE


class TestNoiseIsAHashOfIntegers:
    """I6: the same integer operations everywhere."""

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(seed=st.integers(0, MASK_64), position=st.integers(0, 2**32))
    def test_tensors_and_python_agree_bit_for_bit(self, seed: int, position: int) -> None:
        row_key = key(seed, position, Purpose.GUMBEL)
        token_ids = [0, 1, 2, 17, 4095, 9999]
        values = _token_uniforms([0, row_key], 10_000)[1][token_ids].tolist()
        expected = [((mix((row_key + t * GOLDEN) & MASK_64) >> 12) + 0.5) * 2.0**-52 for t in token_ids]
        assert values == expected

    def test_every_number_lies_strictly_between_0_and_1(self) -> None:
        """For every key: a client chooses the seed, so the worst key can be chosen too."""
        for target in (0, MASK_64, MASK_64 - 1, MASK_64 >> 1):
            row_key = (unmix(target)) & MASK_64
            value = float(_token_uniforms([row_key], 1))
            assert 0.0 < value < 1.0, f"key {target:#x} gives {value!r}"

    def test_uniform_over_tokens(self) -> None:
        values = _token_uniforms([key(9, p, Purpose.GUMBEL) for p in range(200)], 500)
        counts = np.histogram(values.numpy().reshape(-1), bins=64, range=(0.0, 1.0))[0]
        assert stats.chisquare(counts).pvalue > ERROR_RATE


def unmix(value: int) -> int:
    """The argument for which `mix` gives `value`: it is a bijection, so an adversary can invert it."""
    value = _unshift(value, 31)
    value = (value * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK_64
    value = _unshift(value, 27)
    value = (value * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK_64
    value = _unshift(value, 30)
    return (value - GOLDEN) & MASK_64


def _unshift(value: int, bits: int) -> int:
    result = value
    for _ in range(64 // bits + 1):
        result = value ^ (result >> bits)
    return result


class TestCoupledChoice:
    def test_over_seeds_it_follows_the_distribution(self) -> None:
        probs = torch.tensor([0.4, 0.05, 0.0, 0.3, 0.25])
        counts = np.bincount([coupled_choice(probs[None], seed, 7)[0] for seed in range(6000)], minlength=5)
        assert counts[2] == 0
        kept = [0, 1, 3, 4]
        assert fits(counts[kept], probs[kept])

    def test_over_positions_of_one_seed_it_follows_the_distribution(self) -> None:
        probs = torch.tensor([0.4, 0.05, 0.3, 0.25])
        choices = coupled_choice(probs.repeat(6000, 1), 3, 0)
        assert fits(np.bincount(choices, minlength=4), probs)

    def test_both_sides_agree_where_their_distributions_do(self) -> None:
        """The reason for coupling: similar distributions mostly choose the same token."""
        target = torch.softmax(torch.randn(200, 50, generator=torch.Generator().manual_seed(0)), dim=-1)
        draft = torch.softmax(target.log() + 0.01, dim=-1)
        assert coupled_choice(target, 11, 100) == coupled_choice(draft, 11, 100)

    def test_scores_of_the_same_position_are_the_same_whatever_else_is_decided(self) -> None:
        probs = torch.softmax(torch.randn(5, 30, generator=torch.Generator().manual_seed(0)), dim=-1)
        rows = coupled_choice(probs, 5, 40)
        assert rows == [coupled_choice(probs[i : i + 1], 5, 40 + i)[0] for i in range(5)]
        assert torch.isfinite(keyed_scores(probs, coupled_keys(5, range(40, 45)))).all()


class TestDraftDistribution:
    """I5: what is sent is what is sampled from."""

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(
        seed=st.integers(0, 10**6),
        vocab_size=st.sampled_from([1, 3, 40, 300]),
        spread=st.sampled_from([0.0, 1.0, 6.0, 60.0]),
        max_entries=st.sampled_from([1, 2, 32, 500]),
    )
    def test_weights_are_positive_and_add_up(self, seed: int, vocab_size: int, spread: float, max_entries: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        probs = torch.softmax(torch.randn(vocab_size, generator=generator) * spread, dim=-1)
        distribution = draft_distributions(probs[None], max_entries)[0]
        assert distribution.is_valid(vocab_size)
        assert distribution.total == WEIGHT_TOTAL_MAX
        assert len(distribution.token_ids) <= max_entries
        kept = probs[list(distribution.token_ids)].double()
        exact = kept / torch.topk(probs, min(max_entries, vocab_size)).values.double().sum()
        off = (torch.tensor(distribution.weights).double() / WEIGHT_TOTAL_MAX - exact).abs()
        assert float(off.max()) <= min(max_entries, vocab_size) / WEIGHT_TOTAL_MAX

    def test_a_row_does_not_depend_on_its_company(self) -> None:
        probs = torch.softmax(torch.randn(5, 80, generator=torch.Generator().manual_seed(0)) * 2, dim=-1)
        assert draft_distributions(probs, 32) == [draft_distributions(row[None], 32)[0] for row in probs]

    def test_samples_follow_the_sent_weights_exactly(self) -> None:
        distribution = DraftDistribution((7, 2, 9, 4), (40_000, 20_000, 5_535, 1))
        num_samples = 60_000
        sampled = [sample_draft(distribution, 3, position) for position in range(num_samples)]
        counts = [sampled.count(token_id) for token_id in distribution.token_ids]
        merged = [counts[0], counts[1], counts[2] + counts[3]]
        expected = np.array([40_000, 20_000, 5_536]) / WEIGHT_TOTAL_MAX * num_samples
        assert sum(counts) == num_samples
        assert stats.chisquare(merged, expected).pvalue > ERROR_RATE

    def test_each_of_the_65536_equal_parts_belongs_to_its_token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Exhaustive: not nearly the weights but the weights."""
        distribution = DraftDistribution((5, 1, 8), (65_000, 535, 1))
        numbers = iter((np.arange(WEIGHT_TOTAL_MAX) + 0.5) / WEIGHT_TOTAL_MAX)
        monkeypatch.setattr(sampling, "uniform", lambda *_: next(numbers))
        counts = np.bincount([sample_draft(distribution, 0, 0) for _ in range(WEIGHT_TOTAL_MAX)], minlength=9)
        assert [counts[5], counts[1], counts[8]] == [65_000, 535, 1]


class TestTheMostLikely:
    @pytest.mark.parametrize("is_compiled", [True, False])
    @pytest.mark.parametrize("width", [3, 16, 63, 64, 65, 500, 4096])
    @pytest.mark.parametrize("count", [1, 2, 5, 33])
    def test_are_those_of_a_softmax(
        self, is_compiled: bool, width: int, count: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not is_compiled:
            monkeypatch.setattr(sampling, "most_likely_kernel", lambda: None)
        logits = 3.0 * torch.randn(4, width, generator=torch.Generator().manual_seed(width))
        token_ids, chances = most_likely(logits, count)
        expected = torch.softmax(logits.double(), dim=-1).topk(min(count, width))
        assert token_ids == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(chances).double(), expected.values, rtol=2e-5, atol=1e-9)
        assert greedy_choices(logits) == logits.argmax(dim=-1).tolist()

    @pytest.mark.parametrize("is_compiled", [True, False])
    def test_of_equals_the_first_is_chosen(self, is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """As argmax does, by which the target decides; equal maxima are common in bfloat16."""
        if not is_compiled:
            monkeypatch.setattr(sampling, "most_likely_kernel", lambda: None)
        logits = torch.randint(0, 6, (50, 300), generator=torch.Generator().manual_seed(1)).float()
        first = logits.argmax(dim=-1).tolist()
        token_ids, chances = most_likely(logits, 4)
        assert [row[0] for row in token_ids] == first == greedy_choices(logits)
        assert all(len(set(row)) == 4 for row in token_ids)
        assert all(row[0] == row[3] for row in chances)  # there are more than four maxima in each

    @pytest.mark.parametrize("width", [40, 64])
    def test_what_is_forbidden_has_no_chance(self, width: int) -> None:
        logits = torch.full((1, width), -torch.inf)
        logits[0, [7, 31]] = torch.tensor([1.0, 2.0])
        token_ids, chances = most_likely(logits, 4)
        assert token_ids[0][:2] == [31, 7]
        assert chances[0][2:] == [0.0, 0.0]


@pytest.mark.skipif(coupled_choices_kernel() is None, reason="the kernels are not compiled")
class TestCompiledChoices:
    @pytest.mark.parametrize("width", [*range(1, 20), 100, 1003, 32_000])
    def test_they_are_those_of_the_greatest_scores(self, width: int) -> None:
        generator = torch.Generator().manual_seed(width)
        for sharpness in (0.5, 3.0, 30.0):
            probs = torch.softmax(sharpness * torch.randn(40, width, generator=generator), dim=-1)
            keys = coupled_keys(width, range(40))
            expected = keyed_scores(probs, keys).argmax(dim=-1)
            assert torch.equal(coupled_choices(probs, keys), expected)

    @pytest.mark.parametrize("width", [*range(1, 20), 100, 1003, 32_000])
    @pytest.mark.parametrize("count", [1, 2, 5, 33])
    def test_the_likely_ones_are_the_greatest_scores_in_falling_order(self, width: int, count: int) -> None:
        generator = torch.Generator().manual_seed(width)
        for sharpness in (0.5, 3.0, 30.0):
            probs = torch.softmax(sharpness * torch.randn(20, width, generator=generator), dim=-1)
            keys = coupled_keys(width, range(20))
            scores = keyed_scores(probs, keys)
            best = torch.topk(scores / scores.sum(dim=-1, keepdim=True), min(count, width), dim=-1)
            token_ids, shares = likely_coupled_choices(probs, keys, count)
            found, exact = torch.tensor(shares), best.values.float()
            is_possible = exact > 0.0
            assert torch.equal(torch.tensor(token_ids)[is_possible], best.indices[is_possible])
            assert bool((found <= exact + 1e-6).all())
            assert bool((found >= 0.5 * exact).all())

    def test_of_few_possible_tokens_the_rest_has_no_share(self) -> None:
        probs = torch.zeros(1, 100)
        probs[0, [7, 31]] = 0.5
        (token_ids,), (shares,) = likely_coupled_choices(probs, coupled_keys(1, [0]), 4)
        assert set(token_ids[:2]) == {7, 31}
        assert min(shares[:2]) > 0.0
        assert shares[2:] == [0.0, 0.0]

    def test_tokens_without_a_chance_are_never_chosen(self) -> None:
        generator = torch.Generator().manual_seed(1)
        probs = torch.rand(200, 1000, generator=generator)
        probs[torch.rand(200, 1000, generator=generator) < 0.99] = 0.0
        keys = coupled_keys(5, range(200))
        choices = coupled_choices(probs, keys)
        assert bool((probs.gather(1, choices.unsqueeze(1)) > 0.0).all())
        assert torch.equal(choices, keyed_scores(probs, keys).argmax(dim=-1))

    def test_a_broken_models_rows_get_a_token_of_the_vocabulary(self) -> None:
        rows = torch.tensor([[0.0] * 9, [math.nan] * 9, [math.inf] * 9, [math.nan] * 8 + [0.5], [-1.0] * 9])
        choices = coupled_choices(rows, coupled_keys(1, range(5))).tolist()
        assert choices[0] == choices[1] == choices[4] == 0
        assert 0 <= choices[2] < 9
        assert choices[3] == 8

    def test_neighbouring_rows_do_not_matter(self) -> None:
        probs = torch.softmax(torch.randn(30, 777, generator=torch.Generator().manual_seed(2)), dim=-1)
        keys = coupled_keys(9, range(30))
        together = coupled_choices(probs, keys)
        alone = [coupled_choices(probs[row : row + 1], [row_key]) for row, row_key in enumerate(keys)]
        assert torch.equal(together, torch.cat(alone))
