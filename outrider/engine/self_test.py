"""What an engine is asked before it serves: whether company changes a text on this machine (invariant I2)."""

from __future__ import annotations

import numpy as np
import torch

from outrider.engine.model import Engine
from outrider.engine.sequence_chunk import SequenceChunk


@torch.inference_mode()
def batch_invariance_failures(engine: Engine, num_rounds: int = 3) -> list[str]:
    """Self-test: the logits of a sequence alone, in company, in blocks and chunked must have the same bits.

    Returns what differed, empty when the machine keeps invariant I2 for this model.
    """
    generator = np.random.default_rng(0)
    failures = []
    for round_index in range(num_rounds):
        length = min(40 + 110 * round_index, engine.max_model_len)
        tail = min(8, length // 2)
        token_ids = generator.integers(0, engine.vocab_size, length).tolist()
        one_by_one = _logits_in_pieces(engine, token_ids, [length - tail] + [1] * tail)
        first = (length - tail) // 4
        for label, pieces in (
            (f"a block of {tail}", [length - tail, tail]),
            ("chunks", [first, length - tail - first, tail]),
        ):
            together = _logits_in_pieces(engine, token_ids, pieces, company=round_index + 1)
            if not torch.equal(one_by_one[-tail:], together[-tail:]):
                failures.append(f"{label} at length {length}")
    return failures


def _logits_in_pieces(
    engine: Engine, token_ids: list[int], pieces: list[int], company: int = 0
) -> torch.Tensor:
    """Logits of every token, run in `pieces`, with `company` other sequences in every step."""
    kv = engine.new_sequence()
    others = [engine.new_sequence() for _ in range(company)]
    outputs, done = [], 0
    for piece in filter(None, pieces):
        chunks = []
        for number, other in enumerate(others):
            size = min(1 + (3 * number + piece) % 7, len(token_ids))
            other.extend(size)
            chunks.append(SequenceChunk(other, token_ids[:size], 1))
        kv.extend(piece)
        chunks.append(SequenceChunk(kv, token_ids[done : done + piece], piece))
        outputs.append(engine.forward(chunks)[company:])
        done += piece
    for sequence in (kv, *others):
        sequence.free()
    return torch.cat(outputs)
