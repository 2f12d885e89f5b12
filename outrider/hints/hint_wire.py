"""Compact wire format of one session's hints, as columns of numbers. Pure; both ends of a channel keep the same state.

In rejection mode every primary hint carries the distribution it was drawn from, and its size on the wire limits how
much of it can be sent. So everything that follows from the message before, or from the distribution, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.hints.confidence import NUM_LEVELS
from outrider.hints.hint_tree import DraftDistribution, Hint
from outrider.sampling_params import MAX_DRAFT_PROBS
from protos.outrider.v1 import hints_pb2

MAX_NODES_PER_MESSAGE = 512  # as many as a hint tree holds


@dataclass(slots=True)
class HintEncoder:
    """The draft worker's end of a channel."""

    base_len: int = 0  # of the last message
    next_node_id: int = 0

    def encode(self, message: hints_pb2.HintNodes, base_len: int, hints: Sequence[Hint]) -> None:
        """Fills in a message; `hints` must not be empty."""
        node_ids = [hint.node_id for hint in hints]
        first = node_ids[0]
        if base_len != self.base_len:
            message.base_len = base_len
        if node_ids != list(range(first, first + len(node_ids))):
            message.node_ids.extend(node_ids)
        elif message.base_len or first != self.next_node_id:
            message.first_node_id = first
        self.base_len, self.next_node_id = base_len, node_ids[-1] + 1
        sizes = []
        for hint in hints:
            message.parent_ids.append(hint.parent_id)
            if hint.distribution is None:
                sizes.append(0)
                message.token_ids.append(hint.token_id)
            else:
                sizes.append(len(hint.distribution.token_ids))
                _add_support(message, hint.token_id, hint.distribution)
        if any(sizes[1:]):
            message.support_sizes.extend(sizes)
        if any(hint.confidence for hint in hints):
            message.confidences.extend(hint.confidence for hint in hints)
        message.promoted_ids.extend(hint.node_id for hint in hints if hint.is_promoted)


def _add_support(message: hints_pb2.HintNodes, token_id: int, distribution: DraftDistribution) -> None:
    """Adds a distribution; the hint's own token comes first and needs no entry elsewhere."""
    index = distribution.token_ids.index(token_id)
    for column, values in (
        (message.support_token_ids, distribution.token_ids),
        (message.support_weights, distribution.weights),
    ):
        column.append(values[index])
        column.extend(values[:index])
        column.extend(values[index + 1 :])


@dataclass(slots=True)
class HintDecoder:
    """The target worker's end of a channel."""

    base_len: int = 0
    next_node_id: int = 0

    def decode(self, message: hints_pb2.HintNodes, vocab_size: int) -> list[Hint] | None:
        """Decodes the hints, below the root at `self.base_len`. None when the message is invalid.

        An invalid distribution is only dropped from its hint: taken as certain, the hint may cost acceptance but cannot
        bias the output. A token outside the vocabulary (a draft's padded rows) only loses its own node.
        """
        num_nodes, num_entries = len(message.parent_ids), len(message.support_token_ids)
        if num_nodes > MAX_NODES_PER_MESSAGE or len(message.support_weights) != num_entries:
            return None
        first = message.first_node_id or self.next_node_id
        node_ids = message.node_ids or range(first, first + num_nodes)
        sizes = message.support_sizes or [num_entries, *[0] * (num_nodes - 1)][:num_nodes]
        confidences = message.confidences or [0] * num_nodes
        if not len(node_ids) == len(sizes) == len(confidences) == num_nodes or sum(sizes) != num_entries:
            return None
        if len(message.token_ids) != sum(size == 0 for size in sizes) or max(sizes, default=0) > MAX_DRAFT_PROBS:
            return None
        if len(message.promoted_ids) > num_nodes:
            return None
        self.base_len = message.base_len or self.base_len
        self.next_node_id = node_ids[-1] + 1 if node_ids else first
        hints, offset, plain = [], 0, iter(message.token_ids)
        promoted = frozenset(message.promoted_ids)
        columns = zip(node_ids, message.parent_ids, sizes, confidences, strict=True)
        for node_id, parent_id, size, confidence in columns:
            distribution = None
            if size:
                entries = slice(offset, offset + size)
                offset += size
                distribution = DraftDistribution(
                    tuple(message.support_token_ids[entries]), tuple(message.support_weights[entries])
                )
            token_id = distribution.token_ids[0] if distribution is not None else next(plain)
            if distribution is not None and not distribution.is_valid(vocab_size):
                distribution = None
            if token_id < vocab_size:
                known = confidence if confidence <= NUM_LEVELS else 0
                hints.append(Hint(node_id, parent_id, token_id, distribution, known, node_id in promoted))
        return hints
