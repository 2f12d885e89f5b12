"""Greedy and coupled text do not depend on hints; rejection keeps the target's distribution.

Block verification is checked twice: exactly, by enumerating every path a small draft can take, and by sampling. The
chi-square tests' seeds are fixed; drawn anew, all of them together would fail by chance once in 10,000 times
(Bonferroni over `NUM_TESTS`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.engine.sampling import rejection, verification
from outrider.engine.sampling.logit_processing import LogitContext
from outrider.engine.sampling.randomness import Purpose, uniform
from outrider.engine.sampling.rejection import (
    Acceptance,
    block_chances,
    draft_distribution,
    likelihood_ratio,
    residuals,
)
from outrider.engine.sampling.sampling import draft_distributions, probabilities, sample_draft
from outrider.engine.sampling.verification import Verdict
from outrider.hints.hint_tree import Branch, DraftDistribution, Hint
from outrider.sampling_params import AcceptanceRule, SamplingParams
from tests.engine.verification_cases import Case, verify_one, verify_together

NUM_TESTS = 24
ERROR_RATE = 1e-4 / NUM_TESTS
VOCAB_SIZE = 10
PARAMS = SamplingParams(temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)

Block = tuple[torch.Tensor, Sequence[Hint], int, int]  # target_probs of its rows, hints, seed, position
Chances = Callable[[Sequence[Sequence[float]], Sequence[Hint]], tuple[list[float], list[float]]]
Residual = Callable[[torch.Tensor, DraftDistribution, float], torch.Tensor]
BOTH_RULES = pytest.mark.parametrize("rule", list(AcceptanceRule), ids=lambda rule: rule.name.lower())


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


def decide(logits: torch.Tensor, hints: Sequence[Hint], params: SamplingParams, seed: int, position: int) -> Verdict:
    said = [hint.token_id for hint in hints]
    before = LogitContext(range(position), position, [said[:row] for row in range(len(logits))])
    return verify_one(logits, hints, params, seed, before)


def verify_blocks(rule: AcceptanceRule, blocks: Sequence[Block]) -> list[Verdict]:
    """The verdicts of all blocks, verified in one step in rejection mode."""
    cases = []
    for target_probs, hints, seed, position in blocks:
        said = [hint.token_id for hint in hints]
        text = LogitContext(range(position), position, [said[:row] for row in range(len(target_probs))])
        cases.append(Case(target_probs.log().float(), list(hints), PARAMS, seed, text, rule))
    return verify_together(cases)


def test_a_step_of_greedy_sequences_alone_is_decided_as_among_others() -> None:
    """Blocks with right and wrong hints, one of them for the last row or none, and sequences that decide nothing."""
    cases: list[Case] = []
    parts: list[tuple[list[Hint], list[Branch], int]] = []
    for seed in range(200):
        logits = random_logits(seed, 1 + seed % 4)
        best = logits.argmax(dim=-1).tolist()
        said = [token_id if (seed + row) % 5 else (token_id + 1) % VOCAB_SIZE for row, token_id in enumerate(best)]
        hints = [hint(token_id, node_id=1 + row) for row, token_id in enumerate(said[: len(said) - seed % 3 // 2])]
        text = LogitContext(range(9), 9, [said[:row] for row in range(len(logits))])
        cases.append(Case(logits, hints, GREEDY, 1, text, AcceptanceRule.BLOCK))
        parts += [(hints, [], len(logits)), ([], [], 0)]
    verdicts = verification.greedy_verdicts(torch.cat([case.logits for case in cases]), parts)
    assert verdicts[::2] == verify_together(cases)
    assert verdicts[1::2] == [None] * len(cases)
    assert len({len(verdict.token_ids) for verdict in verdicts[::2] if verdict is not None}) == 4


def target_at(rows: torch.Tensor, hints: Sequence[Hint]) -> list[list[float]]:
    """The target's probabilities of the tokens in each hint's draft distribution, as `rejection` takes them."""
    return [rows[row, list(draft_distribution(h).token_ids)].tolist() for row, h in enumerate(hints)]


def residual(target_probs: torch.Tensor, draft: DraftDistribution, scale: float = 1.0) -> torch.Tensor:
    """The residual weights of one row, max(0, scale * p - q).  # [vocab_size]"""
    draft_probs = torch.tensor(draft.weights, dtype=torch.float64) / draft.total
    scales = torch.tensor([[scale]], dtype=torch.float64)
    return residuals(target_probs[None], scales, torch.tensor(draft.token_ids), draft_probs)[0]


class TestChosenTokens:
    """I2: with greedy and coupled decoding hints cannot change the output."""

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
        plain = [decide(logits[i : i + 1], [], params, seed, 50 + i).token_ids[0] for i in range(num_rows)]
        num_hints = num_rows - 1 + has_free_hint
        hints = [
            hint(plain[i] if matching[i] else (plain[i] + 1) % VOCAB_SIZE, node_id=i + 1) for i in range(num_hints)
        ]
        verdict = decide(logits, hints, params, seed, 50)
        num_right = next((i for i in range(num_rows - 1) if not matching[i]), num_rows - 1)
        assert verdict.num_accepted == num_right
        assert verdict.token_ids == plain[: num_right + 1]

    def test_greedy_takes_the_first_of_equal_maxima(self) -> None:
        """As transformers does; both a row alone and a row among others."""
        logits = torch.zeros(3, VOCAB_SIZE)
        logits[:, 4] = logits[:, 7] = 1.0
        assert decide(logits, [hint(4), hint(4)], GREEDY, 0, 9).token_ids == [4, 4, 4]

    def test_coupled_text_is_a_function_of_the_seed(self) -> None:
        logits = random_logits(0, 1, 0.3).repeat(1, 1)
        texts = [[decide(logits, [], SamplingParams(seed=s), s, p).token_ids[0] for p in range(30)] for s in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]


class TestFreeLastHint:
    """ "The last position is verified too": it emits one token either way and is not counted as fed."""

    @pytest.mark.parametrize("params", [GREEDY, PARAMS, SamplingParams(seed=5)])
    def test_a_right_one_is_said_and_not_counted(self, params: SamplingParams) -> None:
        logits = torch.full((1, VOCAB_SIZE), -200.0)
        logits[0, 3] = 200.0
        verdict = decide(logits, [hint(3, DraftDistribution((3,), (65536,)))], params, 5, 10)
        assert (verdict.token_ids, verdict.num_accepted, verdict.num_matched) == ([3], 0, 1)

    @pytest.mark.parametrize("params", [GREEDY, PARAMS, SamplingParams(seed=5)])
    def test_a_wrong_one_is_replaced(self, params: SamplingParams) -> None:
        logits = torch.full((1, VOCAB_SIZE), -200.0)
        logits[0, 3] = 200.0
        verdict = decide(logits, [hint(4, DraftDistribution((4,), (65536,)))], params, 5, 10)
        assert (verdict.token_ids, verdict.num_accepted, verdict.num_matched) == ([3], 0, 0)

    def test_a_right_block_and_a_wrong_free_hint_keep_the_block(self) -> None:
        logits = torch.full((3, VOCAB_SIZE), -200.0)
        logits[0, 1] = logits[1, 2] = logits[2, 3] = 200.0
        hints = [hint(t, DraftDistribution((t,), (65536,)), i + 1) for i, t in enumerate((1, 2, 9))]
        for params in (GREEDY, PARAMS, SamplingParams(seed=5)):
            verdict = decide(logits, hints, params, 5, 10)
            assert (verdict.token_ids, verdict.num_accepted) == ([1, 2, 3], 2)


class TestDeadEnds:
    """Parameters that leave no token end the session there, not before and with no other token in its place."""

    PARAMS = (
        SamplingParams(temperature=0.0, allowed_token_ids=frozenset({1, 2}), bad_words=((1, 1), (1, 2))),
        SamplingParams(seed=3, allowed_token_ids=frozenset({1, 2}), bad_words=((1, 1), (1, 2))),
        SamplingParams(allowed_token_ids=frozenset({1, 2}), bad_words=((1, 1), (1, 2))),
    )

    @pytest.mark.parametrize("params", PARAMS)
    def test_at_the_first_position_nothing_is_said(self, params: SamplingParams) -> None:
        before = LogitContext([5, 1], 1, [[], [2]])
        verdict = verify_one(random_logits(0, 2), [hint(2)], params, 3, before)
        assert verdict == Verdict([], 0, 0)

    @pytest.mark.parametrize("params", PARAMS)
    def test_further_on_the_tokens_before_it_are_said(self, params: SamplingParams) -> None:
        logits = random_logits(0, 2)
        logits[0, 1] = 50.0
        before = LogitContext([5, 6], 1, [[], [1]])
        assert verify_one(logits, [hint(1)], params, 3, before).token_ids == [1]


class Pair:
    """A target and a draft whose next token depends on the last one; row `vocab_size` follows the prompt."""

    def __init__(self, seed: int, vocab_size: int = 8, num_entries: int = 6, noise: float = 0.7) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size + 1, vocab_size)
        self.vocab_size = vocab_size
        self.target = torch.softmax(torch.randn(shape, generator=generator), dim=-1).double()
        self.target /= self.target.sum(dim=-1, keepdim=True)
        drafts = torch.softmax(self.target.log() + noise * torch.randn(shape, generator=generator), dim=-1)
        self.drafts = draft_distributions(drafts, num_entries)

    def rows(self, last: int, hints: Sequence[Hint]) -> torch.Tensor:
        return torch.stack([self.target[token_id] for token_id in [last, *(h.token_id for h in hints)]])

    def joint(self, length: int) -> npt.NDArray[np.float64]:
        """Exact chances of the first tokens.  # [vocab_size] * length"""
        chances = self.target[self.vocab_size]
        for _ in range(length - 1):
            chances = chances[..., None] * self.target[: self.vocab_size]
        return chances.numpy()

    def all_paths(self, length: int) -> list[tuple[list[Hint], float]]:
        """Every block of hints that the draft can send, with its chance."""
        paths = []
        for token_ids in itertools.product(range(self.vocab_size), repeat=length):
            chance, hints, last = 1.0, [], self.vocab_size
            for index, token_id in enumerate(token_ids):
                distribution = self.drafts[last]
                weights = dict(zip(distribution.token_ids, distribution.weights, strict=True))
                chance *= weights.get(token_id, 0) / distribution.total
                hints.append(hint(token_id, distribution, index + 1))
                last = token_id
            if chance > 0:
                paths.append((hints, chance))
        return paths


def outcome_chances(
    pair: Pair,
    num_hints: int,
    is_last_free: bool,
    chances_of: Chances = block_chances,
    residual_of: Residual = residual,
) -> tuple[npt.NDArray[np.float64], float]:
    """Block verification without its random numbers: exact chances of the first `num_hints + 1` tokens (those that a
    step leaves open follow from the target), and the expected number of hints that hold."""
    size = pair.vocab_size
    chances = np.zeros((size,) * (num_hints + 1))
    expected = 0.0
    for hints, path_chance in pair.all_paths(num_hints):
        rows = pair.rows(size, hints)[: num_hints + (not is_last_free)]
        scales, acceptance = chances_of(target_at(rows, hints), hints)
        for held in range(num_hints + 1):
            reached = path_chance * (acceptance[held - 1] if held else 1.0)
            reached *= float(np.prod([1.0 - chance for chance in acceptance[held:]]))
            expected += reached * held
            said = tuple(h.token_id for h in hints[:held])
            if held < num_hints:
                weights = residual_of(rows[held], draft_distribution(hints[held]), scales[held])
                following = (weights / weights.sum()).numpy()
            else:
                following = pair.target[said[-1]].numpy()
            tail = following
            for _ in range(num_hints - held):
                tail = tail[..., None] * pair.target[:size].numpy()
            chances[said] += reached * tail
    return chances, expected


class TestBlockVerificationExactly:
    """Sun et al. 2403.10444, by enumeration: no random numbers, no error rate."""

    @pytest.mark.parametrize("is_last_free", [False, True])
    @pytest.mark.parametrize(("seed", "num_entries"), [(1, 3), (2, 2), (3, 1)])
    @pytest.mark.parametrize("num_hints", [1, 2, 3])
    def test_the_output_is_distributed_as_the_targets(
        self, num_hints: int, seed: int, num_entries: int, is_last_free: bool
    ) -> None:
        pair = Pair(seed, vocab_size=3, num_entries=num_entries)
        chances, _ = outcome_chances(pair, num_hints, is_last_free)
        assert np.abs(chances - pair.joint(num_hints + 1)).max() < 1e-12

    @pytest.mark.parametrize("seed", range(6))
    def test_it_accepts_at_least_as_much_as_token_by_token_and_mostly_more(self, seed: int) -> None:
        pair = Pair(seed, vocab_size=3, num_entries=3)
        _, by_block = outcome_chances(pair, 3, False)
        by_token = 0.0
        for hints, path_chance in pair.all_paths(3):
            rows, held = pair.rows(3, hints), 1.0
            for own, each in zip(target_at(rows, hints), hints, strict=True):
                held *= min(likelihood_ratio(own, draft_distribution(each), each.token_id), 1.0)
                by_token += path_chance * held
        assert by_block >= by_token + 1e-4

    def test_a_hint_that_did_not_hold_is_never_said_in_its_place(self) -> None:
        """Else a draft whose tree follows the committed tokens would have hints judged twice."""
        pair = Pair(5, vocab_size=4, num_entries=4)
        for hints, _ in pair.all_paths(3):
            rows = pair.rows(4, hints)
            scales, acceptance = block_chances(target_at(rows, hints), hints)
            for held in range(3):
                is_reached = held == 0 or acceptance[held - 1] > 0.0
                if is_reached and acceptance[held] < 1.0:
                    weights = residual(rows[held], draft_distribution(hints[held]), scales[held])
                    assert float(weights[hints[held].token_id]) < 1e-12


Q_FAR = draft_distributions(torch.softmax(random_logits(101, 1), -1), 32)[0]
Q_CUT = draft_distributions(torch.softmax(random_logits(102, 1), -1), 3, bits=6)[0]


def single_position_counts(
    rule: AcceptanceRule,
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
    probs = probabilities(random_logits(seed, 1), params)
    rows = probs.repeat(2, 1) if fed else probs
    blocks: list[Block] = []
    for position in range(num_samples):
        token_id = sample_draft(draft, seed + 1, position)
        blocks.append((rows, [hint(token_id, draft if sends_distribution else None)], seed, position))
    return first_tokens(verify_blocks(rule, blocks)), probs[0].double().numpy()


def first_tokens(verdicts: Sequence[Verdict]) -> npt.NDArray[np.int64]:
    """How often each token is the first."""
    return np.bincount([verdict.token_ids[0] for verdict in verdicts], minlength=VOCAB_SIZE)


@BOTH_RULES
class TestRejectionKeepsTheTargetsDistribution:
    """I2 for sampling."""

    @pytest.mark.parametrize("fed", [True, False], ids=["fed hint", "free last hint"])
    def test_honest_distribution(self, rule: AcceptanceRule, fed: bool) -> None:
        assert p_value(*single_position_counts(rule, 1, 20_000, Q_FAR, fed=fed)) > ERROR_RATE

    def test_truncated_and_quantized_distribution(self, rule: AcceptanceRule) -> None:
        """The draft samples from what it sends (I5), three tokens in sixty-fourths."""
        assert p_value(*single_position_counts(rule, 2, 20_000, Q_CUT)) > ERROR_RATE

    def test_filtered_target(self, rule: AcceptanceRule) -> None:
        """The draft proposes tokens that the target's top-k forbids; the helper checks that none is said."""
        assert p_value(*single_position_counts(rule, 3, 20_000, Q_FAR, top_k=4)) > ERROR_RATE

    def test_sampled_hint_without_its_distribution(self, rule: AcceptanceRule) -> None:
        """Taken as certain: costs acceptance, not exactness."""
        counts = single_position_counts(rule, 4, 20_000, Q_FAR, sends_distribution=False)
        assert p_value(*counts) > ERROR_RATE

    @pytest.mark.parametrize("rank", [0, 5])
    def test_point_mass(self, rule: AcceptanceRule, rank: int) -> None:
        """A lookup's guess, likely or unlikely."""
        guess = int(torch.argsort(random_logits(5, 1)[0], descending=True)[rank])
        certain = DraftDistribution((guess,), (65536,))
        assert p_value(*single_position_counts(rule, 5, 10_000, certain)) > ERROR_RATE

    def test_accepted_share_is_the_overlap_of_the_distributions(self, rule: AcceptanceRule) -> None:
        """Leviathan et al. 2211.17192, theorem 3.5: sum of min(p, q); of a single hint a block accepts no more."""
        probs = probabilities(random_logits(9, 2), PARAMS)
        blocks = [(probs, [hint(sample_draft(Q_FAR, 5, i), Q_FAR)], 6, i) for i in range(10_000)]
        num_accepted = sum(verdict.num_accepted for verdict in verify_blocks(rule, blocks))
        draft = torch.zeros(VOCAB_SIZE)
        draft[list(Q_FAR.token_ids)] = torch.tensor(Q_FAR.weights) / Q_FAR.total
        expected = float(torch.minimum(probs[0], draft).sum())
        deviation = np.sqrt(10_000 * expected * (1 - expected))
        assert abs(num_accepted - 10_000 * expected) < 4.5 * deviation


def test_a_plain_token_follows_the_targets_distribution() -> None:
    logits = random_logits(6, 1)
    probs = probabilities(logits, PARAMS)
    blocks: list[Block] = [(probs, [], 8, position) for position in range(20_000)]
    counts = first_tokens(verify_blocks(AcceptanceRule.BLOCK, blocks))
    assert p_value(counts, probabilities(logits, PARAMS)[0].double().numpy()) > ERROR_RATE


def joint_counts(
    pair: Pair,
    rule: AcceptanceRule,
    num_samples: int,
    num_fed: int,
    num_hints: int,
    *,
    reuses_draws: bool = False,
) -> npt.NDArray[np.int64]:
    """Three tokens per sample, decided in as many steps as it takes, with hints drawn again in every step.

    Draws are numbered so that none comes back, as the draft worker numbers them, or after their position where
    `reuses_draws`. The samples are the sequences of each step.
    """
    size = pair.vocab_size
    texts = [[size] for _ in range(num_samples)]
    draws = itertools.count()
    while unfinished := [sample for sample, text in enumerate(texts) if len(text) < 4]:
        blocks: list[Block] = []
        for sample in unfinished:
            text, start = texts[sample], 10 * sample
            hints, last = [], text[-1]
            for index in range(num_hints):
                draw = next(draws)
                distribution = pair.drafts[last]
                last = sample_draft(distribution, 77, start + len(text) + index if reuses_draws else draw)
                hints.append(hint(last, distribution, index + 1))
            blocks.append((pair.rows(text[-1], hints[:num_fed]), hints, 3, start + len(text)))
        for sample, verdict in zip(unfinished, verify_blocks(rule, blocks), strict=True):
            texts[sample] += verdict.token_ids
    counts = np.zeros((size,) * 3, dtype=np.int64)
    for text in texts:
        counts[tuple(text[1:4])] += 1
    return counts


@BOTH_RULES
@pytest.mark.parametrize(
    ("num_fed", "num_hints"),
    [(3, 3), (1, 2), (2, 2), (0, 1)],
    ids=["longer than the sample", "block and free hint", "all fed", "free hints only"],
)
def test_joint_distribution_over_several_steps(rule: AcceptanceRule, num_fed: int, num_hints: int) -> None:
    pair = Pair(1, vocab_size=4, num_entries=3)
    counts = joint_counts(pair, rule, 8_000, num_fed, num_hints)
    assert p_value(counts.reshape(-1), pair.joint(3).reshape(-1)) > ERROR_RATE


class TestTheTestsCanFail:
    """The same checks notice a wrong rule, with fewer samples."""

    @BOTH_RULES
    def test_accepting_more_than_p_over_q(self, rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch) -> None:
        right = rejection.likelihood_ratio
        monkeypatch.setattr(rejection, "likelihood_ratio", lambda p, q, token: right(p, q, token) * 1.4)
        assert p_value(*single_position_counts(rule, 1, 4000, Q_FAR)) < ERROR_RATE

    @BOTH_RULES
    def test_recovering_from_p_instead_of_the_residual(
        self, rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verification, "residuals", lambda rows, *_: rows)
        assert p_value(*single_position_counts(rule, 1, 4000, Q_FAR)) < ERROR_RATE

    def test_a_residual_that_forgets_the_blocks_scale(self) -> None:
        pair = Pair(2, vocab_size=3, num_entries=3)
        chances, _ = outcome_chances(pair, 2, False, residual_of=lambda p, q, scale: residual(p, q, 1.0))
        assert np.abs(chances - pair.joint(3)).max() > 1e-4

    @BOTH_RULES
    def test_one_random_number_for_all_decisions(self, rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch) -> None:
        """Purposes must differ (I6)."""
        monkeypatch.setattr(rejection, "uniform", lambda seed, position, *_: uniform(seed, position, Purpose.ACCEPT))
        assert p_value(*single_position_counts(rule, 1, 4000, Q_FAR)) < ERROR_RATE

    @pytest.mark.thorough
    def test_hints_drawn_with_numbers_that_a_verdict_has_seen(self) -> None:
        """A block's verdict depends on all of its hints, so a redrawn one must be new (not so token by token)."""
        pair = Pair(1, vocab_size=4, num_entries=3, noise=1.5)
        counts = joint_counts(pair, AcceptanceRule.BLOCK, 20_000, 3, 3, reuses_draws=True)
        assert p_value(counts.reshape(-1), pair.joint(3).reshape(-1)) < ERROR_RATE

    @BOTH_RULES
    def test_a_draft_that_does_not_sample_from_what_it_sends(self, rule: AcceptanceRule) -> None:
        """A hint that is the likeliest token, reported with the whole distribution, which I5 forbids."""
        probs = probabilities(random_logits(1, 1), PARAMS)
        blocks = [(probs, [hint(Q_FAR.token_ids[0], Q_FAR)], 2, position) for position in range(4000)]
        assert p_value(first_tokens(verify_blocks(rule, blocks)), probs[0].double().numpy()) < ERROR_RATE

    @BOTH_RULES
    def test_a_draft_that_truncates_after_sampling(self, rule: AcceptanceRule) -> None:
        """Sampled from everything, sent as if from the likeliest three, the first of which stands for others."""
        probs = probabilities(random_logits(1, 1), PARAMS)
        sent = DraftDistribution(Q_FAR.token_ids[:3], Q_FAR.weights[:3])
        blocks: list[Block] = []
        for position in range(20_000):
            token_id = sample_draft(Q_FAR, 4, position)
            kept = token_id if token_id in sent.token_ids else sent.token_ids[0]
            blocks.append((probs, [hint(kept, sent)], 2, position))
        assert p_value(first_tokens(verify_blocks(rule, blocks)), probs[0].double().numpy()) < ERROR_RATE

    def test_a_chance_that_is_a_little_too_great_is_seen_by_enumeration(self) -> None:
        def too_great(target_at: Sequence[Sequence[float]], hints: Sequence[Hint]) -> tuple[list[float], list[float]]:
            scales, acceptance = block_chances(target_at, hints)
            return scales, [min(1.02 * chance, 1.0) for chance in acceptance]

        pair = Pair(1, vocab_size=3, num_entries=3)
        chances, _ = outcome_chances(pair, 2, False, too_great)
        assert np.abs(chances - pair.joint(3)).max() > 1e-4


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_the_request_chooses_the_rule(rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def noted(name: str) -> Callable[..., Acceptance]:
        right = getattr(rejection, name)

        def call(*args: Any) -> Acceptance:
            called.append(name)
            return right(*args)

        return call

    for name in ("accept_block", "accept_tokens"):
        monkeypatch.setattr(rejection, name, noted(name))
    before = LogitContext([1], 1, [[]])
    verify_one(random_logits(0, 1), [hint(1)], PARAMS, 0, before, rule)
    assert called == ["accept_block" if rule is AcceptanceRule.BLOCK else "accept_tokens"]


def test_residual_of_equal_distributions_still_gives_a_token() -> None:
    probs = torch.tensor([0.5, 0.25, 0.25, 0.0])
    weights = residual(probs, DraftDistribution((0, 1, 2), (32768, 16384, 16384)))
    assert torch.equal(weights, probs.double())
    assert torch.equal(probs, torch.tensor([0.5, 0.25, 0.25, 0.0])), "the argument was changed"
