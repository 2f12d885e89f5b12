"""What a request's parameters make of the model's logits, position by position.

Every row of logits belongs to one position, and all that a parameter may depend on is the text before it: the
committed tokens, then the hints that this row takes as said. So a row comes out the same whether its token is decided
alone or in a block of hints, which is what keeps speculation out of the output (invariant I2). Meaning and order are
those of transformers' logits processors; presence and frequency penalties, which it lacks, are OpenAI's.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.text_before import TextBefore as TextBefore
from outrider.sampling_params import SamplingParams

NEVER = float("-inf")


def process(logits: torch.Tensor, params: SamplingParams, text: TextBefore) -> torch.Tensor:
    """Logits after everything that greedy decoding heeds too; what is ruled out has -inf.

    logits: float32 [num_rows, vocab_size], left as it is; returns the same shape, or `logits` itself when there is
    nothing to do. Ids beyond vocab_size are passed over: a draft model may have fewer rows than its target.
    """
    logits = _add_bias(logits, params)
    if params.repetition_penalty != 1.0:
        logits = _penalize_repetition(logits, params.repetition_penalty, text)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        logits = _penalize_output(logits, params, text)
    if params.bad_words:
        logits = _forbid_bad_words(logits, params, text)
    if params.min_tokens > len(text.token_ids) - text.num_prompt_tokens:
        logits = _forbid_the_end(logits, params.min_tokens, text)
    if params.allowed_token_ids:
        allowed = logits.new_zeros(logits.shape[-1], dtype=torch.bool)
        allowed[_within(params.allowed_token_ids, logits)] = True
        logits = logits.masked_fill(~allowed, NEVER)
    if text.grammar is not None:
        allowed = torch.from_numpy(text.grammar.masks(text.continuations)).to(logits.device)
        logits = logits.masked_fill(~allowed, NEVER)
    return logits


def is_idle(params: SamplingParams, text: TextBefore) -> bool:
    """Whether `process` has nothing to do, so that rows of many sequences can be decided together."""
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


def num_rows_alive(logits: torch.Tensor) -> int:
    """Rows before the first one that leaves no token at all.  # [num_rows, vocab_size]"""
    is_dead = (logits.amax(dim=-1) == NEVER).tolist()
    return is_dead.index(True) if True in is_dead else len(is_dead)


def _within(token_ids: Collection[int], logits: torch.Tensor) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    within = [token_id for token_id in token_ids if token_id < vocab_size]
    return torch.tensor(within, dtype=torch.int64, device=logits.device)


def _add_bias(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    biases = {token_id: bias for token_id, bias in params.logit_bias if token_id < logits.shape[-1]}
    if not biases:
        return logits
    token_ids = torch.tensor(list(biases), device=logits.device)
    return logits.index_add(1, token_ids, logits.new_tensor(list(biases.values())).expand(len(logits), -1))


def _counts(
    text: TextBefore, start: int, vocab_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How often each token occurs from position `start` on, up to each row: (token ids, counts [num_rows, ids])."""
    hinted = [token_id for continuation in text.continuations for token_id in continuation]
    said = np.asarray(text.token_ids[start:], dtype=np.int64)
    token_ids = np.unique(np.concatenate([said, np.asarray(hinted, dtype=np.int64)]))
    token_ids = token_ids[token_ids < vocab_size]
    counts = np.zeros((len(text.continuations), len(token_ids)), dtype=np.int64)
    counts += np.bincount(said, minlength=vocab_size)[token_ids]
    place = {int(token_id): index for index, token_id in enumerate(token_ids)} if hinted else {}
    for row, continuation in enumerate(text.continuations):
        for token_id in continuation:
            if token_id in place:
                counts[row, place[token_id]] += 1
    return token_ids, counts


def _penalize_repetition(logits: torch.Tensor, penalty: float, text: TextBefore) -> torch.Tensor:
    token_ids, counts = _counts(text, 0, logits.shape[-1])
    index, occurs = (torch.from_numpy(each).to(logits.device) for each in (token_ids, counts > 0))
    scores = logits[:, index]
    penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
    # A tiny penalty must not make infinities: they have no softmax.
    penalized = penalized.clamp(max=torch.finfo(penalized.dtype).max)
    return logits.index_copy(1, index, torch.where(occurs, penalized, scores))


def _penalize_output(logits: torch.Tensor, params: SamplingParams, text: TextBefore) -> torch.Tensor:
    token_ids, counts = _counts(text, text.num_prompt_tokens, logits.shape[-1])
    index, times = (torch.from_numpy(each).to(logits.device) for each in (token_ids, counts))
    times = times.float()
    penalty = params.frequency_penalty * times + params.presence_penalty * (times > 0).float()
    return logits.index_add(1, index, -penalty)


def _forbid_bad_words(logits: torch.Tensor, params: SamplingParams, text: TextBefore) -> torch.Tensor:
    """Rules out the last token of every word whose other tokens were just said."""
    longest = max(len(word) for word in params.bad_words) - 1
    vocab_size = logits.shape[-1]
    rows, token_ids = [], []
    for row in range(len(logits)):
        tail = tuple(text.tail(row, longest))
        for *beginning, last in params.bad_words:
            if last < vocab_size and tail[len(tail) - len(beginning) :] == tuple(beginning):
                rows.append(row)
                token_ids.append(last)
    logits = logits.clone()
    logits[rows, token_ids] = NEVER
    return logits


def _forbid_the_end(logits: torch.Tensor, min_tokens: int, text: TextBefore) -> torch.Tensor:
    is_early = torch.tensor(
        [[text.num_output_tokens(row) < min_tokens] for row in range(len(logits))], device=logits.device
    )
    ends = logits.new_zeros(logits.shape[-1], dtype=torch.bool)
    ends[_within(text.end_token_ids, logits)] = True
    return logits.masked_fill(is_early & ends, NEVER)
