"""Makes the changes of `logit_edits` to logits, for the rows of a whole batch at once.

An operation works on single elements or keeps to its row, and each element is changed once by each kind of edit, so
that a row has the same bits in any batch (invariant I2). Order: logit_bias, repetition_penalty, presence_penalty and
frequency_penalty, then everything that rules tokens out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.sampling.logit_context import LogitContext as LogitContext
from outrider.engine.sampling.logit_edits import LogitEdits, edits_of
from outrider.engine.sampling.logit_edits import is_idle as is_idle
from outrider.engine.sampling.transfers import to_device
from outrider.sampling_params import SamplingParams

NEVER = float("-inf")


def process(logits: torch.Tensor, params: SamplingParams, text: LogitContext) -> torch.Tensor:
    """One request's logits after everything that greedy decoding heeds too; what is ruled out has -inf.

    logits: float32 [num_rows, vocab_size], left as it is; returns the same shape, or `logits` itself when there is
    nothing to do. Raises GrammarViolation as `edits_of` does.
    """
    edits = edits_of(params, text, logits.shape[-1])
    return logits if edits is None else apply_edits(logits, [(0, edits)])


def apply_edits(logits: torch.Tensor, edits: Sequence[tuple[int, LogitEdits]]) -> torch.Tensor:
    """Edits of several requests, each with its first row.  # logits: float32 [num_rows, vocab_size], left as it is"""
    if not edits:
        return logits
    vocab_size, device = logits.shape[-1], logits.device

    def flat_indices(indices_of: Callable[[LogitEdits], npt.NDArray[np.int64]]) -> torch.Tensor | None:
        """The positions of one kind of edit in the flattened logits."""
        indices = np.concatenate([indices_of(each) + first_row * vocab_size for first_row, each in edits])
        return to_device(indices, device) if len(indices) else None

    masked = [(first_row, each.permitted) for first_row, each in edits if each.permitted is not None]
    logits = logits.clone(memory_format=torch.contiguous_format)
    flat = logits.view(-1)
    if (indices := flat_indices(lambda each: each.biased)) is not None:
        flat.index_add_(0, indices, to_device(np.concatenate([each.biases for _, each in edits]), device))
    if (indices := flat_indices(lambda each: each.repeated)) is not None:
        counts = [len(each.repeated) for _, each in edits]
        penalties = np.repeat(np.array([each.repetition_penalty for _, each in edits], np.float32), counts)
        _penalize_repetition(flat, indices, to_device(penalties, device))
    if (indices := flat_indices(lambda each: each.penalized)) is not None:
        flat.index_add_(0, indices, to_device(-np.concatenate([each.penalties for _, each in edits]), device))
    if (indices := flat_indices(lambda each: each.forbidden)) is not None:
        flat.index_fill_(0, indices, NEVER)
    for first_row, permitted in masked:
        ruled_out = to_device(~permitted, device)
        logits[first_row : first_row + len(permitted)].masked_fill_(ruled_out, NEVER)
    return logits


def _penalize_repetition(flat: torch.Tensor, indices: torch.Tensor, penalties: torch.Tensor) -> None:
    scores = flat.index_select(0, indices)
    penalized = torch.where(scores < 0, scores * penalties, scores / penalties)
    # A tiny penalty must not make infinities: they have no softmax.
    flat.index_copy_(0, indices, penalized.clamp_(max=torch.finfo(penalized.dtype).max))
