"""I3 and I7 for any message whatsoever: the tree stays a tree, within its bound, and all hints are accounted for.

`test_hint_tree` compares honest messages with a rebuild from everything that was said. Here ids collide, parents lie,
nodes name themselves, roots are old, new or of another attachment, and commits go any way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.hints.hint_tree import MAX_PATH_KEPT, ROOT_ID, Hint, HintTree


@dataclass
class Reference:
    """The rules of the module's docstring over whole id paths: every live node is known by the ids that lead to it.

    `paths` holds the live nodes in the order they came, `trunk` the ids that the committed tokens went along, from
    the root; None where they went along no node.
    """

    max_nodes: int
    committed: list[int]
    newest: tuple[int, int] = (0, -1)
    paths: dict[tuple[int, ...], Hint] = field(default_factory=dict)
    trunk: list[int | None] = field(default_factory=list)
    num_used: int = 0
    num_sent: int = 0

    @property
    def base_len(self) -> int:
        return self.newest[1]

    @property
    def is_lost(self) -> bool:
        return self.base_len < 0 or len(self.trunk) != len(self.committed) - self.base_len + 1

    def add(self, attachment: int, base_len: int, hints: Sequence[Hint]) -> int:
        self.num_sent += len(hints)
        if (attachment, base_len) < self.newest or not 0 < base_len <= len(self.committed):
            return 0
        if (attachment, base_len) > self.newest:
            self.newest, self.paths, self.trunk = (attachment, base_len), {}, [ROOT_ID]
        return sum(self._add_one(hint) for hint in hints)

    def _add_one(self, hint: Hint) -> bool:
        kept = self._kept_trunk()
        live = {path[-1]: path for path in self.paths}
        if hint.node_id in live or hint.node_id in kept or len(self.paths) >= self.max_nodes:
            return False
        if hint.parent_id in kept:
            depth = kept[hint.parent_id] + 1
            position = self.base_len + depth - 1
            if position < len(self.committed):  # it speaks of what has been decided
                if len(self.trunk) == depth and self.committed[position] == hint.token_id:
                    self.trunk.append(hint.node_id)
                    self.num_used += 1
                return False
            path: tuple[int, ...] = (hint.node_id,)
        elif hint.parent_id in live:
            path = (*live[hint.parent_id], hint.node_id)
        else:
            return False
        self.paths[path] = hint
        return True

    def _kept_trunk(self) -> dict[int, int]:
        """Ids of the trunk's end with their depths; earlier ones are forgotten."""
        numbered = [(node_id, depth) for depth, node_id in enumerate(self.trunk) if node_id is not None]
        return dict(numbered[-MAX_PATH_KEPT:])

    def commit(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            was_lost = self.is_lost
            self.committed.append(token_id)
            if was_lost:
                continue
            following = [p for p, hint in self.paths.items() if len(p) == 1 and hint.token_id == token_id]
            if not following:
                self.paths = {}
                continue
            chosen = following[0][0]
            self.trunk.append(chosen)
            self.num_used += 1
            self.paths = {p[1:]: hint for p, hint in self.paths.items() if p[0] == chosen and len(p) > 1}

    def primary_path(self) -> list[Hint]:
        found: list[Hint] = []
        path: tuple[int, ...] = ()
        while children := [p for p in self.paths if len(p) == len(path) + 1 and p[:-1] == path]:
            path = children[0]
            found.append(self.paths[path])
        return found


def check(tree: HintTree, reference: Reference) -> None:
    assert len(tree) == len(reference.paths) <= tree.max_nodes
    assert (tree.cursor is None) == reference.is_lost
    assert tree.primary_path(10_000) == reference.primary_path()
    assert tree.primary_path(2) == reference.primary_path()[:2]
    assert tree.num_stale == reference.num_sent - len(reference.paths) - reference.num_used, "a hint is unaccounted for"
    assert tree.primary_child(None) is None
    if reference.is_lost:
        assert len(tree) == 0
        return
    assert tree.cursor == reference.trunk[-1]
    parents = {path[-1]: path for path in reference.paths} | {tree.cursor: ()}
    for node_id, path in parents.items():
        children = [hint for p, hint in reference.paths.items() if p[:-1] == path]
        assert tree.primary_child(node_id) == (children[0] if children else None)
        for token_id in {hint.token_id for hint in children} | {99}:
            saying = [hint for hint in children if hint.token_id == token_id]
            assert tree.child_with_token(node_id, token_id) == (saying[0] if saying else None)


SMALL = st.integers(0, 7)
# Each field is named: of a tuple, hypothesis draws those with defaults, too.
PLAIN = {"distribution": st.none(), "confidence": st.just(0), "is_promoted": st.just(False)}
HINTS = st.lists(st.builds(Hint, node_id=SMALL, parent_id=SMALL, token_id=st.integers(0, 2), **PLAIN), max_size=7)
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-2, 4), HINTS, st.lists(st.integers(0, 2), max_size=2)),
    max_size=20,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(steps=STEPS, max_nodes=st.sampled_from([1, 3, 512]))
def test_any_messages_and_commits_give_what_the_rules_say(
    steps: list[tuple[int, int, list[Hint], list[int]]], max_nodes: int
) -> None:
    """Roots lie up to two tokens ahead and four behind what is committed."""
    tree, reference = HintTree(max_nodes=max_nodes), Reference(max_nodes, [0, 1])
    for attachment, back, hints, token_ids in steps:
        base_len = len(reference.committed) - back
        num_live = tree.add(reference.committed, attachment, base_len, hints)
        assert num_live == reference.add(attachment, base_len, hints)
        check(tree, reference)
        reference.commit(token_ids)
        tree.commit(token_ids)
        check(tree, reference)


@pytest.mark.parametrize("luck", range(12))
def test_a_long_life_among_liars(luck: int) -> None:
    """Long enough that the beginning of the committed path is forgotten."""
    rng = random.Random(luck)
    max_nodes = rng.choice([5, 40])
    is_loyal = luck % 2 == 0  # commits follow the tree, so that one root lives on
    tree, reference = HintTree(max_nodes=max_nodes), Reference(max_nodes, [0])
    next_id = 1
    attachment = 1
    for _ in range(500):
        hints = []
        parent = tree.cursor or ROOT_ID
        base_len = reference.base_len
        kind = rng.random()
        if (reference.is_lost and kind < 0.6) or (kind < 0.005 and not is_loyal):
            attachment += kind < 0.1
            base_len, parent = len(reference.committed) - rng.randrange(2), ROOT_ID
        elif kind < 0.05:
            base_len = rng.randrange(-1, 1 if is_loyal else len(reference.committed) + 3)
        for _ in range(rng.randrange(6)):
            known = [path[-1] for path in reference.paths] or [parent]
            node_id = next_id if rng.random() < 0.9 else rng.choice([ROOT_ID, *known, rng.randrange(next_id)])
            parent_id = parent if rng.random() < 0.8 else rng.choice([ROOT_ID, node_id, *known])
            hints.append(Hint(node_id, parent_id, rng.randrange(3)))
            next_id += 1
            parent = node_id if rng.random() < 0.7 else parent
        sender = attachment if rng.random() < 0.95 else rng.randrange(attachment)
        assert tree.add(reference.committed, sender, base_len, hints) == reference.add(sender, base_len, hints)
        check(tree, reference)
        primary = [hint.token_id for hint in tree.primary_path(rng.randrange(1, 4))]
        token_ids = primary if is_loyal or rng.random() < 0.93 else [*primary, rng.randrange(3)]
        if is_loyal and not primary and reference.is_lost:
            token_ids = [rng.randrange(3)]
        reference.commit(token_ids)
        tree.commit(token_ids)
        check(tree, reference)
    assert reference.num_used > 100
    assert not is_loyal or len(reference.trunk) > MAX_PATH_KEPT


def test_the_order_of_children_is_that_of_their_arrival_whatever_their_ids() -> None:
    tree = HintTree()
    tree.add([1], 1, 1, [Hint(9, ROOT_ID, 5), Hint(3, ROOT_ID, 6), Hint(1, 9, 7), Hint(2, 3, 8)])
    assert [hint.token_id for hint in tree.primary_path(9)] == [5, 7]
    assert tree.child_with_token(ROOT_ID, 6) == Hint(3, ROOT_ID, 6)


def test_of_two_children_that_say_the_same_the_first_carries_the_cursor() -> None:
    tree = HintTree()
    tree.add([1], 1, 1, [Hint(1, ROOT_ID, 5), Hint(2, ROOT_ID, 5), Hint(3, 2, 7), Hint(4, 1, 8)])
    tree.commit([5])
    assert [hint.node_id for hint in tree.primary_path(9)] == [4]
    assert tree.num_stale == 2
