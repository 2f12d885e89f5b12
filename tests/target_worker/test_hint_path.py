"""Which hints a step may verify: forced tokens before the draft's, nothing useless in the middle (I4)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.grammar import GrammarState
from outrider.hints.hint_tree import ROOT_ID, Hint, HintTree
from target_worker.hints.hint_path import HintPath, HintSources, choose_path, is_forced
from target_worker.hints.local_source import HintKind
from tests.outrider.test_grammar import EOS, HOSTILE, encode, regex, schema
from tests.schemas.walk import permitted_token_ids

PROMPT = [9, 9, 9]


def path_of(
    tree: HintTree | None, grammar: GrammarState | None, stop_token_ids: frozenset[int], max_fed: int
) -> HintPath:
    return choose_path(HintSources(tree, [0.7] * (max_fed + 1), (), grammar), PROMPT, stop_token_ids, max_fed)


OTHER_STOP = encode("7")[0]
WILD = [t for t in (*HOSTILE, EOS, OTHER_STOP, 5, 4095) if 0 <= t < 2**32]
GRAMMARS = [
    schema({"const": "forced from end to end"}),
    schema(
        {
            "type": "object",
            "properties": {
                "name": {"enum": ["ann", "anna", "bob"]},
                "age": {"type": "integer", "maximum": 77},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    ),
    regex("(yes|no|maybe)( indeed, my friend){0,3}"),
    regex("[0-9]{1,4}"),
    regex(""),
]


@dataclass
class Place:
    """A grammar some committed tokens on, and a tree below these tokens; `below[node_id]` are its children's ids."""

    grammar: GrammarState
    tree: HintTree = field(default_factory=HintTree)
    hints: dict[int, Hint] = field(default_factory=dict)
    below: dict[int, list[int]] = field(default_factory=lambda: {ROOT_ID: []})

    def add(self, parent_id: int, token_id: int) -> int:
        node_id = len(self.hints) + 1
        hint = Hint(node_id, parent_id, token_id)
        assert self.tree.add(PROMPT, 1, len(PROMPT), [hint]) == 1
        self.hints[node_id] = hint
        self.below[node_id] = []
        self.below[parent_id].append(node_id)
        return node_id


@st.composite
def places(draw: st.DrawFn) -> Place:
    """Trees that mostly follow the grammar, with alternatives, nonsense, and ends of sequence anywhere."""
    state = draw(st.sampled_from(GRAMMARS)).fork()
    for _ in range(draw(st.integers(0, 8))):
        if (permitted := permitted_token_ids(state)) in ([], [EOS]):
            break
        state.advance([draw(st.sampled_from(permitted))])
    place = Place(state)
    ends: list[tuple[int, list[int]]] = [(ROOT_ID, [])]
    for _ in range(draw(st.integers(0, 12))):
        parent_id, said = ends[-1] if draw(st.booleans()) else draw(st.sampled_from(ends))
        walker = state.fork()
        permitted = list[int]()
        if walker.num_valid(said) == len(said):
            walker.advance(said)
            permitted = permitted_token_ids(walker)
        is_wild = not permitted or draw(st.integers(0, 6)) == 0
        token_id = draw(st.sampled_from(WILD if is_wild else permitted))
        ends.append((place.add(parent_id, token_id), [*said, token_id]))
    return place


def expected_path(place: Place, stop_token_ids: frozenset[int], max_fed: int, *, listens: bool) -> HintPath:
    """The same, written as one asks for it: position by position, every question asked anew."""
    hints: list[Hint] = []
    node_id: int | None = ROOT_ID if listens else None
    while len(hints) <= max_fed:
        said = [hint.token_id for hint in hints]
        forced = place.grammar.forced_after(said, 1)
        children = [place.hints[child] for child in place.below[node_id]] if node_id is not None else []
        if forced:
            following = [child.node_id for child in children if child.token_id == forced[0]]
            hints.append(Hint(HintKind.FORCED, HintKind.FORCED, forced[0]))
            node_id = following[0] if following else None
        elif children:
            hints.append(children[0])
            node_id = children[0].node_id
        else:
            break
        is_ruled_out = place.grammar.num_valid([h.token_id for h in hints]) < len(hints)
        if is_ruled_out or hints[-1].token_id in stop_token_ids:
            return HintPath(hints, min(len(hints) - 1, max_fed))
    return HintPath(hints, min(len(hints), max_fed))


STOPS = st.sampled_from([frozenset({EOS}), frozenset({EOS, OTHER_STOP}), frozenset[int]()])


@pytest.mark.thorough
@settings(max_examples=400, deadline=None, derandomize=True)
@given(place=places(), stop_token_ids=STOPS, max_fed=st.integers(0, 9), listens=st.booleans())
def test_the_path_is_what_position_by_position_questions_give(
    place: Place, stop_token_ids: frozenset[int], max_fed: int, listens: bool
) -> None:
    tree = place.tree if listens else None
    path = path_of(tree, place.grammar, stop_token_ids, max_fed)
    assert path == expected_path(place, stop_token_ids, max_fed, listens=listens)
    # What the docstrings promise, whoever wrote the path.
    fed = [hint.token_id for hint in path.hints[: path.num_feedable]]
    assert place.grammar.num_valid(fed) == len(fed)
    assert not stop_token_ids & set(fed)
    assert len(path.hints) <= max_fed + 1
    assert path.num_feedable <= max_fed
    assert len(path.hints) - path.num_feedable <= 1
    for num_fed in range(path.num_feedable + 1):
        assert path.for_step(num_fed) == (path.hints[: num_fed + 1], [])
    for index in range(len(path.hints) - 1):
        assert path.hints[index].token_id not in stop_token_ids
    assert all(is_forced(hint) == (hint.node_id not in place.hints) for hint in path.hints)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(place=places(), stop_token_ids=STOPS, max_fed=st.integers(0, 9))
def test_asking_changes_neither_grammar_nor_tree(place: Place, stop_token_ids: frozenset[int], max_fed: int) -> None:
    paths = [path_of(place.tree, place.grammar, stop_token_ids, max_fed) for _ in range(2)]
    assert paths[0] == paths[1]
    assert (len(place.tree), place.tree.num_stale) == (len(place.hints), 0)
    assert place.tree.cursor == (ROOT_ID if place.hints else None)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(place=places(), stop_token_ids=STOPS, max_fed=st.integers(0, 9))
def test_without_a_grammar_it_is_the_primary_path_up_to_a_stop_token(
    place: Place, stop_token_ids: frozenset[int], max_fed: int
) -> None:
    primary = place.tree.primary_path(max_fed + 1)
    path = path_of(place.tree, None, stop_token_ids, max_fed)
    is_stop = [hint.token_id in stop_token_ids for hint in primary]
    end = is_stop.index(True) if True in is_stop else len(primary)
    assert path == HintPath(primary[: end + 1], min(end, max_fed))


@pytest.mark.parametrize("max_fed", [0, 3])
def test_nobody_speaks_and_nothing_is_forced(max_fed: int) -> None:
    assert path_of(None, None, frozenset(), max_fed) == HintPath([], 0)
    assert path_of(None, regex("[0-9]{1,4}"), frozenset({EOS}), max_fed) == HintPath([], 0)
    assert path_of(HintTree(), None, frozenset(), max_fed) == HintPath([], 0)


class TestForcedTokens:
    STATE = schema({"const": "forced from end to end"})
    FORCED = STATE.forced_after([], 99)

    def test_they_are_hints_without_any_draft_and_the_end_stands_last(self) -> None:
        path = path_of(None, self.STATE, frozenset({EOS}), 32)
        assert [hint.token_id for hint in path.hints] == self.FORCED
        assert path.hints[-1].token_id == EOS
        assert path.num_feedable == len(self.FORCED) - 1
        assert all(is_forced(hint) and hint.distribution is None for hint in path.hints)

    def test_a_draft_of_another_mind_is_not_asked(self) -> None:
        place = Place(self.STATE)
        for token_id in (5, *self.FORCED[1:4]):
            place.add(len(place.hints), token_id)
        path = path_of(place.tree, self.STATE, frozenset({EOS}), 3)
        assert [hint.token_id for hint in path.hints] == self.FORCED[:4]
        assert all(is_forced(hint) for hint in path.hints)

    @pytest.mark.parametrize("is_alternative", [False, True])
    def test_the_draft_is_heard_again_below_forced_tokens_that_it_said(self, is_alternative: bool) -> None:
        state = regex("the number is [0-9]{4}")
        forced = state.forced_after([], 99)
        place = Place(state)
        parent_id = ROOT_ID
        for token_id in forced:
            if is_alternative:
                place.add(parent_id, 5)
            parent_id = place.add(parent_id, token_id)
        digits = permitted_token_ids_after(state, forced)[:2]
        own = place.add(parent_id, digits[0])
        place.add(parent_id, digits[1])
        path = path_of(place.tree, state, frozenset({EOS}), 30)
        assert [hint.token_id for hint in path.hints] == [*forced, digits[0]]
        assert path.hints[-1] == place.hints[own]
        assert path.num_feedable == len(path.hints)

    def test_below_a_forced_token_that_the_draft_did_not_say_it_is_silent(self) -> None:
        state = regex("the number is [0-9]{4}")
        forced = state.forced_after([], 99)
        place = Place(state)
        parent_id = ROOT_ID
        for token_id in [*forced[:-1], 5]:
            parent_id = place.add(parent_id, token_id)
        place.add(parent_id, permitted_token_ids_after(state, forced)[0])
        path = path_of(place.tree, state, frozenset({EOS}), 30)
        assert [hint.token_id for hint in path.hints] == forced

    def test_a_cursor_that_was_lost_leaves_the_forced_tokens(self) -> None:
        tree = HintTree()
        tree.add(PROMPT, 1, len(PROMPT), [Hint(1, 0, 5)])
        tree.commit([6])
        assert tree.cursor is None
        path = path_of(tree, self.STATE, frozenset({EOS}), 3)
        assert [hint.token_id for hint in path.hints] == self.FORCED[:4]


def test_a_hint_that_the_grammar_forbids_is_still_verified_where_it_costs_nothing() -> None:
    """Left out, the token would be drawn from the target's distribution where the residual is due."""
    state = regex("[0-9]{1,4}")
    place = Place(state)
    wrong = encode("x")[0]
    place.add(place.add(ROOT_ID, permitted_token_ids(state)[0]), wrong)
    place.add(2, permitted_token_ids(state)[0])
    path = path_of(place.tree, state, frozenset({EOS}), 9)
    assert [hint.node_id for hint in path.hints] == [1, 2]
    assert path.num_feedable == 1


def permitted_token_ids_after(state: GrammarState, said: list[int]) -> list[int]:
    walker = state.fork()
    walker.advance(said)
    return permitted_token_ids(walker)
