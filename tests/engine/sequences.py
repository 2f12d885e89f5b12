"""Helpers that drive an engine by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.kv.prefix_cache import block_digests
from outrider.engine.model import Engine, SequenceChunk


def feed(engine: Engine, kv: KVSequence, token_ids: Sequence[int], num_logits: int) -> torch.Tensor:
    """Feeds one sequence alone; its last `num_logits` rows.  # [num_logits, vocab_size]"""
    kv.extend(len(token_ids))
    return engine.forward([SequenceChunk(kv, list(token_ids), num_logits)])[:num_logits]


def sharing(engine: Engine, kv: KVSequence, token_ids: Sequence[int]) -> KVSequence:
    """A second sequence, which begins with the full blocks of one whose KV is that of `token_ids`."""
    digests = block_digests(token_ids, engine.block_size)
    kv.publish(digests, 0)
    other = engine.new_sequence()
    other.adopt(digests)
    return other


def logits_of(engine: Engine, token_ids: Sequence[int], prefill: int = 0) -> torch.Tensor:
    """Logits of every token of a fresh sequence, the first `prefill` fed apart.  # [num_tokens, vocab_size]"""
    kv = engine.new_sequence()
    try:
        parts = [part for part in (token_ids[:prefill], token_ids[prefill:]) if len(part)]
        return torch.cat([feed(engine, kv, part, len(part)) for part in parts])
    finally:
        kv.free()


def text(length: int, seed: int, vocab_size: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()
