"""I3, self-certifying hints: whatever arrives, only what fits the committed tokens is ever offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.hints.hint_tree import (
    MAX_PATH_KEPT,
    ROOT_ID,
    WEIGHT_TOTAL_MAX,
    DraftDistribution,
    Hint,
    HintTree,
)

TOKENS = st.integers(0, 2)


@dataclass
class Received:
    """Everything that arrived below one root, in order: a model without any state of its own."""

    attachment: int
    base_len: int
    nodes: dict[int, Hint] = field(default_factory=dict)

    def children(self, node_id: int) -> list[Hint]:
        return [hint for hint in self.nodes.values() if hint.parent_id == node_id]

    def primary_path(self, committed: Sequence[int]) -> list[Hint] | None:
        """Walks down from the root anew; None when the committed tokens lead nowhere."""
        node_id = ROOT_ID
        for token_id in committed[self.base_len :]:
            following = [hint for hint in self.children(node_id) if hint.token_id == token_id]
            if not following:
                return None
            node_id = following[0].node_id
        path: list[Hint] = []
        while children := self.children(node_id):
            path.append(children[0])
            node_id = children[0].node_id
        return path


class HonestDelivery(RuleBasedStateMachine):
    """Unique ids, but any order of commits, late nodes, alternatives, duplicates, gaps and old or false roots."""

    def __init__(self) -> None:
        super().__init__()
        self.committed = [0, 1]
        self.tree = HintTree()
        self.model = Received(-1, -1)
        self.next_id = 1
        self.num_sent = 0

    def deliver(self, attachment: int, base_len: int, hints: list[Hint]) -> None:
        self.num_sent += len(hints)
        num_live = self.tree.add(self.committed, attachment, base_len, hints)
        assert 0 <= num_live <= len(hints)

    @rule(attachment=st.integers(0, 3), back=st.integers(0, 3))
    def plant(self, attachment: int, back: int) -> None:
        base_len = len(self.committed) - back
        if base_len < 1:
            return
        newer = (attachment, base_len) > (self.model.attachment, self.model.base_len)
        hint = Hint(self.next_id, ROOT_ID, 0)
        self.next_id += 1
        self.deliver(attachment, base_len, [hint])
        if newer:
            self.model = Received(attachment, base_len, {hint.node_id: hint})
        elif (attachment, base_len) == (self.model.attachment, self.model.base_len):
            self.model.nodes[hint.node_id] = hint

    @precondition(lambda self: self.model.base_len > 0)
    @rule(data=st.data(), token_id=TOKENS, near_tip=st.booleans())
    def grow(self, data: st.DataObject, token_id: int, near_tip: bool) -> None:
        parents = [ROOT_ID, *self.model.nodes]
        parent_id = parents[-1] if near_tip else data.draw(st.sampled_from(parents))
        hint = Hint(self.next_id, parent_id, token_id)
        self.next_id += 1
        self.deliver(self.model.attachment, self.model.base_len, [hint])
        self.model.nodes[hint.node_id] = hint

    @precondition(lambda self: self.model.nodes)
    @rule(data=st.data())
    def say_again(self, data: st.DataObject) -> None:
        again = data.draw(st.lists(st.sampled_from(list(self.model.nodes.values())), max_size=4))
        self.deliver(self.model.attachment, self.model.base_len, again)

    @precondition(lambda self: self.model.base_len > 0)
    @rule(token_id=TOKENS)
    def leave_a_gap(self, token_id: int) -> None:
        """A child whose parent never arrived."""
        self.next_id += 2
        self.deliver(self.model.attachment, self.model.base_len, [Hint(self.next_id - 1, self.next_id - 2, token_id)])

    @rule(ahead=st.integers(1, 9))
    def claim_a_future_root(self, ahead: int) -> None:
        self.deliver(9, len(self.committed) + ahead, [Hint(1, ROOT_ID, 0)])

    @rule(token_ids=st.lists(TOKENS, min_size=1, max_size=3), follow=st.booleans())
    def commit(self, token_ids: list[int], follow: bool) -> None:
        if follow and (path := self.model.primary_path(self.committed)):
            token_ids = [hint.token_id for hint in path[:2]]
        self.committed += token_ids
        self.tree.commit(token_ids)

    @invariant()
    def tree_is_what_a_rebuild_from_all_messages_gives(self) -> None:
        expected = self.model.primary_path(self.committed) if self.model.base_len > 0 else None
        assert self.tree.primary_path(100) == (expected or [])
        assert (self.tree.cursor is not None) == (expected is not None)
        assert self.tree.primary_path(2) == (expected or [])[:2]

    @invariant()
    def every_hint_is_kept_used_or_counted(self) -> None:
        assert 0 <= self.tree.num_stale <= self.num_sent
        assert len(self.tree) + self.tree.num_stale <= self.num_sent


TestHonestDelivery = HonestDelivery.TestCase
TestHonestDelivery.settings = settings(max_examples=250, stateful_step_count=40, deadline=None, derandomize=True)

WILD_HINTS = st.lists(
    st.builds(Hint, st.integers(0, 8), st.integers(0, 8), TOKENS), max_size=6
)  # ids collide, parents lie, a node may name itself or the root


@pytest.mark.thorough
@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(-1, 9), WILD_HINTS, st.lists(TOKENS, max_size=2)),
        max_size=25,
    ),
    max_nodes=st.sampled_from([1, 3, 512]),
)
def test_lies_are_never_offered_and_never_raise(
    steps: list[tuple[int, int, list[Hint], list[int]]], max_nodes: int
) -> None:
    """A hint that is offered can always be traced back to its root along received nodes that say what was committed."""
    committed = [0, 1, 2]
    tree = HintTree(max_nodes=max_nodes)
    newest, received = (0, -1), set[Hint]()
    for attachment, base_len, hints, token_ids in steps:
        if 0 < base_len <= len(committed) and (attachment, base_len) >= newest:
            received = set() if (attachment, base_len) > newest else received
            newest = (attachment, base_len)
            received |= set(hints)
        tree.add(committed, attachment, base_len, hints)
        for _ in range(2):
            assert len(tree) <= max_nodes
            path = tree.primary_path(50)
            for index, hint in enumerate(path):
                assert hint in received
                below = [h.token_id for h in path[: index + 1]]
                wanted = (committed + below)[newest[1] :]
                assert is_traceable(received, hint, wanted)
            committed += token_ids
            tree.commit(token_ids)
            token_ids = []


def is_traceable(received: set[Hint], hint: Hint, token_ids: list[int]) -> bool:
    """Whether some chain of received nodes from the root to `hint` says `token_ids`."""
    candidates = {hint}
    for depth, token_id in enumerate(reversed(token_ids)):
        candidates = {candidate for candidate in candidates if candidate.token_id == token_id}
        if depth == len(token_ids) - 1:
            return any(candidate.parent_id == ROOT_ID for candidate in candidates)
        parents = {candidate.parent_id for candidate in candidates}
        candidates = {candidate for candidate in received if candidate.node_id in parents}
    return False


def chain(token_ids: Sequence[int], first_id: int = 1, parent_id: int = ROOT_ID) -> list[Hint]:
    parents = [parent_id, *range(first_id, first_id + len(token_ids))]
    return [Hint(first_id + i, parents[i], token_id) for i, token_id in enumerate(token_ids)]


def offered(tree: HintTree) -> list[int]:
    return [hint.token_id for hint in tree.primary_path(99)]


class TestCursor:
    def test_late_chain_that_says_what_was_committed_revives_the_cursor(self) -> None:
        tree = HintTree()
        committed = [1, 2, 3, 4, 5]
        assert tree.add(committed, 1, 2, chain([3, 4])) == 0
        assert tree.cursor is None
        assert tree.add(committed, 1, 2, chain([5, 6, 7], first_id=3, parent_id=2)) == 2
        assert offered(tree) == [6, 7]

    def test_a_late_continuation_revives_a_cursor_that_was_lost(self) -> None:
        tree = HintTree()
        tree.add([1], 1, 1, chain([2, 3]))
        tree.commit([2, 9])  # 9 is not in the tree yet
        assert tree.cursor is None
        tree.add([1, 2, 9], 1, 1, [Hint(7, 1, 9), Hint(8, 7, 4)])
        assert offered(tree) == [4]

    def test_an_alternative_carries_the_cursor_on(self) -> None:
        tree = HintTree()
        tree.add([1], 1, 1, [Hint(1, 0, 5), Hint(2, 0, 6), Hint(3, 1, 7), Hint(4, 2, 8)])
        assert offered(tree) == [5, 7]
        tree.commit([6])
        assert offered(tree) == [8]
        assert tree.num_stale == 2

    def test_a_newer_root_replaces_an_older_one_and_an_older_one_is_stale(self) -> None:
        tree = HintTree()
        tree.add([1, 2, 3], 1, 3, chain([4, 5]))
        tree.add([1, 2, 3], 1, 2, chain([3, 9]))
        assert offered(tree) == [4, 5]
        assert tree.num_stale == 2
        tree.commit([4])
        tree.add([1, 2, 3, 4], 1, 4, chain([8]))
        assert offered(tree) == [8]

    def test_a_newer_attachment_wins_even_with_an_older_root(self) -> None:
        tree = HintTree()
        tree.add([1, 2, 3], 1, 3, chain([4]))
        tree.add([1, 2, 3], 2, 2, chain([3, 7]))
        assert offered(tree) == [7]
        tree.add([1, 2, 3], 1, 3, chain([5], first_id=9))
        assert offered(tree) == [7]

    @pytest.mark.parametrize("base_len", [0, -1, 4, 1000])
    def test_a_root_outside_the_committed_tokens_changes_nothing(self, base_len: int) -> None:
        tree = HintTree()
        tree.add([1, 2, 3], 1, 3, chain([4]))
        assert tree.add([1, 2, 3], 5, base_len, chain([9])) == 0
        assert offered(tree) == [4]


class TestPromotion:
    def test_a_promoted_node_becomes_the_primary_child(self) -> None:
        tree = HintTree()
        tree.add([1], 1, 1, chain([4, 5, 6]))
        tree.add([1], 1, 1, [Hint(4, 1, 7, is_promoted=True), Hint(5, 4, 8)])
        assert offered(tree) == [4, 7, 8]

    def test_a_node_that_was_sent_before_may_be_promoted(self) -> None:
        tree = HintTree()
        tree.add([1], 1, 1, [*chain([4, 5]), Hint(3, 0, 9)])
        assert tree.add([1], 1, 1, [Hint(3, 0, 9, is_promoted=True)]) == 0, "no new node"
        assert offered(tree) == [9]
        assert (len(tree), tree.num_stale) == (3, 0)
        tree.commit([4])
        assert offered(tree) == [5], "what was primary before is still there"

    def test_a_promotion_below_what_was_committed_is_late_or_stale(self) -> None:
        tree = HintTree()
        tree.add([1], 1, 1, chain([4, 5]))
        tree.commit([4])
        tree.add([1, 4], 1, 1, [Hint(3, 0, 9, is_promoted=True)])
        assert offered(tree) == [5]

    @pytest.mark.parametrize("lie", [Hint(2, 0, 5, is_promoted=True), Hint(2, 1, 6, is_promoted=True)])
    def test_another_node_under_a_known_id_changes_nothing(self, lie: Hint) -> None:
        tree = HintTree()
        tree.add([1], 1, 1, [*chain([4, 5]), Hint(3, 0, 9)])
        assert tree.add([1], 1, 1, [lie]) == 0
        assert offered(tree) == [4, 5]
        assert tree.num_stale == 1


class TestBounds:
    """I7."""

    def test_nodes_beyond_the_bound_are_dropped_and_counted(self) -> None:
        tree = HintTree(max_nodes=4)
        assert tree.add([1], 1, 1, chain([2] * 9)) == 4
        assert (len(tree), tree.num_stale) == (4, 5)
        tree.commit([2, 2])
        assert tree.add([1, 2, 2], 1, 1, chain([3, 3, 3], first_id=20, parent_id=4)) == 2

    def test_a_tree_goes_on_for_longer_than_the_path_it_keeps(self) -> None:
        """The committed path that is remembered is bounded; the tree's life is not."""
        tree = HintTree()
        committed = [1]
        for i in range(3 * MAX_PATH_KEPT):
            assert tree.add(committed, 1, 1, [Hint(i + 1, i, i % 7)]) == 1
            assert offered(tree) == [i % 7]
            committed.append(i % 7)
            tree.commit([i % 7])
            assert len(tree._path) <= MAX_PATH_KEPT

    def test_late_chain_longer_than_the_path_it_keeps_still_revives_the_cursor(self) -> None:
        tree = HintTree()
        committed = [1] + [i % 7 for i in range(2 * MAX_PATH_KEPT)]
        tree.add(committed, 1, 1, chain([*committed[1:], 5]))
        assert offered(tree) == [5]

    def test_a_deep_tree_is_dropped_without_recursion(self) -> None:
        tree = HintTree(max_nodes=20_000)
        tree.add([1], 1, 1, [Hint(1, 0, 3), *chain([2] * 15_000, first_id=2)])
        tree.commit([3])
        assert (len(tree), tree.num_stale) == (0, 15_000)


@pytest.mark.parametrize(
    ("token_ids", "weights", "is_valid"),
    [
        ((1, 2), (65535, 1), True),
        ((9,), (WEIGHT_TOTAL_MAX,), True),
        ((), (), False),
        ((1, 2), (65536, 0), False),
        ((1, 2), (65537, -1), False),
        ((1, 1), (32768, 32768), False),
        ((1, 10), (32768, 32768), False),
        ((1, 2), (65536,), False),
        ((1, 2), (40000, 40000), False),
    ],
)
def test_distribution_is_valid_only_if_it_is_one(
    token_ids: tuple[int, ...], weights: tuple[int, ...], is_valid: bool
) -> None:
    """I5."""
    assert DraftDistribution(token_ids, weights).is_valid(10) is is_valid
