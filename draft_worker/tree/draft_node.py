"""A node of a draft worker's hint tree. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from outrider.hints.confidence import Calibration
from outrider.hints.hint_tree import ROOT_ID, Hint

NUM_NEAR_NODES = 9
"""Nodes below the cursor that a target verifies in one step by default: eight are fed, the last one needs no
feeding."""
MIN_CHANCE = 0.01
"""Probability of a guessed token that the row behind its parent finds unlikely."""


@dataclass(slots=True, eq=False)
class DraftNode:
    """A node of a session's hint tree."""

    hint: Hint
    depth: int  # below the root; it guesses position base_len + depth - 1
    reach: float  # estimated probability that the committed tokens reach it
    children: list[int] = field(default_factory=list)  # the primary child first
    # (token, probability), likeliest first; not yet nodes.
    alternatives: list[tuple[int, float]] = field(default_factory=list)
    entry: int | None = None  # index of its KV entry, once fed
    is_sent: bool = False


def root() -> DraftNode:
    """A root, which stands for the last committed token."""
    return DraftNode(Hint(ROOT_ID, ROOT_ID, -1), depth=0, reach=1.0)


Nodes = Mapping[int, DraftNode]
"""Nodes of one tree by their ids."""


def primary_path(node: DraftNode, nodes: Nodes) -> Iterator[DraftNode]:
    """The primary child of a node, that one's primary child, and so on."""
    while node.children:
        node = nodes[node.children[0]]
        yield node


def child_with_token(node: DraftNode, nodes: Nodes, token_id: int) -> DraftNode | None:
    """The child of a node that guesses `token_id`."""
    return next((nodes[child] for child in node.children if nodes[child].hint.token_id == token_id), None)


def branch(cursor: DraftNode, nodes: Nodes, node_id: int) -> list[DraftNode]:
    """The nodes from the cursor's child down to this one."""
    found: list[DraftNode] = []
    while node_id != cursor.hint.node_id:
        found.append(nodes[node_id])
        node_id = found[-1].hint.parent_id
    return found[::-1]


def kept_below(cursor: DraftNode, nodes: Nodes) -> dict[int, DraftNode]:
    """The nodes below a cursor that has moved, which is reached now; the probabilities of the others follow."""
    kept: dict[int, DraftNode] = {}
    pending = list(cursor.children)
    cursor_reach = max(cursor.reach, 1e-30)
    while pending:
        node_id = pending.pop()
        node = nodes[node_id]
        node.reach /= cursor_reach
        kept[node_id] = node
        pending.extend(node.children)
    cursor.reach = 1.0
    return kept


def calibrate(
    calibration: Calibration | None, token_ids: Sequence[int], acceptance_rate: float, path: Iterable[DraftNode]
) -> None:
    """Compares a primary path with the committed tokens, whether the target verified it or not."""
    for token_id, node in zip(token_ids, path, strict=False):
        if calibration is None:
            return
        is_accepted = node.hint.token_id == token_id
        calibration.observe(node.hint.confidence, acceptance_rate, is_accepted=is_accepted)
        if not is_accepted:
            return


def fed_below(node: DraftNode, nodes: Nodes) -> list[int]:
    """Ids of the fed nodes below a node, in the order of their KV entries."""
    found, pending = [], list(node.children)
    while pending:
        child = nodes[pending.pop()]
        if child.entry is not None:
            found.append(child)
            pending.extend(child.children)
    return [each.hint.node_id for each in sorted(found, key=lambda each: each.entry or 0)]


def is_any_near(hints: Sequence[Hint], cursor: DraftNode, nodes: Nodes) -> bool:
    """Whether any of these hints is one of the next nodes on the primary path."""
    sent = {hint.node_id for hint in hints}
    return any(node.hint.node_id in sent for node in islice(primary_path(cursor, nodes), NUM_NEAR_NODES))


def scale_reach(node: DraftNode, nodes: Nodes, reach: float) -> None:
    """Sets the probability that a node is reached, and changes those below it in proportion."""
    factor, node.reach = reach / node.reach, reach
    pending = list(node.children)
    while pending:
        child = nodes[pending.pop()]
        child.reach *= factor
        pending.extend(child.children)


def hints_anew(cursor: DraftNode, nodes: Nodes) -> list[Hint]:
    """The hints of all nodes below the cursor, parents first, for a target that has none of them."""
    hints = []
    for node_id in sorted(nodes):
        hint = nodes[node_id].hint
        siblings = (nodes.get(hint.parent_id) or cursor).children
        hints.append(hint._replace(is_promoted=siblings[0] == node_id != min(siblings)))
    return hints
