"""Traces of a hint tree (`traces/hint_tree_*.txt`): what arrives, what is committed, and the tree below the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.hints.hint_tree import Hint, HintTree
from tests.golden import check_trace

TRACES = Path(__file__).parent / "traces"
PROMPT = [1, 2, 3]


class Run:
    """A tree below a committed prompt of three tokens, whose every change is written down."""

    def __init__(self, max_nodes: int = 512) -> None:
        self.tree = HintTree(max_nodes=max_nodes)
        self.committed = [*PROMPT]
        self.lines: list[str] = []

    def add(self, *nodes: str, base_len: int = 3, attachment: int = 1) -> None:
        """Hints that arrive, each written as parent-node:token."""
        hints = [
            Hint(node_id=int(node), parent_id=int(parent), token_id=int(token))
            for parent, node, token in (each.replace("-", ":").split(":") for each in nodes)
        ]
        self.tree.add(self.committed, attachment, base_len, hints)
        self._write(f"hints of attachment {attachment} below {base_len} tokens: {'  '.join(nodes)}")

    def commit(self, *token_ids: int) -> None:
        self.committed += token_ids
        self.tree.commit(token_ids)
        self._write(f"committed: {' '.join(map(str, token_ids))}")

    def check(self, name: str, title: str) -> None:
        """Compares the trace with `traces/hint_tree_NAME.txt`."""
        check_trace(TRACES / f"hint_tree_{name}.txt", "\n".join([title, "", *self.lines, ""]))

    def _write(self, what: str) -> None:
        cursor = "no cursor" if self.tree.cursor is None else f"cursor {self.tree.cursor}"
        below = self._drawn(self.tree._cursor_children) or "nothing"
        counts = f"{self.tree.num_late} late, {self.tree.num_stale} stale"
        self.lines += [what, f"    {len(self.committed)} tokens, {cursor}, below it {below}; {counts}"]

    def _drawn(self, node_ids: Sequence[int]) -> str:
        """Siblings in their order, as node:token, each with its children in brackets."""
        nodes = [self.tree._nodes[node_id] for node_id in node_ids]
        return " ".join(
            f"{node.hint.node_id}:{node.hint.token_id}"
            + (f" ({below})" if (below := self._drawn(node.children)) else "")
            for node in nodes
        )


def test_the_cursor_follows_committed_tokens() -> None:
    run = Run()
    run.add("0-1:4", "1-2:5", "0-3:6", "2-4:7", "1-5:8")
    run.commit(4)
    run.commit(5, 7)
    run.add("4-6:1")
    run.check("follows", "Committed tokens move the cursor down the tree; what is beside their path becomes stale.")


def test_a_committed_token_outside_the_tree_empties_it() -> None:
    run = Run()
    run.add("0-1:4", "1-2:5")
    run.commit(9)
    run.add("2-3:6")
    run.add("0-1:7", "1-2:8", base_len=4)
    run.check("leaves", "No hint guessed the committed token: all are stale until a tree with a later root arrives.")


def test_late_hints_keep_the_path_of_those_behind_them() -> None:
    run = Run()
    run.commit(4, 5)
    run.add("0-1:4", "1-2:5", "2-3:6")
    run.add("1-4:9", "2-5:7")
    run.check(
        "late",
        "Hints for committed tokens that agree with them are late: they lead to those that still count.",
    )


def test_trees_of_an_earlier_root_or_draft_worker_are_stale() -> None:
    run = Run()
    run.commit(4)
    run.add("0-1:5", base_len=4)
    run.add("0-1:4", "1-2:5", base_len=3)
    run.add("0-1:4", "1-2:6", base_len=3, attachment=2)
    run.add("0-1:5", base_len=4, attachment=1)
    run.check("attachments", "A later attachment, or a later root, replaces the tree; an earlier one is stale.")


def test_what_no_tree_can_have_is_dropped() -> None:
    run = Run(max_nodes=3)
    run.add("0-1:4", "0-1:5", "9-2:6")
    run.add("1-3:5", "1-4:6", "1-5:7")
    run.add("0-1:4", base_len=8)
    run.check(
        "bounds",
        "A node that is known, has no parent, is one too many, or whose root is not committed, is stale.",
    )
