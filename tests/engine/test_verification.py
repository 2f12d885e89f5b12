"""Design section 5: greedy and coupled text do not depend on hints; rejection keeps the target's distribution.

The chi-square tests draw 290,000 samples in all against exact distributions. Their seeds are fixed; drawn anew, all
of them together would fail by chance once in 10,000 times (Bonferroni over `NUM_TESTS`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.engine import verification
from outrider.engine.sampling import draft_distributions, probabilities, sample_draft
from outrider.engine.verification import verify
from outrider.hint_tree import DraftDistribution, Hint
from outrider.randomness import Purpose, uniform
from outrider.sampling_params import SamplingParams

NUM_TESTS = 12
ERROR_RATE = 1e-4 / NUM_TESTS
VOCAB_SIZE = 10
PARAMS = SamplingParams(temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)

Rows = Callable[[list[int]], torch.Tensor]


def random_logits(seed: int, num_rows: int, spread: float = 1.2) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * spread


def p_value(counts: npt.NDArray[np.int64], probs: npt.NDArray[np.float64]) -> float:
    """Chi-square of counts against an exact distribution; cells that expect fewer than 5 are put together."""
    expected = probs / probs.sum() * counts.sum()
    assert not counts[expected == 0].any(), "a token without probability was said"
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(stats.chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue)


def hint(token_id: int, distribution: DraftDistribution | None = None, node_id: int = 1) -> Hint:
    return Hint(node_id, node_id - 1, token_id, distribution)


class TestChosenTokens:
    """I2: with greedy and coupled decoding hints cannot change the text."""

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(
        seed=st.integers(0, 1000),
        num_rows=st.integers(1, 5),
        matching=st.lists(st.booleans(), min_size=5, max_size=5),
        has_free_hint=st.booleans(),
        coupled=st.booleans(),
    )
    def test_they_are_those_of_plain_decoding_up_to_the_first_wrong_hint(
        self, seed: int, num_rows: int, matching: list[bool], has_free_hint: bool, coupled: bool
    ) -> None:
        logits = random_logits(seed, num_rows)
        params = SamplingParams(temperature=0.9, seed=seed) if coupled else GREEDY
        plain = [verify(logits[i : i + 1], [], params, seed, 50 + i).token_ids[0] for i in range(num_rows)]
        num_hints = num_rows - 1 + has_free_hint
        hints = [
            hint(plain[i] if matching[i] else (plain[i] + 1) % VOCAB_SIZE, node_id=i + 1)
            for i in range(num_hints)
        ]
        verdict = verify(logits, hints, params, seed, 50)
        num_right = next((i for i in range(num_rows - 1) if not matching[i]), num_rows - 1)
        assert verdict.num_accepted == num_right
        assert verdict.token_ids == plain[: num_right + 1]

    def test_greedy_takes_the_first_of_equal_maxima(self) -> None:
        """As transformers does; both a row alone and a row in company."""
        logits = torch.zeros(3, VOCAB_SIZE)
        logits[:, 4] = logits[:, 7] = 1.0
        assert verify(logits, [hint(4), hint(4)], GREEDY, 0, 9).token_ids == [4, 4, 4]

    def test_coupled_text_is_a_function_of_the_seed(self) -> None:
        logits = random_logits(0, 1, 0.3).repeat(1, 1)
        texts = [
            [verify(logits, [], SamplingParams(seed=s), s, p).token_ids[0] for p in range(30)]
            for s in (1, 1, 2)
        ]
        assert texts[0] == texts[1] != texts[2]


class TestFreeLastHint:
    """ "The last position is verified too": it emits one token either way and is not counted as fed."""

    @pytest.mark.parametrize("params", [GREEDY, PARAMS, SamplingParams(seed=5)])
    def test_a_right_one_is_said_and_not_counted(self, params: SamplingParams) -> None:
        logits = torch.full((1, VOCAB_SIZE), -200.0)
        logits[0, 3] = 200.0
        verdict = verify(logits, [hint(3, DraftDistribution((3,), (65536,)))], params, 5, 10)
        assert (verdict.token_ids, verdict.num_accepted) == ([3], 0)

    @pytest.mark.parametrize("params", [GREEDY, PARAMS, SamplingParams(seed=5)])
    def test_a_wrong_one_is_replaced(self, params: SamplingParams) -> None:
        logits = torch.full((1, VOCAB_SIZE), -200.0)
        logits[0, 3] = 200.0
        verdict = verify(logits, [hint(4, DraftDistribution((4,), (65536,)))], params, 5, 10)
        assert (verdict.token_ids, verdict.num_accepted) == ([3], 0)

    def test_a_right_block_and_a_wrong_free_hint_keep_the_block(self) -> None:
        logits = torch.full((3, VOCAB_SIZE), -200.0)
        logits[0, 1] = logits[1, 2] = logits[2, 3] = 200.0
        hints = [hint(t, DraftDistribution((t,), (65536,)), i + 1) for i, t in enumerate((1, 2, 9))]
        for params in (GREEDY, PARAMS, SamplingParams(seed=5)):
            verdict = verify(logits, hints, params, 5, 10)
            assert (verdict.token_ids, verdict.num_accepted) == ([1, 2, 3], 2)


Q_FAR = draft_distributions(torch.softmax(random_logits(101, 1), -1), 32)[0]
Q_CUT = draft_distributions(torch.softmax(random_logits(102, 1), -1), 3)[0]


def single_position_counts(
    seed: int,
    num_samples: int,
    draft: DraftDistribution,
    *,
    top_k: int = 0,
    sends_distribution: bool = True,
    fed: bool = False,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """How often each token is said at one position, over many positions of one seed; and its exact chance."""
    params = SamplingParams(temperature=1.0, top_k=top_k)
    logits = random_logits(seed, 1)
    probs = probabilities(logits, params)
    rows = probs.repeat(2, 1) if fed else probs
    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    for position in range(num_samples):
        token_id = sample_draft(draft, seed + 1, position)
        hints = [hint(token_id, draft if sends_distribution else None)]
        counts[verification._verify_rejection(rows, hints, seed, position).token_ids[0]] += 1
    return counts, probs[0].double().numpy()


class TestRejectionKeepsTheTargetsDistribution:
    """I2 for sampling."""

    @pytest.mark.parametrize("fed", [True, False], ids=["fed hint", "free last hint"])
    def test_honest_distribution(self, fed: bool) -> None:
        assert p_value(*single_position_counts(1, 40_000, Q_FAR, fed=fed)) > ERROR_RATE

    def test_truncated_distribution(self) -> None:
        """The draft samples from what it sends (I5), three tokens only."""
        assert p_value(*single_position_counts(2, 40_000, Q_CUT)) > ERROR_RATE

    def test_filtered_target(self) -> None:
        """The draft proposes tokens that the target's top-k forbids; the helper checks that none is said."""
        assert p_value(*single_position_counts(3, 30_000, Q_FAR, top_k=4)) > ERROR_RATE

    def test_sampled_hint_without_its_distribution(self) -> None:
        """Taken as certain: costs acceptance, not exactness."""
        assert p_value(*single_position_counts(4, 20_000, Q_FAR, sends_distribution=False)) > ERROR_RATE

    @pytest.mark.parametrize("rank", [0, 5])
    def test_point_mass(self, rank: int) -> None:
        """A lookup's guess, likely or unlikely."""
        logits = random_logits(5, 1)
        guess = int(torch.argsort(logits[0], descending=True)[rank])
        certain = DraftDistribution((guess,), (65536,))
        assert p_value(*single_position_counts(5, 20_000, certain)) > ERROR_RATE

    def test_without_any_hint(self) -> None:
        logits = random_logits(6, 1)
        probs = probabilities(logits, PARAMS)
        counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
        for position in range(20_000):
            counts[verify(logits, [], PARAMS, 8, position).token_ids[0]] += 1
        assert p_value(counts, probs[0].double().numpy()) > ERROR_RATE


class Pair:
    """A target and a draft whose next token depends on the last one; vocabulary of 8."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target = torch.softmax(torch.randn(9, 8, generator=generator), dim=-1)
        noise = torch.randn(9, 8, generator=generator)
        drafts = torch.softmax(self.target.log() + 0.7 * noise, dim=-1)
        self.drafts = draft_distributions(drafts, 6)

    def joint(self) -> npt.NDArray[np.float64]:
        """Exact chances of the first two tokens; row 8 follows the prompt.  # [64]"""
        return (self.target[8, :, None] * self.target[:8]).double().numpy().reshape(-1)

    def draft_path(self, last: int, position: int, length: int, seed: int) -> list[Hint]:
        path: list[Hint] = []
        for i in range(length):
            distribution = self.drafts[last]
            last = sample_draft(distribution, seed, position + i)
            path.append(hint(last, distribution, i + 1))
        return path


def joint_counts(pair: Pair, num_samples: int, num_fed: int, num_hints: int) -> npt.NDArray[np.int64]:
    """Two tokens per sample, decided in as many steps as it takes, with hints drawn again after a rejection.

    A redrawn hint uses the same random number of its position as the one it replaces, as the draft worker does.
    """
    counts = np.zeros(64, dtype=np.int64)
    for sample in range(num_samples):
        text, position = [8], 10 * sample
        while len(text) < 3:
            at = position + len(text)
            hints = pair.draft_path(text[-1], at, num_hints, seed=77)
            rows = [pair.target[text[-1]]] + [pair.target[h.token_id] for h in hints[:num_fed]]
            text += verification._verify_rejection(torch.stack(rows), hints, 3, at).token_ids
        counts[text[1] * 8 + text[2]] += 1
    return counts


class TestBlocks:
    @pytest.mark.parametrize(
        ("num_fed", "num_hints"),
        [(1, 2), (1, 1), (0, 1)],
        ids=["block and free hint", "hints end before the rows", "free hints only"],
    )
    def test_joint_distribution_of_two_tokens(self, num_fed: int, num_hints: int) -> None:
        pair = Pair(1)
        counts = joint_counts(pair, 20_000, num_fed, num_hints)
        assert p_value(counts, pair.joint()) > ERROR_RATE

    def test_accepted_share_is_the_overlap_of_the_distributions(self) -> None:
        """Leviathan et al. 2211.17192, theorem 3.5: sum of min(p, q). Guards against a rule that accepts too little."""
        logits = random_logits(9, 2)
        probs = probabilities(logits, PARAMS)
        num_accepted = 0
        for position in range(10_000):
            token_id = sample_draft(Q_FAR, 5, position)
            verdict = verification._verify_rejection(probs, [hint(token_id, Q_FAR)], 6, position)
            num_accepted += verdict.num_accepted
        draft = torch.zeros(VOCAB_SIZE)
        draft[list(Q_FAR.token_ids)] = torch.tensor(Q_FAR.weights) / 65536
        expected = float(torch.minimum(probs[0], draft).sum())
        deviation = np.sqrt(10_000 * expected * (1 - expected))
        assert abs(num_accepted - 10_000 * expected) < 4.5 * deviation


class TestTheTestsCanFail:
    """The same chi-square notices a wrong rule with a tenth of the samples."""

    def test_accepting_more_than_p_over_q(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = verification.is_accepted
        monkeypatch.setattr(
            verification, "is_accepted", lambda p, q, token, number: right(p, q, token, number * 0.7)
        )
        assert p_value(*single_position_counts(1, 4000, Q_FAR)) < ERROR_RATE

    def test_recovering_from_p_instead_of_the_residual(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verification, "residual", lambda p, q: p)
        assert p_value(*single_position_counts(1, 4000, Q_FAR)) < ERROR_RATE

    def test_one_random_number_for_both_decisions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Purposes must differ (I6)."""
        monkeypatch.setattr(
            verification, "uniform", lambda seed, position, purpose: uniform(seed, position, Purpose.ACCEPT)
        )
        assert p_value(*single_position_counts(1, 4000, Q_FAR)) < ERROR_RATE

    def test_a_draft_that_does_not_sample_from_what_it_sends(self) -> None:
        """What I5 forbids: the likeliest token proposed, with the whole distribution beside it."""
        probs = probabilities(random_logits(1, 1), PARAMS)
        counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
        for position in range(4000):
            hints = [hint(Q_FAR.token_ids[0], Q_FAR)]
            counts[verification._verify_rejection(probs, hints, 2, position).token_ids[0]] += 1
        assert p_value(counts, probs[0].double().numpy()) < ERROR_RATE


def test_residual_of_equal_distributions_still_gives_a_token() -> None:
    probs = torch.tensor([0.5, 0.25, 0.25, 0.0])
    weights = verification.residual(probs, DraftDistribution((0, 1, 2), (32768, 16384, 16384)))
    assert torch.equal(weights, probs)
    assert torch.equal(probs, torch.tensor([0.5, 0.25, 0.25, 0.0])), "the argument was changed"
