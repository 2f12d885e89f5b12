"""A model without weights: any token that the grammar permits is as good as any other."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Final

import numpy as np

from outrider.grammar import GrammarState

_ENDINGS: Final = frozenset({'"', "}", "]", '"}', '"]', "{}", "[]", '""'})


def permitted_token_ids(state: GrammarState) -> list[int]:
    """The token ids permitted after the committed tokens, ascending."""
    token_ids: list[int] = np.flatnonzero(state.masks([[]])[0]).tolist()
    return token_ids


def walk_to_the_end(state: GrammarState, seed: int, eos_token_id: int, num_tokens_max: int) -> list[int]:
    """The tokens of one random complete output, its end-of-sequence id included; advances `state` by them."""
    choice = random.Random(seed)
    token_ids: list[int] = []
    while not token_ids or token_ids[-1] != eos_token_id:
        assert len(token_ids) < num_tokens_max, f"no end after {num_tokens_max} tokens"
        token_ids.append(choice.choice(permitted_token_ids(state)))
        state.advance(token_ids[-1:])
    return token_ids


def walk_briefly(
    state: GrammarState, seed: int, eos_token_id: int, decode: Callable[[list[int]], str], num_tokens_max: int
) -> list[int]:
    """The tokens of one random output that soon ends where it may: of a schema without bounds most never would."""
    choice = random.Random(seed)
    token_ids: list[int] = []
    while not token_ids or token_ids[-1] != eos_token_id:
        assert len(token_ids) < num_tokens_max, f"no end after {num_tokens_max} tokens: {decode(token_ids)[-200:]}"
        permitted = permitted_token_ids(state)
        ending = [token_id for token_id in permitted if token_id == eos_token_id or decode([token_id]) in _ENDINGS]
        marks = [token_id for token_id in permitted if decode([token_id]) in string.punctuation]
        token_ids.append(choice.choice((ending or marks or permitted) if choice.random() < 0.7 else permitted))
        state.advance(token_ids[-1:])
    return token_ids
