"""The hint tree: draft workers' guesses below one session's committed tokens. Pure.

A tree has a root at `base_len`, a committed length that the draft worker had seen; a node at depth d guesses the token
at position `base_len + d - 1`. The *cursor* is the node that the committed tokens lead to. A node is live only while
the path to it equals the committed tokens on their overlap (invariant I3); everything else is stale: dropped and
counted, never an error. Only the owner of the session moves the cursor, by reporting commits (I1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROOT_ID = 0
MAX_PATH_KEPT = 256
"""Committed nodes kept behind the cursor, so that late children of them are distinguished from invalid ones."""

WEIGHT_TOTAL_MAX = 65536


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """The exact distribution that a hint was sampled from: `weights[i] / total` is the probability of `token_ids[i]`
    (I5)."""

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]  # positive, their sum at most WEIGHT_TOTAL_MAX

    @property
    def total(self) -> int:
        """Sum of the weights, by which a probability is divided."""
        return sum(self.weights)

    def is_valid(self, vocab_size: int) -> bool:
        """Whether a peer's distribution is well-formed for this vocabulary."""
        return (
            0 < len(self.token_ids) == len(self.weights)
            and self.total <= WEIGHT_TOTAL_MAX
            and min(self.weights) > 0
            and len(set(self.token_ids)) == len(self.token_ids)
            and max(self.token_ids) < vocab_size
        )


class Hint(NamedTuple):
    """One node as it is sent: a guess, with its distribution in rejection mode, otherwise with the draft model's
    confidence (`outrider.hints.confidence`; 0: unknown).

    is_promoted: it becomes its parent's primary child, in the place of one that came earlier; it may have come earlier
    itself. Never under rejection sampling (I4). A tuple, because several are made for every token.
    """

    node_id: int
    parent_id: int
    token_id: int
    distribution: DraftDistribution | None = None
    confidence: int = 0
    is_promoted: bool = False


class Branch(NamedTuple):
    """A hint that is verified beside a path of hints. It follows the first `on_path` of them, or one of the branches.

    Branches stand in an order in which each comes after those that lead to it.
    """

    hint: Hint
    on_path: int  # hints of the path before it
    trail: tuple[int, ...]  # indices of the branches from the path down to this one, itself included

    @property
    def depth(self) -> int:
        """Hints from the committed tokens down to this one, itself included."""
        return self.on_path + len(self.trail)


@dataclass(slots=True)
class _Node:
    hint: Hint
    depth: int
    children: list[int] = field(default_factory=list)


class HintTree:
    """Hints below one session's committed tokens."""

    def __init__(self, *, max_nodes: int = 512) -> None:
        self.max_nodes = max_nodes
        self.num_stale = 0
        self.num_late = 0
        self._attachment = 0
        self._base_len = -1
        self._nodes: dict[int, _Node] = {}
        self._path: dict[int, int] = {}  # node id -> depth, root included, in order of depth
        self._cursor: int | None = None
        self._cursor_children: list[int] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, committed: Sequence[int], attachment: int, base_len: int, hints: Sequence[Hint]) -> int:
        """Adds nodes that arrived; returns how many of them are below the cursor.

        `committed` are the session's committed token ids. A greater (attachment, base_len) starts a new tree, a lesser
        one is stale.
        """
        if (attachment, base_len) < (self._attachment, self._base_len) or not 0 < base_len <= len(committed):
            self.num_stale += len(hints)
            return 0
        if (attachment, base_len) > (self._attachment, self._base_len):
            self._plant(attachment, base_len, len(committed))
        return sum(self._add_one(committed, hint) for hint in hints)

    def _plant(self, attachment: int, base_len: int, committed_len: int) -> None:
        self.num_stale += len(self._nodes)
        self._attachment, self._base_len = attachment, base_len
        self._nodes = {}
        self._path = {ROOT_ID: 0}
        self._cursor = ROOT_ID if base_len == committed_len else None
        self._cursor_children = []

    def _add_one(self, committed: Sequence[int], hint: Hint) -> bool:
        if hint.is_promoted and hint.node_id in self._nodes:
            return self._promote(self._nodes[hint.node_id], hint)
        known = hint.node_id in self._nodes or hint.node_id in self._path
        parent = self._nodes.get(hint.parent_id)
        on_path = hint.parent_id in self._path
        if known or not (parent or on_path) or len(self._nodes) >= self.max_nodes:
            self.num_stale += 1
            return False
        depth = (self._path[hint.parent_id] if on_path else parent.depth) + 1  # type: ignore[union-attr]
        position = self._base_len + depth - 1
        if position < len(committed):
            if committed[position] != hint.token_id or depth in self._path.values():
                self.num_stale += 1
                return False
            self._step_onto(hint.node_id, depth)
            self.num_late += 1
            if position == len(committed) - 1:
                self._cursor = hint.node_id
                self._cursor_children = []
            return False
        self._nodes[hint.node_id] = _Node(hint, depth)
        siblings = self._children_of(hint.parent_id)
        siblings.insert(0 if hint.is_promoted else len(siblings), hint.node_id)
        return True

    def _promote(self, node: _Node, hint: Hint) -> bool:
        """Makes a live node its parent's primary child; returns False, because it is not new."""
        if (node.hint.parent_id, node.hint.token_id) != (hint.parent_id, hint.token_id):
            self.num_stale += 1
            return False
        siblings = self._children_of(hint.parent_id)
        siblings.remove(hint.node_id)
        siblings.insert(0, hint.node_id)
        return False

    def _children_of(self, node_id: int) -> list[int]:
        return self._cursor_children if node_id == self._cursor else self._nodes[node_id].children

    def _step_onto(self, node_id: int, depth: int) -> None:
        self._path[node_id] = depth
        if len(self._path) > MAX_PATH_KEPT:
            del self._path[next(iter(self._path))]

    def commit(self, token_ids: Sequence[int]) -> None:
        """Moves the cursor along newly committed tokens and drops nodes that contradict them."""
        for token_id in token_ids:
            if self._cursor is None:
                break
            self._commit_one(token_id)

    def _commit_one(self, token_id: int) -> None:
        following = [child for child in self._cursor_children if self._nodes[child].hint.token_id == token_id]
        if not following:
            self.num_stale += len(self._nodes)
            self._nodes, self._cursor_children, self._cursor = {}, [], None
            return
        node = self._nodes[following[0]]
        for child in self._cursor_children:
            if child != following[0]:
                self._drop(child)
        del self._nodes[following[0]]
        self._step_onto(following[0], node.depth)
        self._cursor = following[0]
        self._cursor_children = node.children

    def _drop(self, node_id: int) -> None:
        pending = [node_id]
        while pending:
            node = self._nodes.pop(pending.pop())
            pending.extend(node.children)
            self.num_stale += 1

    def primary_path(self, max_len: int) -> list[Hint]:
        """The chain of primary children below the cursor, at most `max_len` hints."""
        path: list[Hint] = []
        following = self.primary_child(self._cursor)
        while following is not None and len(path) < max_len:
            path.append(following)
            following = self.primary_child(following.node_id)
        return path

    @property
    def root(self) -> tuple[int, int]:
        """Attachment and `base_len` of the tree; a greater pair starts a new one."""
        return self._attachment, self._base_len

    @property
    def cursor(self) -> int | None:
        """The node that the committed tokens lead to; None once they have left the tree."""
        return self._cursor

    def primary_child(self, node_id: int | None) -> Hint | None:
        """The primary child of the cursor or a live node; None for None."""
        children = self._children_of(node_id) if node_id is not None else []
        return self._nodes[children[0]].hint if children else None

    def alternatives(self, node_id: int, limit: int) -> list[Hint]:
        """The first children of the cursor or a live node beside the primary one, at most `limit`."""
        children = self._children_of(node_id)
        return [self._nodes[child].hint for child in children[1 : 1 + limit]] if len(children) > 1 else []

    def child_with_token(self, node_id: int | None, token_id: int) -> Hint | None:
        """The child of the cursor or a live node that guesses `token_id`; None for None."""
        for child in self._children_of(node_id) if node_id is not None else []:
            if self._nodes[child].hint.token_id == token_id:
                return self._nodes[child].hint
        return None
