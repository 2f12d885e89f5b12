"""From logits to distributions and tokens: one module for both workers.

The order of the filters is that of transformers' logits warpers: temperature, top_k, top_p, min_p, typical_p. What
greedy decoding heeds as well was applied before (`logit_processing`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.engine.kernels import MAX_LIKELY
from outrider.engine.kernels import most_likely as most_likely_kernel
from outrider.engine.logit_processing import NEVER
from outrider.hint_tree import DraftDistribution
from outrider.randomness import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, Purpose, key, uniform
from outrider.sampling_params import SamplingParams

TEMPERATURE_MIN = 1e-6
"""Below it float32 cannot tell the distribution from the most likely token."""


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that a token is drawn from, for temperature above 0.

    logits: processed, float32 [num_rows, vocab_size], each row with one finite value at least; returns float32 of the
    same shape, rows adding up to 1. Row by row: nothing here depends on how many rows there are. (`softmax`, `cumsum`
    and `sort` keep to their rows; `sum` over a large vocabulary does not, once torch has more than one thread.)
    """
    # The greatest logit is brought to 0 first, so that a tiny temperature cannot make infinities of them.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    logits = logits / max(params.temperature, TEMPERATURE_MIN)
    if 0 < params.top_k < logits.shape[-1]:
        floor = torch.topk(logits, params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, NEVER)
    if params.top_p < 1.0:
        logits = _keep_nucleus(logits, params.top_p)
    if params.min_p > 0.0:
        probs = torch.softmax(logits, dim=-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(dim=-1, keepdim=True), NEVER)
    if params.typical_p < 1.0:
        logits = _keep_typical(logits, params.typical_p)
    return torch.softmax(logits, dim=-1)


def _keep_nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of most likely tokens that reaches top_p (Holtzman et al. 1904.09751)."""
    ascending, order = torch.sort(logits, dim=-1, stable=True)
    dropped = torch.softmax(ascending, dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    dropped[:, -1] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), NEVER)


def _keep_typical(logits: torch.Tensor, typical_p: float) -> torch.Tensor:
    """The tokens whose surprise is closest to the expected one, up to typical_p (Meister et al. 2202.00666)."""
    surprise = -torch.log_softmax(logits, dim=-1)
    probs = torch.softmax(logits, dim=-1)
    entropy = torch.where(probs > 0, surprise * probs, 0.0).cumsum(dim=-1)[:, -1:]
    distance, order = torch.sort((surprise - entropy).abs(), dim=-1, stable=True)
    reached = torch.softmax(logits.gather(-1, order), dim=-1).cumsum(dim=-1)
    last = (reached < typical_p).sum(dim=-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    dropped = distance > distance.gather(-1, last)
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), NEVER)


def greedy_choices(logits: torch.Tensor) -> list[int]:
    """Each row's most likely token, of equals the first.  # float32 [num_rows, vocab_size]"""
    kernel = most_likely_kernel()
    if kernel is None or not _is_readable(logits):
        return logits.argmax(dim=-1).tolist()
    choices = np.empty(len(logits), dtype=np.int64)
    kernel(logits.data_ptr(), *logits.shape, 1, choices.ctypes.data, None)
    return choices.tolist()


def most_likely(logits: torch.Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Per row the most likely tokens in falling order and their chances.  # float32 [num_rows, vocab_size]

    The first is the one that `greedy_choices` takes: several tokens often share the maximum in bfloat16.
    """
    count = min(count, logits.shape[-1], MAX_LIKELY)
    kernel = most_likely_kernel()
    if kernel is None or not _is_readable(logits):
        best = torch.topk(torch.softmax(logits, dim=-1), count, dim=-1)
        token_ids = best.indices.tolist()
        for row, first in zip(token_ids, logits.argmax(dim=-1).tolist(), strict=True):
            others = [token_id for token_id in row if token_id != first]
            row[:] = [first, *others[: count - 1]]
        return token_ids, best.values.tolist()
    indices = np.empty((len(logits), count), dtype=np.int64)
    values = np.empty((len(logits), count), dtype=np.float32)
    kernel(logits.data_ptr(), *logits.shape, count, indices.ctypes.data, values.ctypes.data)
    return indices.tolist(), values.tolist()


def _is_readable(logits: torch.Tensor) -> bool:
    """By the compiled kernels."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()


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
    return probs.double() / -torch.log(_token_uniforms(row_keys, probs.shape[-1], probs.device))


def coupled_choice(probs: torch.Tensor, seed: int, first_position: int) -> list[int]:
    """Row i's token for position `first_position + i` under the seed's noise.  # [num_rows, vocab_size]"""
    positions = range(first_position, first_position + len(probs))
    choices: list[int] = coupled_scores(probs, seed, positions).argmax(dim=-1).tolist()
    return choices


def _token_uniforms(
    row_keys: Sequence[int], vocab_size: int, device: torch.device | None = None
) -> torch.Tensor:
    """float64 [num_rows, vocab_size] in (0, 1): row i is SplitMix64's stream that starts at `row_keys[i]`."""
    starts = torch.tensor([[_signed(row_key + GOLDEN)] for row_key in row_keys], device=device)
    value = torch.arange(vocab_size, device=device) * _signed(GOLDEN) + starts
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


def draft_distributions(probs: torch.Tensor, max_entries: int, bits: int = 16) -> list[DraftDistribution]:
    """Per row, what the draft will send *and* sample from (I5): the likeliest tokens, in 1/2**bits.

    probs: [num_rows, vocab_size]. Rounding is made up for at the likeliest token; entries that round to nothing
    are left out.
    """
    total = 1 << bits
    values, indices = torch.topk(probs, min(max_entries, probs.shape[-1]), dim=-1)
    values = values.double()
    scaled = (values * (total / values.sum(dim=-1, keepdim=True))).long()
    scaled[:, 0] += total - scaled.sum(dim=-1)
    distributions = []
    for token_ids, weights in zip(indices.tolist(), scaled.tolist(), strict=True):
        num_kept = sum(weight > 0 for weight in weights)  # they come in descending order
        distributions.append(DraftDistribution(tuple(token_ids[:num_kept]), tuple(weights[:num_kept])))
    return distributions


def sample_draft(distribution: DraftDistribution, seed: int, number: int) -> int:
    """A hint, drawn from exactly `distribution`: the draft's `number`-th draw of this session.

    Draws are counted and not named after their position, because the same position is guessed again on other branches
    and after a rejection; a number that a verdict may already have depended on must not come back.
    """
    remaining = int(uniform(seed, number, Purpose.DRAFT) * distribution.total)
    for token_id, weight in zip(distribution.token_ids, distribution.weights, strict=True):
        remaining -= weight
        if remaining < 0:
            return token_id
    raise AssertionError("weights add up to less than their total")
