"""I2 for every sampling parameter, whatever the draft says: real cores against an independent reference.

Greedy and coupled text is equal, token by token, to what transformers' model and processors give without cache and
without speculation. Where the reference's own two best choices lie within `NEAR_TIE` of each other, rounding may
decide, and what follows is not compared.

Sampled text has the reference's exact joint distribution, by chi-square tests of whole outputs and of neighbouring
tokens. A family of such tests, all those that one run of `make test` or of `make test-long` makes, fails by chance
once in 10,000 runs: each is held to 1e-4 over the number of tests in its family. They are seeded, too, and no clock
has a say: what passed once passes again as long as the program is the same.
"""

from __future__ import annotations

import collections
import functools
import math
import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from scipy import stats

from outrider.engine.sampling.randomness import mix
from outrider.sampling_params import SamplingParams
from tests.exactness.cases import (
    LARGE_CASES,
    LARGE_PROMPTS,
    SMALL_CASES,
    SMALL_PROMPT,
    WARPERS,
    large_params,
    small_params,
)
from tests.exactness.drafts import DRAFTS, LyingDraft, make_draft
from tests.exactness.finite_language import LARGE_LANGUAGE, SMALL_LANGUAGE, FiniteLanguage
from tests.exactness.in_process import (
    LARGE,
    SMALL,
    Bridge,
    Draft,
    Manner,
    Request,
    Result,
    reference,
)
from tests.exactness.reference import Ending, Outcome, Output

MODES = ("greedy", "coupled")
RULES = ("block", "token")
SAMPLED = [("none", "block"), *((draft, rule) for draft in DRAFTS[1:] for rule in RULES)]
"""Without hints there is nothing for a rule to decide."""
NEAR_TIE = 1e-4
LONG_BLOCKS = SamplingParams(max_tokens=6, temperature=1.5, top_k=3, ignore_eos=True)
FAMILY_ERROR_RATE = 1e-4
FAMILY_SIZE = len(SMALL_CASES) * (len(SAMPLED) + 1) + (len(DRAFTS) - 1) * len(RULES)
"""With the cases of `test_prediction`."""
MOST_STATISTICS = LONG_BLOCKS.max_tokens  # of one test
BATCH = 2000  # sessions of one pair of workers
NUM_SESSIONS = 400  # of each sampled case in the default run
NUM_LONG_TOKENS = 30_000
NUM_LONG_BLOCK_SESSIONS = 100_000

ValueT = TypeVar("ValueT", bound=Hashable)


def luck_of(*names: object) -> int:
    """A number for each test, the same in every run."""
    return zlib.crc32(repr(names).encode())


def language_of(case: str, language: FiniteLanguage) -> FiniteLanguage | None:
    return language if case.startswith("grammar") else None


# Greedy and coupled.


@functools.cache
def expected_outputs(case: str, mode: str) -> list[Output]:
    params = large_params(case, mode)
    decode = reference(LARGE).greedy if mode == "greedy" else reference(LARGE).coupled
    language = language_of(case, LARGE_LANGUAGE)
    mask = None if language is None else language.mask
    return [decode(prompt, params, mask) for prompt in LARGE_PROMPTS]


def run_texts(case: str, mode: str, draft: str, manner: Manner, *, are_moved: bool = False) -> list[Result]:
    """Two sessions of each prompt, all of them at once; in the order of the prompts, twice.

    Those that `are_moved` come with half of their text, which another worker said.
    """
    params = large_params(case, mode)
    luck = luck_of(case, mode, draft, manner)
    language = language_of(case, LARGE_LANGUAGE)
    seed = params.seed if params.seed is not None and mode == "coupled" else luck
    requests = [
        Request(
            f"{prefix}{len(prompt)}",
            prompt,
            params,
            seed,
            right_text=tuple(output.token_ids),
            num_given=len(output.token_ids) // 2 if are_moved else 0,
            grammar=None if language is None else language.grammar,
        )
        for prefix in ("a", "b")
        for prompt, output in zip(LARGE_PROMPTS, expected_outputs(case, mode), strict=True)
    ]
    return Bridge(LARGE, make_draft(draft, LARGE, luck), luck, manner).run(requests)


def check_same(result: Result, expected: Output) -> None:
    """Equal up to the first near tie of the reference, and beyond it if nothing differs."""
    said = [*result.token_ids, result.ending]
    right = [*expected.token_ids, expected.ending]
    if said == right:
        return
    first = next(index for index, (a, b) in enumerate(zip(said, right, strict=False)) if a != b)
    margin = expected.margins[first] if first < len(expected.margins) else float("inf")
    assert margin < NEAR_TIE, (
        f"token {first} is {said[first]}, the reference says {right[first]} by {margin:.3g}; {said=} {right=}"
    )


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", LARGE_CASES)
def test_text_is_that_of_the_reference(case: str, mode: str, draft: str) -> None:
    """I2, greedy and coupled: with any draft, hints at any time, drafts that come, go and fall silent."""
    manner = Manner(unrest=0.0 if draft == "none" else 0.02)
    for result, expected in zip(run_texts(case, mode, draft, manner), expected_outputs(case, mode) * 2, strict=True):
        check_same(result, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", LARGE_CASES)
def test_a_session_that_moved_goes_on_as_if_it_had_not(case: str, mode: str) -> None:
    """Tokens that another worker committed count as output: for penalties, bad words, min_tokens and the grammar."""
    results = run_texts(case, mode, "good", Manner(), are_moved=True)
    for result, expected in zip(results, expected_outputs(case, mode) * 2, strict=True):
        check_same(result, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [case for case in LARGE_CASES if case != "max-tokens-1"])
def test_a_draft_equal_to_its_target_is_accepted(case: str, mode: str) -> None:
    """95 % or better: the draft applies every parameter as its target does."""
    verified = accepted = forced = 0
    for result in run_texts(case, mode, "self", Manner(on_time=1.0, has_branches=False)):
        assert result.ended is not None
        counts = result.hint_counts()
        verified += counts[0]
        accepted += counts[1]
        forced += result.ended.stats.num_forced_tokens
    if case.startswith("grammar"):
        assert verified + forced >= 2  # its texts are short, and mostly forced
    else:
        assert verified >= 20
    assert accepted >= 0.95 * verified


@pytest.mark.parametrize("mode", MODES)
def test_a_good_draft_is_right_mostly_and_wrong_at_times(mode: str) -> None:
    """Else the tests above would show little."""
    counts = [result.hint_counts() for result in run_texts("none", mode, "good", Manner(on_time=1.0))]
    share = sum(accepted for _, accepted in counts) / sum(verified for verified, _ in counts)
    assert 0.3 < share < 0.9


@pytest.mark.parametrize("mode", MODES)
def test_a_draft_worker_and_a_memory_worker_are_both_of_use(mode: str) -> None:
    """Some session uses both at once, or the tests above would show little."""
    ended = [result.ended for result in run_texts("ignore-eos", mode, "good+memory", Manner(on_time=1.0))]
    counts = [
        (each.stats.num_accepted_draft_tokens, each.stats.num_memory_tokens) for each in ended if each is not None
    ]
    assert any(drafted and remembered for drafted, remembered in counts), counts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", LARGE_CASES)
def test_every_parameter_matters(case: str, mode: str) -> None:
    """A parameter that changed no text would be tested by nobody."""
    texts = [(output.token_ids, output.ending) for output in expected_outputs(case, mode)]
    plain = [(output.token_ids, output.ending) for output in expected_outputs("none", mode)]
    is_without_effect = case == "none" or (mode == "greedy" and case in WARPERS)
    assert (texts == plain) == is_without_effect


# Rejection sampling.


@functools.cache
def expected_distribution(params: SamplingParams, language: FiniteLanguage | None = None) -> dict[Outcome, float]:
    return reference(SMALL).joint(SMALL_PROMPT, params, None if language is None else language.mask)


@dataclass(slots=True)
class Drawn:
    """How often each output came, how many hints were verified, and how many of these held."""

    counts: collections.Counter[Outcome] = field(default_factory=collections.Counter)
    verified: int = 0
    accepted: int = 0


def draw(
    params: SamplingParams,
    make: Callable[[int], Draft | None],
    rule: str,
    num_sessions: int,
    luck: int,
    on_time: float = 0.5,
    language: FiniteLanguage | None = None,
) -> Drawn:
    """`make` is given a new number for each batch of sessions, and their draft is what it returns."""
    drawn = Drawn()
    grammar = None if language is None else language.grammar
    for start in range(0, num_sessions, BATCH):
        batch = mix(luck ^ start)
        requests = [
            Request(f"s{index}", SMALL_PROMPT, params, seed=mix(batch ^ index), rule=rule, grammar=grammar)
            for index in range(min(BATCH, num_sessions - start))
        ]
        for result in Bridge(SMALL, make(batch), batch, Manner(on_time, unrest=0.01)).run(requests):
            assert result.ended is not None
            drawn.counts[tuple(result.token_ids), result.ending] += 1
            stats = result.ended.stats
            drawn.verified += stats.num_draft_tokens + stats.num_memory_tokens
            drawn.accepted += stats.num_accepted_draft_tokens + stats.num_memory_tokens
    assert drawn.counts.total() == num_sessions
    return drawn


def chi_square_p(counts: Mapping[ValueT, float], expected: Mapping[ValueT, float]) -> float:
    """The p-value of the counts under the expected distribution; rare values are merged until 5 are expected."""
    assert counts.keys() <= expected.keys(), f"came and cannot come: {counts.keys() - expected.keys()}"
    total = sum(counts.values())
    observed_cells, expected_cells = [0.0], [0.0]
    for value, probability in sorted(expected.items(), key=lambda item: item[1]):
        if expected_cells[-1] >= 5:
            observed_cells.append(0.0)
            expected_cells.append(0.0)
        observed_cells[-1] += counts.get(value, 0)
        expected_cells[-1] += probability * total
    if expected_cells[-1] < 5:
        observed_cells[-2:] = [sum(observed_cells[-2:])]
        expected_cells[-2:] = [sum(expected_cells[-2:])]
    if len(expected_cells) == 1:
        return 1.0
    scale = total / sum(expected_cells)
    return float(stats.chisquare(observed_cells, [value * scale for value in expected_cells]).pvalue)


def p_values(counts: Mapping[Outcome, float], expected: Mapping[Outcome, float], num_tokens: int) -> list[float]:
    """The p-values of whole outputs and of every two neighbouring tokens, which take fewer values: a sharper test."""
    values = [chi_square_p(counts, expected)]
    for place in range(max(num_tokens - 1, 1)):
        values.append(chi_square_p(neighbours(counts, place), neighbours(expected, place)))
    return values


def neighbours(weights: Mapping[Outcome, float], place: int) -> dict[Hashable, float]:
    """Weights of the pairs of tokens at `place` and after it; the ending counts as a token."""
    pairs: dict[Hashable, float] = {}
    for (token_ids, ending), weight in weights.items():
        pair = (*token_ids, ending)[place : place + 2]
        pairs[pair] = pairs.get(pair, 0.0) + weight
    return pairs


def check_distribution(drawn: Drawn, params: SamplingParams, language: FiniteLanguage | None) -> None:
    expected = expected_distribution(params, language)
    values = p_values(drawn.counts, expected, params.max_tokens)
    assert min(values) > FAMILY_ERROR_RATE / (FAMILY_SIZE * MOST_STATISTICS), values


def check_case(case: str, draft: str, rule: str, num_sessions: int) -> None:
    params, luck = small_params(case), luck_of(case, draft, rule, num_sessions)
    language = language_of(case, SMALL_LANGUAGE)
    drawn = draw(
        params,
        lambda batch: make_draft(draft, SMALL, batch),
        rule,
        num_sessions,
        luck,
        language=language,
    )
    if draft == "none":
        assert drawn.verified == 0
    elif params.max_tokens > 1:
        least = num_sessions / (20 if draft == "head" else 10)  # a random head is hardly ever right
        assert drawn.verified > least, "hints were hardly used, so this shows nothing"
        has_one_text = case == "top-p-0"  # which a random head need not say
        assert drawn.accepted > 0 or (draft == "head" and has_one_text)
    check_distribution(drawn, params, language)


@pytest.mark.parametrize(
    ("draft", "rule"),
    [pytest.param(*each, marks=pytest.mark.thorough if each[1] == "token" else ()) for each in SAMPLED],
)
@pytest.mark.parametrize("case", SMALL_CASES)
def test_samples_follow_the_reference(case: str, draft: str, rule: str) -> None:
    """I2, rejection: the joint distribution of whole outputs. Error rate: 1e-4 for all of them together."""
    check_case(case, draft, rule, NUM_SESSIONS)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("draft", "rule"), SAMPLED)
@pytest.mark.parametrize("case", SMALL_CASES)
def test_many_samples_follow_the_reference(case: str, draft: str, rule: str) -> None:
    """30,000 tokens each, 210,000 of each case. Error rate: 1e-4 for all of them together."""
    expected = expected_distribution(small_params(case), language_of(case, SMALL_LANGUAGE))
    mean_len = sum(max(len(token_ids), 1) * weight for (token_ids, _), weight in expected.items())
    check_case(case, draft, rule, math.ceil(NUM_LONG_TOKENS / mean_len))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_long_blocks_leave_the_distribution_as_it_is(draft: str, rule: str) -> None:
    """Blocks of up to five hints, most of them cut short: 600,000 tokens each. Error rate: as above.

    A rejected block's later hints must not be heard of again. Numbers that once decided on them and are used anew
    for the same positions bias the text so little that it takes as many tokens to see it.
    """
    luck = luck_of(draft, rule)
    drawn = draw(LONG_BLOCKS, lambda batch: make_draft(draft, SMALL, batch), rule, NUM_LONG_BLOCK_SESSIONS, luck, 1.0)
    assert drawn.verified > NUM_LONG_BLOCK_SESSIONS / 2
    check_distribution(drawn, LONG_BLOCKS, None)


@pytest.mark.parametrize("case", ["temperature-0.5", "temperature-1.7", "presence-penalty", "logit-bias"])
def test_another_distribution_would_be_noticed(case: str) -> None:
    """As many samples as the default run draws of each case tell parameters apart."""
    plain, other = small_params("none"), small_params(case)
    drawn = draw(plain, lambda batch: None, "block", NUM_SESSIONS, luck=1)
    values = p_values(drawn.counts, expected_distribution(other), other.max_tokens)
    assert min(values) < FAMILY_ERROR_RATE / (FAMILY_SIZE * MOST_STATISTICS)


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_breaks_its_word_would_be_noticed(rule: str) -> None:
    """I5 is what exactness rests on: hints that were not sampled from what they carry do bias the text."""
    params = small_params("none")
    drawn = draw(params, lambda batch: LyingDraft(SMALL.vocab_size, batch), rule, NUM_SESSIONS, luck=1)
    values = p_values(drawn.counts, expected_distribution(params), params.max_tokens)
    assert min(values) < FAMILY_ERROR_RATE / (FAMILY_SIZE * MOST_STATISTICS)


def test_texts_end_in_every_way() -> None:
    """The cases together reach every ending."""
    endings = {ending for case in SMALL_CASES for _, ending in expected_distribution(small_params(case))}
    assert {Ending(), Ending(6), Ending(3), Ending(is_stuck=True)} <= endings
