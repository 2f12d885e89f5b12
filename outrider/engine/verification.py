"""Which hints become tokens (design section 5).

One forward pass over the last committed token and v hints gives v + 1 distributions. `rows[i]` belongs to position
`position + i`, and `hints[i]` is the guess for that position; there may be one hint more than was fed to the
model: a guess for the last position costs nothing to verify, and when it holds, everything that the draft wrote
beyond it stays live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.engine.sampling import coupled_choice, probabilities, sample_from
from outrider.hint_tree import WEIGHT_TOTAL, DraftDistribution, Hint
from outrider.randomness import Purpose, uniform
from outrider.sampling_params import DecodingMode, SamplingParams


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step says for one session: accepted hints, then exactly one token more."""

    token_ids: list[int]  # [num_accepted + 1]
    num_accepted: int  # of the hints that were fed to the model
    num_matched: int  # of all hints, one that was not fed included


def verify(
    logits: torch.Tensor,  # float32 [num_rows, vocab_size]
    hints: Sequence[Hint],  # num_rows - 1 that were fed, perhaps one more
    params: SamplingParams,
    seed: int,
    position: int,
) -> Verdict:
    """Decides the tokens of positions `position` to `position + num_rows - 1`, as far as the hints hold."""
    assert len(logits) - 1 <= len(hints) <= len(logits)
    if params.decoding_mode is DecodingMode.GREEDY:
        return _verify_choices(logits.argmax(dim=-1).tolist(), hints)
    probs = probabilities(logits, params)
    if params.decoding_mode is DecodingMode.COUPLED:
        return _verify_choices(coupled_choice(probs, seed, position), hints)
    return _verify_rejection(probs, hints, seed, position)


def _verify_choices(choices: list[int], hints: Sequence[Hint]) -> Verdict:
    """Greedy and coupled: the target's choice is known, a hint holds when it is the same token."""
    num_accepted = 0
    while num_accepted < len(choices) - 1 and hints[num_accepted].token_id == choices[num_accepted]:
        num_accepted += 1
    num_matched = num_accepted
    if num_accepted < len(hints) and hints[num_accepted].token_id == choices[num_accepted]:
        num_matched += 1  # the guess for the last position, which cost nothing
    return Verdict(choices[: num_accepted + 1], num_accepted, num_matched)


def _verify_rejection(probs: torch.Tensor, hints: Sequence[Hint], seed: int, position: int) -> Verdict:
    """Speculative sampling (Leviathan et al. 2211.17192): every token is distributed as `probs` of its row."""
    token_ids: list[int] = []
    last = len(probs) - 1
    for row, target_probs in enumerate(probs):
        if row == len(hints):
            token_ids.append(sample_from(target_probs, uniform(seed, position + row, Purpose.BONUS)))
            break
        hint = hints[row]
        draft_probs = hint.distribution or certain(hint.token_id)
        if not is_accepted(
            target_probs, draft_probs, hint.token_id, uniform(seed, position + row, Purpose.ACCEPT)
        ):
            weights = residual(target_probs, draft_probs)
            token_ids.append(sample_from(weights, uniform(seed, position + row, Purpose.RECOVER)))
            return Verdict(token_ids, row, row)
        token_ids.append(hint.token_id)
    return Verdict(token_ids, last, min(len(hints), last + 1))


def certain(token_id: int) -> DraftDistribution:
    """The distribution of a hint that was not sampled: verification is exact for any deterministic guess."""
    return DraftDistribution((token_id,), (WEIGHT_TOTAL,))


def is_accepted(
    target_probs: torch.Tensor, draft_probs: DraftDistribution, token_id: int, number: float
) -> bool:
    """True with probability min(1, p / q), where `number` is uniform in (0, 1).  # target_probs: [vocab_size]"""
    draft_weight = draft_probs.weights[draft_probs.token_ids.index(token_id)]
    return number * draft_weight < float(target_probs[token_id]) * WEIGHT_TOTAL


def residual(target_probs: torch.Tensor, draft_probs: DraftDistribution) -> torch.Tensor:
    """max(0, p - q), not normalized.  # [vocab_size]

    All zeros only where rounding made p and q equal; p itself is returned then.
    """
    weights = target_probs.clone()
    indices = torch.tensor(draft_probs.token_ids)
    weights[indices] -= torch.tensor(draft_probs.weights, dtype=weights.dtype) / WEIGHT_TOTAL
    weights.clamp_min_(0.0)
    return weights if bool(weights.any()) else target_probs
