"""Rejection sampling (2211.17192): which hints are accepted, and what the token that follows is drawn from.

`target_at` are a sequence's target_probs where they matter for that: per hint, the probabilities of the tokens that the
draft could have sent in its place. They are numbers on the host, and so are the decisions: a sequence of dependent ones
takes a device longer to begin with than Python to finish. Whole rows stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.engine.sampling.randomness import Purpose, uniform
from outrider.hints.hint_tree import DraftDistribution, Hint
from outrider.sampling_params import AcceptanceRule

TargetAt = Sequence[Sequence[float]]
"""[num_hints][entries of the hint's distribution]"""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """So many hints are accepted; the next token comes from `residuals` of the next hint with this scale."""

    num_accepted: int
    scale: float = 1.0


def draft_distribution(hint: Hint) -> DraftDistribution:
    """The distribution that a hint was drawn from. A hint without one counts as certain: verification is exact for any
    fixed guess."""
    return hint.distribution or DraftDistribution((hint.token_id,), (1,))


def accept(rule: AcceptanceRule, target_at: TargetAt, hints: Sequence[Hint], seed: int, position: int) -> Acceptance:
    """Decides about the hints for `position` and after."""
    decide = accept_block if rule is AcceptanceRule.BLOCK else accept_tokens
    return decide(target_at, hints, seed, position)


def accept_tokens(target_at: TargetAt, hints: Sequence[Hint], seed: int, position: int) -> Acceptance:
    """Token by token (Leviathan et al. 2211.17192); every token is distributed as target_probs of its row."""
    for row, hint in enumerate(hints):
        ratio = likelihood_ratio(target_at[row], draft_distribution(hint), hint.token_id)
        if uniform(seed, position, Purpose.ACCEPT, row) >= ratio:
            return Acceptance(row)
    return Acceptance(len(hints))


def accept_block(target_at: TargetAt, hints: Sequence[Hint], seed: int, position: int) -> Acceptance:
    """The block as a whole (block verification, Sun et al. 2403.10444, algorithm 2).

    Never fewer expected tokens than token by token: a hint that would be rejected may be carried by likelier ones
    around it. `scales[i]` is the probability that at least i hints are accepted, given what they are; `chances[i]`
    that acceptance goes to hint i at least when it does not go further. Each number is drawn for this block alone.
    """
    scales, chances = block_chances(target_at, hints)
    num_accepted = 0
    for row, chance in enumerate(chances, start=1):
        if uniform(seed, position, Purpose.ACCEPT, row) < chance:
            num_accepted = row
    return Acceptance(num_accepted, scales[num_accepted] if num_accepted < len(hints) else 1.0)


def block_chances(target_at: TargetAt, hints: Sequence[Hint]) -> tuple[list[float], list[float]]:
    """(scales [num_hints + 1], chances [num_hints]) of `accept_block`: p_0 .. p_n and h_1 .. h_n of the paper."""
    scales, chances = [1.0], []
    for row, hint in enumerate(hints):
        ratio = likelihood_ratio(target_at[row], draft_distribution(hint), hint.token_id)
        scales.append(min(scales[-1] * ratio, 1.0))
    for row in range(1, len(hints)):
        scale = scales[row]
        # The mass of max(0, scale * p - q), by way of its complement: q has few entries, p has many.
        gain = max(scale - _overlap(target_at[row], draft_distribution(hints[row]), scale), 0.0)
        chances.append(gain / (gain + 1.0 - scale) if gain + 1.0 - scale > 0.0 else 1.0)
    return scales, [*chances, scales[-1]] if hints else []


def likelihood_ratio(target_at: Sequence[float], draft_probs: DraftDistribution, token_id: int) -> float:
    """p / q at a token that q can draw."""
    entry = draft_probs.token_ids.index(token_id)
    return target_at[entry] * draft_probs.total / draft_probs.weights[entry]


def _overlap(target_at: Sequence[float], draft_probs: DraftDistribution, scale: float) -> float:
    """The sum of min(scale * p, q)."""
    total = draft_probs.total
    return math.fsum(
        min(scale * prob, weight / total) for prob, weight in zip(target_at, draft_probs.weights, strict=True)
    )


def sample_number(acceptance: Acceptance, num_hints: int, seed: int, position: int) -> float:
    """The random number that decides about the token after the accepted hints."""
    purpose = Purpose.RECOVER if acceptance.num_accepted < num_hints else Purpose.BONUS
    return uniform(seed, position + acceptance.num_accepted, purpose)


def residuals(
    rows: torch.Tensor, scales: torch.Tensor, indices: torch.Tensor, draft_probs: torch.Tensor
) -> torch.Tensor:
    """max(0, scale * p - q) of each row, not normalized.  # float64 [num_rows, vocab_size]

    rows: p, [num_rows, vocab_size]; scales: float64 [num_rows, 1]; indices: int64, where `rows`, flattened, has the
    tokens that q can draw; draft_probs: float64, q at each of them. A row of zeros, which only rounding makes, where p
    and q are equal, becomes p itself.
    """
    rows = rows.double()
    weights = rows * scales
    weights.view(-1).index_add_(0, indices, draft_probs, alpha=-1)
    weights.clamp_min_(0.0)
    return torch.where(weights.amax(dim=-1, keepdim=True) > 0.0, weights, rows)
