"""Self-test of an engine before it serves: whether batch composition changes an output on this machine (invariant
I2)."""

from __future__ import annotations

import numpy as np
import torch

from outrider.engine.model import Engine
from outrider.engine.sequence_chunk import SequenceChunk


@torch.inference_mode()
def batch_invariance_failures(engine: Engine, num_rounds: int = 3) -> list[str]:
    """Compares the bits of a sequence's logits when run alone, batched with others, in blocks and in chunks.

    Where steps may have different numbers of threads (`Engine.can_share_cores`), so do these. Returns the differences;
    empty when the machine keeps invariant I2 for this model.
    """
    generator = np.random.default_rng(0)
    failures = []
    for round_index in range(num_rounds):
        length = min(40 + 110 * round_index, engine.max_model_len)
        tail = min(8, length // 2)
        token_ids = generator.integers(0, engine.vocab_size, length).tolist()
        if engine.can_share_cores:
            engine.use_threads(beside_draft=True)
        one_by_one = _logits_in_pieces(engine, token_ids, [length - tail] + [1] * tail)
        first = (length - tail) // 4
        for label, pieces in (
            (f"a block of {tail}", [length - tail, tail]),
            ("chunks", [first, length - tail - first, tail]),
        ):
            if engine.can_share_cores:
                engine.use_threads(beside_draft=False)
            together = _logits_in_pieces(engine, token_ids, pieces, num_others=round_index + 1)
            if not torch.equal(one_by_one[-tail:], together[-tail:]):
                failures.append(f"{label} at length {length}")
    return failures


def _logits_in_pieces(engine: Engine, token_ids: list[int], pieces: list[int], num_others: int = 0) -> torch.Tensor:
    """Logits of every token, run in `pieces`, with `num_others` other sequences in every step."""
    kv = engine.new_sequence()
    others = [engine.new_sequence() for _ in range(num_others)]
    outputs, done = [], 0
    for piece in filter(None, pieces):
        chunks = []
        for number, other in enumerate(others):
            size = min(1 + (3 * number + piece) % 7, len(token_ids))
            other.extend(size)
            chunks.append(SequenceChunk(other, token_ids[:size], 1))
        kv.extend(piece)
        chunks.append(SequenceChunk(kv, token_ids[done : done + piece], piece))
        outputs.append(engine.forward(chunks)[num_others:])
        done += piece
    for sequence in (kv, *others):
        sequence.free()
    return torch.cat(outputs)
