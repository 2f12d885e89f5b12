"""A model without weights: any token that the grammar permits is as good as any other."""

from __future__ import annotations

import random

import numpy as np

from outrider.grammar import GrammarState


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
