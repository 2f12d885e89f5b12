"""A memory finds the longest match of its own scope, at bounded work, and keeps within its bounds (I7)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_worker.memory import token_memory
from draft_worker.memory.guesses import GuessTree, MatchAcceptance
from draft_worker.memory.token_memory import (
    MATCH_LENS,
    MAX_CANDIDATES,
    MIN_MATCH,
    NO_MATCH,
    PIECE_COST,
    PIECE_TOKENS,
    RememberedSequence,
    TokenMemory,
)

SCOPES = (("", ""), ("a", ""), ("a", "salt"))
MAX_TOKENS = 2 * (PIECE_TOKENS + PIECE_COST)
EVENTS = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), max_size=40) | st.integers(0, 1500)), max_size=30
)


def memory_of(*texts: list[int], scope: tuple[str, str] = ("", ""), prompt: list[int] | None = None) -> TokenMemory:
    memory = TokenMemory(max_tokens=1 << 16, max_scopes=4)
    for text in texts:
        memory.append(RememberedSequence.after(scope, prompt or []), text)
    return memory


def found(memory: TokenMemory, window: list[int], scope: tuple[str, str] = ("", "")) -> list[tuple[int, ...]]:
    return [memory.following(place, 8) for place in memory.find(scope, window).places]


def grown(memory: TokenMemory, window: list[int], **changes: Any) -> GuessTree:
    bounds: dict[str, Any] = {"max_lookahead": 8, "max_nodes": 20, "min_reach": 0.0}
    match = memory.find(("", ""), window)
    return GuessTree.grow(memory, match, MatchAcceptance(), len(window), **(bounds | changes))


def test_what_followed_the_same_tokens_is_found_latest_first() -> None:
    memory = memory_of([1, 2, 3, 4], [9, 1, 2, 3, 5])
    assert found(memory, [1, 2, 3]) == [(5,), (4,)]
    assert memory.find(("", ""), [2, 3]) == memory.find(("", ""), [7, 2, 3]) == NO_MATCH


def test_the_longest_match_wins() -> None:
    memory = memory_of([8, 7, 1, 2, 3, 4], [9, 6, 1, 2, 3, 5])
    assert found(memory, [8, 7, 1, 2, 3]) == [(4,)]
    assert memory.find(("", ""), [8, 7, 1, 2, 3]).length == 4


def test_the_end_of_the_prompt_is_searched_and_never_proposed() -> None:
    memory = memory_of([4, 5], prompt=[0, 1, 2, 3])
    assert found(memory, [1, 2, 3]) == [(4, 5)]
    assert found(memory, [0, 1, 2]) == []


def test_sequences_that_grow_find_each_other() -> None:
    memory = memory_of()
    first, second = (RememberedSequence.after(("", ""), [1, 2, 3]) for _ in range(2))
    memory.append(first, [4])
    assert found(memory, second.tail) == [(4,)]
    memory.append(second, [4])
    assert found(memory, second.tail) == []
    memory.append(first, [5])
    assert found(memory, second.tail) == [(5,)]


def test_nothing_of_a_scope_is_found_in_another() -> None:
    memory = memory_of([1, 2, 3, 4], scope=("tenant", "salt"))
    assert found(memory, [1, 2, 3], ("tenant", "salt"))
    for scope in (("tenant", ""), ("", "salt"), ("", ""), ("other", "salt")):
        assert memory.find(scope, [1, 2, 3]) == NO_MATCH


def test_a_continuation_goes_on_in_the_next_piece() -> None:
    text = list(range(2 * PIECE_TOKENS))
    memory = memory_of(text)
    for start in (PIECE_TOKENS - 5, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 3):
        assert found(memory, text[start - 30 : start]) == [tuple(text[start : start + 8])]
        assert memory.find(("", ""), text[start - 30 : start]).length == MATCH_LENS[-1]


def test_whoever_generates_most_forgets_their_own_first() -> None:
    memory = TokenMemory(max_tokens=4 * PIECE_TOKENS, max_scopes=4)
    memory.append(RememberedSequence.after(("quiet", ""), []), [1, 2, 3, 4])
    memory.append(RememberedSequence.after(("loud", ""), []), [i % 1000 for i in range(20 * PIECE_TOKENS)])
    assert memory.num_tokens <= memory.max_tokens
    assert memory.num_forgotten_tokens > 15 * PIECE_TOKENS
    assert found(memory, [1, 2, 3], ("quiet", "")) == [(4,)]


def test_beyond_the_number_of_scopes_the_one_that_was_silent_longest_goes() -> None:
    memory = TokenMemory(max_tokens=1 << 14, max_scopes=2)
    sequences = {name: RememberedSequence.after((name, ""), []) for name in "abc"}
    for name in "abac":
        memory.append(sequences[name], [1, 2, 3, 4])
    assert memory.num_scopes == 2
    assert [bool(memory.find((name, ""), [1, 2, 3]).places) for name in "abc"] == [True, False, True]


@pytest.mark.parametrize("num_salts", [1, 3, 500])
def test_salts_give_a_tenant_no_more_room(num_salts: int) -> None:
    """Another's tokens stay, as long as these are not more than its part."""
    memory = TokenMemory(max_tokens=16 * PIECE_TOKENS, max_scopes=64)
    own = list(range(6 * PIECE_TOKENS))
    memory.append(RememberedSequence.after(("quiet", "own"), []), own)
    salted = [RememberedSequence.after(("loud", f"{number}"), []) for number in range(num_salts)]
    for number in range(40 * PIECE_TOKENS // 64):
        memory.append(salted[number % num_salts], [number] * 64)
    assert memory.num_tokens <= memory.max_tokens
    assert memory.num_scopes <= memory.max_scopes
    for start in range(3, len(own) - 8, 100):
        assert found(memory, own[start - 3 : start], ("quiet", "own")) == [tuple(own[start : start + 8])]


def test_of_several_tenants_beyond_their_part_all_keep_as_much() -> None:
    memory = TokenMemory(max_tokens=12 * PIECE_TOKENS, max_scopes=64)
    for _ in range(40):
        for tenant, num_salts in (("a", 1), ("b", 5), ("c", 20)):
            for salt in range(num_salts):
                memory.append(RememberedSequence.after((tenant, f"{salt}"), []), [1, 2, 3, 4] * 50)
    kept = [tenant.num_tokens for tenant in memory._tenants.values()]
    assert max(kept) - min(kept) <= PIECE_TOKENS


def test_a_memory_without_room_for_two_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="room for two pieces"):
        TokenMemory(max_tokens=PIECE_TOKENS, max_scopes=1)


@settings(deadline=None)
@given(EVENTS)
def test_bounds_and_scopes_hold_whatever_is_remembered(events: list[tuple[int, list[int] | int]]) -> None:
    """Each scope has tokens of its own, so that a token of another one would be seen."""
    memory = TokenMemory(max_tokens=MAX_TOKENS, max_scopes=2)
    texts: list[list[int]] = [[] for _ in range(6)]
    sequences = [RememberedSequence.after(SCOPES[i % 3], []) for i in range(6)]
    for i, told in events:
        tokens = told if isinstance(told, list) else random.Random(told).choices(range(4), k=told)
        new = [token_id * 3 + i % 3 for token_id in tokens]
        texts[i] += new
        memory.append(sequences[i], new)
        assert sequences[i].committed_len == len(texts[i])
        assert memory.num_tokens == sum(piece.cost for piece in memory._pieces.values()) <= MAX_TOKENS
        assert memory.num_scopes <= 2
        tenants = memory._tenants.values()
        assert memory.num_scopes == sum(len(tenant.scopes) for tenant in tenants)
        assert all(tenant.scopes for tenant in tenants), "one without tokens is forgotten"
        for tenant in tenants:
            assert tenant.num_tokens == sum(kept.num_tokens for kept in tenant.scopes.values())
        for kept in (kept for tenant in tenants for kept in tenant.scopes.values()):
            assert len(kept.latest) <= kept.num_tokens
            assert {place // PIECE_TOKENS for place in kept.latest.values()} <= kept.pieces.keys()
        for scope_number, scope in enumerate(SCOPES):
            match = memory.find(scope, sequences[i].tail)
            if scope_number != i % 3:
                assert match == NO_MATCH
            for place in match.places:
                whole = [*sequences[i].tail[-match.length :], *memory.following(place, 8)]
                assert any(is_part(whole, texts[j]) for j in range(6) if j % 3 == scope_number)


def is_part(part: list[int], text: list[int]) -> bool:
    return any(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


class CountingDict(dict[Any, Any]):
    num_reads = 0

    def get(self, *arguments: Any) -> Any:
        CountingDict.num_reads += 1
        return super().get(*arguments)


def test_a_lookup_costs_the_same_however_often_its_tokens_occur() -> None:
    memory = memory_of([1, 2, 3] * 3000)
    memory._pieces = CountingDict(memory._pieces)
    CountingDict.num_reads = 0
    assert len(memory.find(("", ""), [1, 2, 3] * 20).places) == MAX_CANDIDATES
    assert CountingDict.num_reads <= MAX_CANDIDATES + 1


def test_the_tree_follows_the_most_frequent_continuation_and_keeps_others_as_alternatives() -> None:
    memory = memory_of([1, 2, 3, 7, 8], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
    told = [(hint.node_id, hint.parent_id, hint.token_id) for hint in grown(memory, [1, 2, 3]).hints]
    assert told == [(1, 0, 4), (2, 0, 7), (3, 1, 6), (4, 1, 5), (5, 2, 8)]


def test_a_tree_keeps_to_its_bounds() -> None:
    memory = memory_of(*([1, 2, 3, *random.Random(i).choices(range(50), k=20)] for i in range(16)))
    assert len(grown(memory, [1, 2, 3], max_nodes=20).hints) == 20
    assert grown(memory, [1, 2, 3], max_lookahead=3).num_ahead == 3
    assert not grown(memory, [1, 2, 3], max_lookahead=0).hints
    assert not grown(memory, [1, 2, 3], min_reach=1.0).hints


def test_a_tree_follows_the_committed_tokens_and_learns_from_them() -> None:
    memory, acceptance = memory_of([1, 2, 3, 4, 5, 6]), MatchAcceptance()
    before = acceptance.rate(0)
    tree = grown(memory, [1, 2, 3])
    tree.commit([4], acceptance)
    assert tree.num_ahead == 2
    assert acceptance.rate(0) > before
    tree.commit([9], acceptance)
    assert tree.num_ahead == 0
    assert acceptance.rate(1) < MatchAcceptance().rate(1)


def test_shorter_matches_than_the_shortest_gram_find_nothing() -> None:
    assert MATCH_LENS[0] == MIN_MATCH == 3
    assert token_memory.MAX_MATCH < PIECE_TOKENS
