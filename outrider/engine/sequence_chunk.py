"""The part of a step that belongs to one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.layers.attention import QueryBlock


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """New tokens of one sequence for one step.

    `KVSequence.extend` reserves room for them beforehand: they are entries `[kv.length - len(token_ids), kv.length)`.
    Logits are computed for the last `num_logits` of them.
    """

    kv: KVSequence
    token_ids: Sequence[int]
    num_logits: int
    tree_start: int = 0  # for nodes of a hint tree, as in `QueryBlock`
    paths: Sequence[Sequence[int]] | None = None

    def query_block(self) -> QueryBlock:
        return QueryBlock(self.kv, len(self.token_ids), self.tree_start, self.paths)
