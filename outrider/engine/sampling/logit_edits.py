"""The changes that a request's parameters make to its rows of logits, computed on the host. Loads without torch.

Every row of logits belongs to one position, and all that a parameter may depend on is the tokens before it: the
committed tokens, then the hints that this row assumes. So a row is changed in the same way whether its token is
decided alone or in a block of hints, which is what keeps speculation out of the output (invariant I2). The meaning is
that of transformers' logits processors; presence and frequency penalties, which it lacks, are OpenAI's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.sampling.logit_context import Indices, LogitContext, Values
from outrider.sampling_params import SamplingParams

NO_INDICES: Indices = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """Changes to one request's logits, in the order in which they are made."""

    biased: Indices
    biases: Values
    repeated: Indices  # what the repetition penalty is for
    repetition_penalty: float
    penalized: Indices
    penalties: Values  # subtracted
    forbidden: Indices
    permitted: npt.NDArray[np.bool_] | None  # [num_rows, vocab_size]; None: all


def is_idle(params: SamplingParams, text: LogitContext) -> bool:
    """Whether the parameters leave the logits as they are, so that rows of many sequences can be decided together."""
    return not (
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.bad_words
        or params.allowed_token_ids
        or text.grammar is not None
        or params.min_tokens > len(text.token_ids) - text.num_prompt_tokens
    )


def edits_of(params: SamplingParams, text: LogitContext, vocab_size: int) -> LogitEdits | None:
    """The changes to the rows of `text.continuations`; None where there are none.

    Token ids beyond vocab_size are passed over: a draft model may have fewer rows than its target. Raises
    GrammarViolation at a limit of the grammar's parser.
    """
    if is_idle(params, text):
        return None
    repeated = NO_INDICES
    if params.repetition_penalty != 1.0:
        repeated, _ = text.counted_from(0).before_rows(text.continuations, vocab_size)
    forbidden = {*_bad_word_ends(params, text, vocab_size), *_early_ends(params, text, vocab_size)}
    return LogitEdits(
        *_biases(params, text, vocab_size),
        repeated,
        params.repetition_penalty,
        *_penalties(params, text, vocab_size),
        np.array(sorted(forbidden), dtype=np.int64),
        _permitted(params, text, vocab_size),
    )


def _biases(params: SamplingParams, text: LogitContext, vocab_size: int) -> tuple[Indices, Values]:
    biases = {token_id: bias for token_id, bias in params.logit_bias if token_id < vocab_size}
    num_rows = len(text.continuations)
    starts = np.arange(num_rows, dtype=np.int64)[:, None] * vocab_size
    indices = (starts + np.array(list(biases), dtype=np.int64)).reshape(-1)
    return indices, np.tile(np.array(list(biases.values()), dtype=np.float32), num_rows)


def _penalties(params: SamplingParams, text: LogitContext, vocab_size: int) -> tuple[Indices, Values]:
    if params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        return NO_INDICES, np.empty(0, dtype=np.float32)
    indices, counts = text.counted_from(text.num_prompt_tokens).before_rows(text.continuations, vocab_size)
    return indices, np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty)


def _bad_word_ends(params: SamplingParams, text: LogitContext, vocab_size: int) -> Iterable[int]:
    """The last token of every word whose other tokens come just before the row."""
    words = [(word[:-1], word[-1]) for word in params.bad_words if word[-1] < vocab_size]
    longest = max((len(beginning) for beginning, _ in words), default=0)
    for row in range(len(text.continuations) if words else 0):
        tail = tuple(text.tail(row, longest))
        for beginning, last in words:
            if tail[len(tail) - len(beginning) :] == beginning:
                yield row * vocab_size + last


def _early_ends(params: SamplingParams, text: LogitContext, vocab_size: int) -> Iterable[int]:
    """The tokens that would end the output, in rows before min_tokens."""
    for row in range(len(text.continuations)):
        if text.num_output_tokens(row) < params.min_tokens:
            yield from (row * vocab_size + end for end in text.end_token_ids if end < vocab_size)


def _permitted(params: SamplingParams, text: LogitContext, vocab_size: int) -> npt.NDArray[np.bool_] | None:
    permitted = None if text.grammar is None else text.grammar.masks(text.continuations)
    if params.allowed_token_ids:
        allowed = np.zeros(vocab_size, dtype=np.bool_)
        token_ids = np.fromiter(params.allowed_token_ids, np.int64, len(params.allowed_token_ids))
        allowed[token_ids[token_ids < vocab_size]] = True
        shape = (len(text.continuations), vocab_size)
        permitted = np.broadcast_to(allowed, shape) if permitted is None else permitted & allowed
    return permitted
