"""From logits to distributions and tokens: one module for both workers.

The order of the filters is that of transformers' logits processors: temperature, top_k, top_p, min_p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.hint_tree import WEIGHT_TOTAL, DraftDistribution
from outrider.randomness import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, Purpose, key, uniform
from outrider.sampling_params import SamplingParams

TEMPERATURE_MIN = 1e-6
"""Below it float32 cannot tell the distribution from the most likely token."""


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution after all processing, for temperature above 0.

    logits: float32 [num_rows, vocab_size]; returns float32 of the same shape, rows adding up to 1.
    """
    # The greatest logit is brought to 0 first, so that a tiny temperature cannot make infinities of them.
    logits = logits - logits.max(dim=-1, keepdim=True).values
    logits = logits / max(params.temperature, TEMPERATURE_MIN)
    if 0 < params.top_k < logits.shape[-1]:
        floor = torch.topk(logits, params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    if params.top_p < 1.0:
        ascending, order = torch.sort(probs, dim=-1, stable=True)
        # The smallest set of most likely tokens that reaches top_p: what lies below is dropped, never the last one.
        dropped = ascending.cumsum(dim=-1) <= 1.0 - params.top_p
        dropped[:, -1] = False
        probs = probs.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    if params.min_p > 0.0:
        probs = probs.masked_fill(probs < params.min_p * probs.max(dim=-1, keepdim=True).values, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def sample_from(weights: torch.Tensor, number: float) -> int:
    """The token at which the running sum of `weights` passes `number` (in (0, 1)) of the total.  # [vocab_size]"""
    running = weights.double().cumsum(dim=0)
    index = int(torch.searchsorted(running, number * float(running[-1]), right=True))
    return min(index, int(torch.nonzero(weights)[-1]))


def coupled_scores(probs: torch.Tensor, seed: int, positions: Sequence[int]) -> torch.Tensor:
    """What the shared Gumbel noise makes of each row's distribution; a row's greatest score is the choice.

    probs: [num_rows, vocab_size], row i for `positions[i]`; returns float64 of the same shape.
    argmax(log prob + Gumbel) is computed as argmax(prob / Exponential), the same choice with one logarithm less:
    Exponential is -log(u), u a hash of (seed, position, token id).
    """
    row_keys = [key(seed, position, Purpose.GUMBEL) for position in positions]
    return probs.double() / -torch.log(_token_uniforms(row_keys, probs.shape[-1]))


def coupled_choice(probs: torch.Tensor, seed: int, first_position: int) -> list[int]:
    """Row i's token for position `first_position + i` under the seed's noise.  # [num_rows, vocab_size]"""
    positions = range(first_position, first_position + len(probs))
    choices: list[int] = coupled_scores(probs, seed, positions).argmax(dim=-1).tolist()
    return choices


def _token_uniforms(row_keys: Sequence[int], vocab_size: int) -> torch.Tensor:
    """float64 [num_rows, vocab_size] in (0, 1): row i is SplitMix64's stream that starts at `row_keys[i]`."""
    starts = torch.tensor([[_signed(row_key + GOLDEN)] for row_key in row_keys])
    value = torch.arange(vocab_size) * _signed(GOLDEN) + starts
    value = (value ^ _shift_right(value, 30)) * _signed(MULTIPLIER_1)
    value = (value ^ _shift_right(value, 27)) * _signed(MULTIPLIER_2)
    value = value ^ _shift_right(value, 31)
    return (_shift_right(value, 12).double() + 0.5) * 2.0**-52


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's is arithmetic on signed integers."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def draft_distributions(probs: torch.Tensor, max_entries: int) -> list[DraftDistribution]:
    """Per row, what the draft will send *and* sample from (I5): the likeliest tokens, in 1/65536ths.

    probs: [num_rows, vocab_size]. Rounding is made up for at the likeliest token; entries that round to nothing
    are left out.
    """
    values, indices = torch.topk(probs, min(max_entries, probs.shape[-1]), dim=-1)
    values = values.double()
    scaled = (values * (WEIGHT_TOTAL / values.sum(dim=-1, keepdim=True))).long()
    scaled[:, 0] += WEIGHT_TOTAL - scaled.sum(dim=-1)
    distributions = []
    for token_ids, weights in zip(indices.tolist(), scaled.tolist(), strict=True):
        num_kept = sum(weight > 0 for weight in weights)  # they come in descending order
        distributions.append(DraftDistribution(tuple(token_ids[:num_kept]), tuple(weights[:num_kept])))
    return distributions


def sample_draft(distribution: DraftDistribution, seed: int, position: int) -> int:
    """A hint, drawn from exactly `distribution`."""
    remaining = int(uniform(seed, position, Purpose.DRAFT) * WEIGHT_TOTAL)
    for token_id, weight in zip(distribution.token_ids, distribution.weights, strict=True):
        remaining -= weight
        if remaining < 0:
            return token_id
    raise AssertionError("weights add up to less than their total")
