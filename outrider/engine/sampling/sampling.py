"""From logits to distributions and tokens: one module for both workers.

The order of the filters is that of transformers' logits warpers: temperature, top_k, top_p, min_p, typical_p. What
greedy decoding heeds as well was applied before (`logit_processing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from outrider.engine.compiled.kernels import MAX_LIKELY
from outrider.engine.compiled.kernels import coupled_choices as coupled_choices_kernel
from outrider.engine.compiled.kernels import most_likely as most_likely_kernel
from outrider.engine.sampling.logit_processing import NEVER
from outrider.engine.sampling.randomness import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, Purpose, key, uniform
from outrider.engine.sampling.transfers import filled
from outrider.hints.hint_tree import DraftDistribution
from outrider.sampling_params import DecodingMode, SamplingParams

TEMPERATURE_MIN = 1e-6
"""Below it float32 cannot tell the distribution from the most likely token."""
SCANNED_ROWS = 8
"""Rows of one scan on a CUDA device."""


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distributions of rows that have the same parameters, as `row_probabilities`."""
    return row_probabilities(logits, [params] * len(logits))


def row_probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The distribution that each row's token is drawn from, for temperatures above 0.

    logits: processed, float32 [num_rows, vocab_size], each row with one finite value at least (else the row comes out
    as NaN); params: each row's own. Returns float32 of the same shape, rows adding up to 1. Row by row: nothing here
    depends on how many rows there are. (`softmax`, `sort` and `running_sums` keep to their rows; `sum` over a large
    vocabulary does not, once torch has more than one thread.)
    """
    if all(map(_is_plain, params)):  # the same bits as below, with fewer passes over the rows
        return torch.softmax(logits, dim=-1)
    # The greatest logit is brought to 0 first, so that a tiny temperature cannot make infinities of them.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    logits /= _column([max(each.temperature, TEMPERATURE_MIN) for each in params], logits)
    vocab_size = logits.shape[-1]
    for keep, values, is_wanted in (
        (_keep_top, [float(each.top_k) for each in params], [0 < each.top_k < vocab_size for each in params]),
        (_keep_nucleus, [1.0 - each.top_p for each in params], [each.top_p < 1.0 for each in params]),
        (_keep_likely, [each.min_p for each in params], [each.min_p > 0.0 for each in params]),
        (_keep_typical, [each.typical_p for each in params], [each.typical_p < 1.0 for each in params]),
    ):
        rows = [row for row, wanted in enumerate(is_wanted) if wanted]
        if len(rows) == len(params):
            logits = keep(logits, values)
        elif rows:
            index = filled(rows, np.int64, logits.device)
            kept = keep(logits.index_select(0, index), [values[row] for row in rows])
            logits.index_copy_(0, index, kept)
    return torch.softmax(logits, dim=-1)


def _is_plain(params: SamplingParams) -> bool:
    """Whether a row's distribution is the model's own."""
    return (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p) == (1.0, 0, 1.0, 0.0, 1.0)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """A number for each row.  # float32 [num_rows, 1]"""
    return filled(values, np.float32, like.device).unsqueeze(-1)


def _keep_top(logits: torch.Tensor, top_k: Sequence[float]) -> torch.Tensor:
    """The most likely tokens, as many as each row asks for, and their equals."""
    greatest = torch.topk(logits, int(max(top_k)), dim=-1).values
    floor = greatest.gather(1, filled(top_k, np.int64, logits.device).unsqueeze(-1) - 1)
    return logits.masked_fill(logits < floor, NEVER)


def _keep_nucleus(logits: torch.Tensor, tails: Sequence[float]) -> torch.Tensor:
    """The smallest set of most likely tokens that reaches top_p, which is 1 - tail (Holtzman et al. 1904.09751)."""
    ascending, order = torch.sort(logits, dim=-1, stable=True)
    dropped = running_sums(torch.softmax(ascending, dim=-1)) <= _column(tails, logits)
    dropped[:, -1] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), NEVER)


def _keep_likely(logits: torch.Tensor, min_p: Sequence[float]) -> torch.Tensor:
    """The tokens that are at least min_p as likely as the most likely one."""
    probs = torch.softmax(logits, dim=-1)
    return logits.masked_fill(probs < _column(min_p, logits) * probs.amax(dim=-1, keepdim=True), NEVER)


def _keep_typical(logits: torch.Tensor, typical_p: Sequence[float]) -> torch.Tensor:
    """The tokens whose surprise is closest to the expected one, up to typical_p (Meister et al. 2202.00666)."""
    surprise = -torch.log_softmax(logits, dim=-1)
    probs = torch.softmax(logits, dim=-1)
    entropy = running_sums(torch.where(probs > 0, surprise * probs, 0.0))[:, -1:]
    distance, order = torch.sort((surprise - entropy).abs(), dim=-1, stable=True)
    reached = running_sums(torch.softmax(logits.gather(-1, order), dim=-1))
    last = (reached < _column(typical_p, logits)).sum(dim=-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    dropped = distance > distance.gather(-1, last)
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), NEVER)


def running_sums(rows: torch.Tensor) -> torch.Tensor:
    """Sums of each row's first elements, added up in an order that no other row changes.  # [num_rows, width]

    A processor adds from left to right. CUDA's scan divides a row among threads by the number of rows: it is given
    the same number of them every time.
    """
    if rows.device.type != "cuda":
        return rows.cumsum(dim=-1)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % SCANNED_ROWS))
    return torch.cat([part.cumsum(dim=-1) for part in padded.split(SCANNED_ROWS)])[: len(rows)]


def greedy_choices(logits: torch.Tensor) -> list[int]:
    """Each row's most likely token, of equals the first.  # float32 [num_rows, vocab_size]"""
    choices: list[int] = greedy_tokens(logits).tolist()
    return choices


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Each row's most likely token, of equals the first.  # float32 [num_rows, vocab_size] -> int64 [num_rows]"""
    kernel = most_likely_kernel()
    if kernel is None or not _is_readable(logits):
        return logits.argmax(dim=-1)
    choices = np.empty(len(logits), dtype=np.int64)
    kernel(logits.data_ptr(), *logits.shape, 1, choices.ctypes.data, None)
    return torch.from_numpy(choices)


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


def likely_choices(
    logits: torch.Tensor, params: SamplingParams, seed: int, positions: Sequence[int], count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Per row the choices that a target is most likely to make, in falling order, and their chances.

    logits: processed, float32 [num_rows, vocab_size], of one sequence, row i for `positions[i]`. In coupled decoding
    the noise of the seed, which the target uses too, decides among likely tokens.
    """
    if params.decoding_mode is DecodingMode.GREEDY:
        return most_likely(logits, count)
    chances = probabilities(logits, params)
    if params.decoding_mode is DecodingMode.COUPLED:
        return likely_coupled_choices(chances, coupled_keys(seed, positions), count)
    best = torch.topk(chances, min(count, chances.shape[-1]), dim=-1)
    return best.indices.tolist(), best.values.tolist()


def _is_readable(logits: torch.Tensor) -> bool:
    """By the compiled kernels."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()


def sample_rows(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Each row's token at which the running sum of its weights passes its number (in (0, 1)) of their total.

    weights: float64 [num_rows, vocab_size], none below 0 and one above; numbers: float64 [num_rows, 1]. Returns int64
    [num_rows, 1].
    """
    running = running_sums(weights)
    total = running[:, -1:].contiguous()
    passed = torch.searchsorted(running, numbers * total, right=True)
    # Rounding may put the number at the total itself: then it is the token that completes the total.
    token_ids = torch.minimum(passed, torch.searchsorted(running, total))
    return token_ids.clamp_(max=weights.shape[-1] - 1)  # whatever a broken model's numbers are


def coupled_keys(seed: int, positions: Iterable[int]) -> list[int]:
    """The keys of the noise of each position's row."""
    return [key(seed, position, Purpose.GUMBEL) for position in positions]


def keyed_scores(probs: torch.Tensor, row_keys: Sequence[int]) -> torch.Tensor:
    """Scores of each row's tokens under the shared Gumbel noise; a row's greatest score is the choice.

    probs: [num_rows, vocab_size]; returns float64 of the same shape. argmax(log prob + Gumbel) is computed as
    argmax(prob / Exponential), the same choice with one logarithm less: Exponential is -log(u), u a hash of (seed,
    position, token id).
    """
    waits = _token_uniforms(row_keys, probs.shape[-1], probs.device).log_().neg_()
    return torch.div(probs.double(), waits, out=waits)


def likely_coupled_choices(
    probs: torch.Tensor, row_keys: Sequence[int], count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Per row the tokens with the greatest `keyed_scores` in falling order, and their shares of the sum of all scores.
    # float32 [num_rows, vocab_size]

    The compiled kernel takes a fraction of the time that all the scores take, and its shares are a little lower.
    """
    count = min(count, probs.shape[-1], MAX_LIKELY)
    kernel = coupled_choices_kernel()
    if kernel is None or not _is_readable(probs):
        scores = keyed_scores(probs, row_keys)
        best = torch.topk(scores / scores.sum(dim=-1, keepdim=True), count, dim=-1)
        return best.indices.tolist(), best.values.tolist()
    keys = np.array(row_keys, dtype=np.uint64)
    choices = np.empty((len(probs), count), dtype=np.int64)
    shares = np.empty((len(probs), count), dtype=np.float32)
    kernel(probs.data_ptr(), *probs.shape, keys.ctypes.data, count, choices.ctypes.data, shares.ctypes.data)
    return choices.tolist(), shares.tolist()


def coupled_choices(probs: torch.Tensor, row_keys: Sequence[int]) -> torch.Tensor:
    """Each row's choice, the token with the greatest of its `keyed_scores`.  # float32 [num_rows, vocab_size] -> int64

    Of a vocabulary of 128,256 tokens the compiled kernel takes a fraction of the time that all the scores take.
    """
    kernel = coupled_choices_kernel()
    if kernel is None or not _is_readable(probs):
        return keyed_scores(probs, row_keys).argmax(dim=-1)
    keys = np.array(row_keys, dtype=np.uint64)
    choices = torch.empty(len(probs), dtype=torch.int64)
    kernel(probs.data_ptr(), *probs.shape, keys.ctypes.data, 1, choices.data_ptr(), None)
    return choices


def _token_uniforms(row_keys: Sequence[int], vocab_size: int, device: torch.device | None = None) -> torch.Tensor:
    """float64 [num_rows, vocab_size] in (0, 1): row i is SplitMix64's stream that starts at `row_keys[i]`."""
    starts = filled(
        [_signed(row_key + GOLDEN) for row_key in row_keys], np.int64, device or torch.device("cpu")
    ).unsqueeze(-1)
    value = torch.arange(vocab_size, device=device) * _signed(GOLDEN) + starts
    value.bitwise_xor_(_shift_right(value, 30)).mul_(_signed(MULTIPLIER_1))
    value.bitwise_xor_(_shift_right(value, 27)).mul_(_signed(MULTIPLIER_2))
    value.bitwise_xor_(_shift_right(value, 31))
    return _shift_right(value, 12).double().add_(0.5).mul_(2.0**-52)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's is arithmetic on signed integers."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


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
