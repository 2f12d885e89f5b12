"""Local hints: the longest match in bounded memory and work, a function of what stands before (I4, I7)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from target_worker.hints.local_source import MAX_READ, NO_PROPOSAL, MatchAcceptance, Proposal
from target_worker.hints.lookup import PRIOR_RATES, LookupHints, RecentOutputs
from target_worker.hints.token_index import MAX_CANDIDATES, MAX_MATCH, NOWHERE, TokenIndex

TOKENS = st.integers(0, 2)
CHUNKS = st.lists(st.lists(TOKENS, max_size=12), max_size=8)
OUTPUTS = st.lists(st.tuples(st.sampled_from("ab"), st.lists(TOKENS, max_size=14)), max_size=12)


def reference(
    text: Sequence[int],
    said: Sequence[int],
    max_len: int,
    min_match: int,
    max_match: int,
    max_candidates: int,
) -> tuple[list[int], int]:
    """`TokenIndex.continuation`, by looking everywhere and copying token by token."""
    whole = [*text, *said]
    if len(whole) < min_match or max_len <= 0:
        return [], 0
    found = []
    for place in range(len(text) - 1, min_match - 1, -1):
        if list(text[place - min_match : place]) == whole[-min_match:]:
            lengths = range(min_match, min(place, max_match, len(whole)) + 1)
            found.append((max(n for n in lengths if text[place - n : place] == whole[-n:]), place))
    if not found:
        return [], 0
    match_len, place = max(found[:max_candidates])
    for i in range(max_len):
        whole.append(whole[place + i])
    return whole[-max_len:], match_len


def hints_of(text: Sequence[int], recent: RecentOutputs | None = None, scope: str = "") -> LookupHints:
    hints = LookupHints(recent, scope)
    while not hints.read(text):
        pass
    return hints


def recent_of(*outputs: Sequence[int], scope: str = "", max_tokens: int = 4096) -> RecentOutputs:
    recent = RecentOutputs(max_tokens=max_tokens)
    for output in outputs:
        recent.add(output, scope)
    while recent.num_unread_tokens:
        recent.read_some()
    return recent


class CountedToken(int):
    """A token that counts how often one of its kind is compared or hashed. No two are the same object."""

    num_operations: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        CountedToken.num_operations += 1
        return int.__eq__(self, other)

    def __hash__(self) -> int:
        CountedToken.num_operations += 1
        return int.__hash__(self)


def counted(token_ids: Sequence[int]) -> list[int]:
    return [CountedToken(token_id) for token_id in token_ids]


def operations_of(call: Callable[[], object]) -> int:
    before = CountedToken.num_operations
    call()
    return CountedToken.num_operations - before


# The index of one text.


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    CHUNKS,
    st.lists(TOKENS, max_size=9),
    st.integers(0, 12),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 5),
)
def test_longest_match_among_the_latest_wins_and_is_copied(
    chunks: list[list[int]], said: list[int], max_len: int, min_match: int, more: int, max_candidates: int
) -> None:
    index = TokenIndex(min_match=min_match, max_match=min_match + more, max_candidates=max_candidates)
    text: list[int] = []
    for chunk in chunks:
        index.append(chunk)
        text += chunk
        expected = reference(text, said, max_len, min_match, min_match + more, max_candidates)
        assert index.continuation(said, max_len) == expected
    assert len(index) == len(text)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(TOKENS, max_size=40), st.lists(st.integers(0, 40), max_size=5), st.lists(TOKENS, max_size=4))
def test_how_a_text_was_divided_does_not_matter(text: list[int], cuts: list[int], said: list[int]) -> None:
    whole, divided = TokenIndex(), TokenIndex()
    whole.append(text)
    for start, end in itertools.pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        divided.append(text[start:end])
    assert divided.continuation(said, 8) == whole.continuation(said, 8)


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3]])
def test_text_without_a_match_proposes_nothing(text: list[int]) -> None:
    index = TokenIndex()
    index.append(text)
    assert index.continuation([], 4) == ([], 0)
    assert index.find([]) == (NOWHERE, 0)


def test_periodic_text_goes_on_beyond_its_own_end() -> None:
    index = TokenIndex()
    index.append([1, 2, 1, 2, 1])
    assert index.continuation([], 7) == ([2, 1, 2, 1, 2, 1, 2], 3)


def test_period_runs_on_through_what_was_said() -> None:
    index = TokenIndex()
    index.append([1, 2, 3, 1, 2])
    assert index.continuation([3, 1, 2], 5) == ([3, 1, 2, 3, 1], 2)


def test_run_of_one_token_goes_on_and_matches_no_more_than_allowed() -> None:
    index = TokenIndex()
    index.append([7] * 5000)
    assert index.continuation([], 9) == ([7] * 9, MAX_MATCH)


def test_latest_of_equal_matches_wins() -> None:
    index = TokenIndex()
    index.append([1, 2, 8, 1, 2, 9, 1, 2])
    assert index.continuation([], 1) == ([9], 2)


def test_longer_match_wins_over_a_later_one() -> None:
    index = TokenIndex()
    index.append([5, 1, 2, 8, 4, 1, 2, 9, 5, 1, 2])
    assert index.continuation([], 1) == ([8], 3)


def test_large_token_ids_are_told_apart() -> None:
    index = TokenIndex()
    index.append([2**31, 2**32 - 1, 5, 0, 2**32 - 1, 6, 2**31, 2**32 - 1])
    assert index.continuation([], 1) == ([5], 2)


@pytest.mark.parametrize("limits", [(0, 4, 1), (3, 2, 1), (2, 4, 0)])
def test_impossible_limits_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must hold"):
        TokenIndex(min_match=limits[0], max_match=limits[1], max_candidates=limits[2])


# What it costs, in operations on tokens.


def test_reading_costs_the_same_for_every_token() -> None:
    index = TokenIndex()
    for _ in range(20):
        text = counted([*range(300), *[7] * 300, *range(100)])
        # Each gram of two is looked up and set: hashed twice, compared twice with the gram that is there.
        assert operations_of(lambda: index.append(text)) <= 8 * len(text)  # noqa: B023


@pytest.mark.parametrize("size", [300, 30_000])
@pytest.mark.parametrize("kind", ["distinct", "run", "growing"])
def test_search_costs_no_more_in_a_longer_text(kind: str, size: int) -> None:
    phrase = list(range(100, 100 + MAX_MATCH))
    growing = [token_id for n in range(MAX_MATCH, 1, -1) for token_id in (1, *phrase[-n:], 2)]
    text = {
        "distinct": range(size),
        "run": [7] * size,
        "growing": [*(growing * (size // len(growing))), *phrase],
    }
    hints = hints_of(counted(text[kind]))
    committed = counted(text[kind])
    limit = {"distinct": 8, "run": 8 * MAX_MATCH, "growing": MAX_CANDIDATES * (MAX_MATCH + 8)}
    assert operations_of(lambda: hints.propose(committed, [], 9)) <= limit[kind]


def test_long_prompt_is_read_a_bounded_part_at_a_time() -> None:
    text = [1, 2, 3] * MAX_READ
    hints = LookupHints()
    assert hints.propose(text[:-2], [], 4) == NO_PROPOSAL
    assert hints.propose(text[:-1], [], 4) == NO_PROPOSAL
    assert hints.propose(text, [], 4).token_ids == [1, 2, 3, 1]


def test_how_often_a_step_asks_does_not_decide_what_was_read() -> None:
    """A step that waits for drawn hints asks as often as some come: that follows from their values (I4)."""
    text = [1, 2, 3] * MAX_READ
    hints = LookupHints()
    assert [hints.propose(text, [], 4) for _ in range(9)] == [NO_PROPOSAL] * 9


# Outputs of other sessions.


def test_recent_output_is_found_where_the_own_text_says_nothing() -> None:
    hints = hints_of([9, 1, 2, 3], recent_of([8, 1, 2, 3, 4, 5, 6]))
    assert hints.propose([9, 1, 2, 3], [], 2) == Proposal([4, 5], 3, is_recent=True)


def test_longer_match_wins_and_the_own_text_among_equals() -> None:
    text = [1, 2, 3, 7, 1, 2, 3]
    assert hints_of(text, recent_of([1, 2, 3, 4])).propose(text, [], 1) == Proposal([7], 3)
    assert hints_of(text, recent_of([7, 1, 2, 3, 4])).propose(text, [], 1) == Proposal([4], 4, is_recent=True)


def test_latest_output_wins_among_equals_across_segments() -> None:
    recent = recent_of([1, 2, 3, 4, 5, 6, 7], [1, 2, 8, 4, 5, 6, 7], max_tokens=32)
    assert len(recent._scopes) == 2
    assert recent.continuation([1, 2], 2) == ([8, 4], 2)


def test_output_that_ended_there_is_passed_over_for_one_that_went_on() -> None:
    recent = recent_of([1, 2, 3], [4, 1, 2], [5, 6, 7])
    assert recent.continuation([4, 1, 2], 2) == ([3], 2)


def test_match_and_continuation_stay_within_one_output() -> None:
    recent = recent_of([1, 2, 3], [4, 5, 6])
    assert recent.continuation([1, 2], 4) == ([3], 2)
    assert recent.continuation([2, 3], 4) == ([], 0)
    assert recent.continuation([3, 4], 4) == ([], 0)
    assert recent.continuation([3, 4, 5], 4) == ([6], 2)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(OUTPUTS, st.lists(TOKENS, min_size=1, max_size=6), st.integers(1, 9), st.sampled_from([24, 64, 4096]))
def test_scopes_see_their_own_outputs_only_and_each_in_one_piece(
    outputs: list[tuple[str, list[int]]], window: list[int], max_read: int, max_tokens: int
) -> None:
    recent = RecentOutputs(max_tokens=max_tokens)
    for scope, output in outputs:
        offset = 10 if scope == "b" else 0
        recent.add([token_id + offset for token_id in output], scope)
        recent.read_some(max_read)
    for scope, offset in (("a", 0), ("b", 10)):
        own = [[token_id + offset for token_id in output] for name, output in outputs if name == scope]
        suffix = [token_id + offset for token_id in window]
        token_ids, match_len = recent.continuation(suffix, 5, scope)
        said = [*suffix[len(suffix) - match_len :], *token_ids]
        pieces = [output[i : i + len(said)] for output in own for i in range(len(output))]
        assert (said in pieces) if token_ids else match_len == 0
        assert recent.continuation([token_id + 10 - offset for token_id in window], 5, scope) == ([], 0)
    assert recent.continuation(window, 5, "another") == ([], 0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(OUTPUTS, st.integers(1, 40), st.integers(1, 3), st.integers(1, 9))
def test_recent_outputs_stay_within_their_bounds(
    outputs: list[tuple[str, list[int]]], max_tokens: int, max_segments: int, max_read: int
) -> None:
    recent = RecentOutputs(max_tokens=max_tokens, max_segments=max_segments)
    for scope, output in outputs:
        recent.add(output, scope)
        unread = recent.num_unread_tokens
        recent.read_some(max_read)
        assert unread <= max_tokens
        assert 0 <= unread - recent.num_unread_tokens <= max_read
        assert 0 <= recent.num_tokens <= max_tokens
        assert len(recent._scopes) <= max_segments


def test_oldest_outputs_are_forgotten_first() -> None:
    recent = RecentOutputs(max_tokens=64)
    for n in range(100):
        recent.add([n, n, n, n])
        recent.read_some()
    is_found = [bool(recent.continuation([n, n], 1)[0]) for n in range(100)]
    assert is_found == sorted(is_found)
    assert 8 <= sum(is_found) <= 64 // 5


def test_busy_scope_is_forgotten_before_one_that_has_grown_since() -> None:
    recent = RecentOutputs(max_tokens=64)
    for n in range(40):
        recent.add([n, n, n, n], "busy")
        recent.add([n, n, n, n], "calm") if n % 8 == 7 else None
        recent.read_some()
    assert recent.continuation([39, 39], 1, "calm")[0] == [39]


def test_output_too_short_to_be_found_is_not_kept() -> None:
    recent = recent_of([], [1], [1, 2])
    assert (recent.num_tokens, len(recent._scopes)) == (0, 0)
    assert recent_of([1, 2, 3]).num_tokens == 4


def test_output_forgotten_while_half_read_does_not_run_into_the_next() -> None:
    recent = RecentOutputs(max_tokens=40)
    recent.add([1, 2, 3, 4, 5, 6, 7, 8])
    recent.read_some(4)
    for _ in range(5):
        recent.add([9, 8, 7, 6, 5, 4, 3, 2])
    recent.read_some()
    assert recent.continuation([2, 3], 3) == ([], 0)


def test_nobody_is_offered_what_is_not_shared() -> None:
    assert hints_of([9, 1, 2], None).propose([9, 1, 2], [], 2) == NO_PROPOSAL
    recent = recent_of([1, 2, 3, 4], scope="one tenant")
    assert hints_of([9, 1, 2], recent, "another").propose([9, 1, 2], [], 2) == NO_PROPOSAL
    assert hints_of([9, 1, 2], recent, "one tenant").propose([9, 1, 2], [], 2).token_ids == [3, 4]


# One session's hints.


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(TOKENS, max_size=6), max_size=8), st.lists(TOKENS, max_size=4), OUTPUTS)
def test_proposal_is_a_function_of_text_and_outputs(
    steps: list[list[int]], said: list[int], outputs: list[tuple[str, list[int]]]
) -> None:
    recent = recent_of(*(output for _, output in outputs))
    step_by_step, committed = LookupHints(recent), list[int]()
    for step in steps:
        committed += step
        proposal = step_by_step.propose(committed, said, 6)
        assert proposal == LookupHints(recent).propose(committed, said, 6)
        assert len(proposal.token_ids) <= 6
        assert bool(proposal.token_ids) == bool(proposal.match_len)


def test_lookup_goes_on_where_a_drafts_hints_end() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert hints_of(text).propose(text, [3, 4], 3) == Proposal([5, 6, 7], 4)
    assert hints_of(text).propose(text, [9, 4, 5], 3) == Proposal([6, 7, 8], 2)
    assert hints_of(text).propose(text, [9, 9], 3) == NO_PROPOSAL


@pytest.mark.parametrize("max_len", [0, -1])
def test_nothing_is_proposed_where_there_is_no_room(max_len: int) -> None:
    assert hints_of([1, 2, 1, 2]).propose([1, 2, 1, 2], [], max_len) == NO_PROPOSAL


# What proposals are worth.


def test_chances_depend_on_lengths_and_history_and_not_on_tokens() -> None:
    texts = [[1, 2, 3, 1, 2], [70, 80, 90, 70, 80]]
    chances = []
    for text in texts:
        hints = hints_of(text)
        proposal = hints.propose(text, [], 5)
        hints.observe(proposal, 1, 3)
        chances.append(hints.chances(proposal))
    assert chances[0] == chances[1]
    assert len(chances[0]) == 5


def test_longer_matches_are_trusted_more_and_along_a_proposal_they_grow() -> None:
    chances = MatchAcceptance(PRIOR_RATES).chances(2, 40)
    assert chances == sorted(chances)
    assert chances[0] == PRIOR_RATES[1] < PRIOR_RATES[2] == chances[2]
    assert chances[30:] == MatchAcceptance(PRIOR_RATES).chances(32, 10)
    assert len(MatchAcceptance(PRIOR_RATES).chances(10**6, 2)) == 2


def test_rejections_are_learned_for_the_length_where_they_came() -> None:
    acceptance = MatchAcceptance(PRIOR_RATES)
    before = acceptance.chances(2, 7)
    for _ in range(50):
        acceptance.observe(2, 2, 6)  # tokens 0 and 1 hold, 2 does not; 3 and after were not tried
    after = acceptance.chances(2, 7)
    assert min(after[:2]) > 0.9
    assert max(after[2:6]) < 0.1
    assert after[6] == before[6]


@pytest.mark.parametrize("holds", [True, False])
def test_estimate_follows_what_happens_and_stays_a_chance(holds: bool) -> None:
    acceptance = MatchAcceptance(PRIOR_RATES)
    for _ in range(200):
        acceptance.observe(2, int(holds), 1)
    rate = acceptance.chances(2, 1)[0]
    assert 0.95 < rate <= 0.99 if holds else 0.0 <= rate < 0.05


def test_nothing_verified_teaches_nothing() -> None:
    hints = hints_of([1, 2, 1, 2])
    proposal = hints.propose([1, 2, 1, 2], [], 3)
    before = hints.chances(proposal)
    hints.observe(proposal, 0, 0)
    hints.observe(NO_PROPOSAL, 0, 0)
    assert hints.chances(proposal) == before
    assert hints.chances(NO_PROPOSAL) == []


def test_own_text_and_recent_outputs_are_judged_apart() -> None:
    text = [9, 1, 2]
    hints = hints_of(text, recent_of([1, 2, 3, 4]))
    recent, own = hints.propose(text, [], 2), Proposal([5, 6], 2)
    assert recent.is_recent
    before = hints.chances(own)
    for _ in range(20):
        hints.observe(recent, 0, 2)
    assert hints.chances(own) == before
    assert hints.chances(recent)[0] < 0.3 * before[0]
