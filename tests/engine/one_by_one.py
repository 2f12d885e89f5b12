"""Verification of one sequence after the other: the reference for `tests/engine/test_verification_batch.py`.

The code from before a step's sequences were verified together. Of the product's sampling it shares only the hash.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.sampling.logit_context import LogitContext
from outrider.engine.sampling.randomness import (
    GOLDEN,
    MULTIPLIER_1,
    MULTIPLIER_2,
    Purpose,
    key,
    uniform,
)
from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.engine.sampling.verdict import Verdict
from outrider.hints.hint_tree import DraftDistribution, Hint
from outrider.sampling_params import AcceptanceRule, DecodingMode, SamplingParams

NEVER = float("-inf")
TEMPERATURE_MIN = 1e-6


def verify(
    logits: torch.Tensor,
    hints: Sequence[Hint],
    params: SamplingParams,
    seed: int,
    text: LogitContext,
    acceptance_rule: AcceptanceRule = AcceptanceRule.BLOCK,
) -> Verdict:
    """Decides the tokens of positions `len(text.token_ids)` and after, as far as the hints hold.

    logits: the model's own, float32 [num_rows, vocab_size]. hints: num_rows - 1 that were fed, perhaps one more.
    text: `continuations[i]` are the first i hints.
    """
    assert len(logits) - 1 <= len(hints) <= len(logits)
    position = len(text.token_ids)
    processed = process(logits, params, text)
    # Beyond a position that leaves no token nothing can be decided; at the first one the session has to end. Where
    # that is depends on the hints before it only, so that it biases nothing.
    num_alive = len(logits) if processed is logits else num_rows_alive(processed)
    if num_alive == 0:
        return Verdict([], 0, 0)
    processed, hints = processed[:num_alive], hints[:num_alive]
    probs = None
    if params.decoding_mode is DecodingMode.GREEDY:
        verdict = verify_choices(processed.argmax(dim=-1).tolist(), hints)
    else:
        probs = probabilities(processed, params)
        if params.decoding_mode is DecodingMode.COUPLED:
            verdict = verify_choices(coupled_choice(probs, seed, position), hints)
        elif acceptance_rule is AcceptanceRule.BLOCK:
            verdict = verify_block(probs, hints, seed, position)
        else:
            verdict = verify_tokens(probs, hints, seed, position)
    if params.num_logprobs is None:
        return verdict
    source = logits
    if params.are_logprobs_processed:
        source = processed if probs is None else probs.log()
    num_said = len(verdict.token_ids)
    logprobs = token_logprobs(source[:num_said], verdict.token_ids, params.num_logprobs)
    return Verdict(verdict.token_ids, verdict.num_accepted, verdict.num_matched, logprobs)


def verify_choices(choices: list[int], hints: Sequence[Hint]) -> Verdict:
    """Greedy and coupled: the target's choice is known, a hint holds when it is the same token."""
    num_matched = 0
    while num_matched < len(hints) and hints[num_matched].token_id == choices[num_matched]:
        num_matched += 1
    num_accepted = min(num_matched, len(choices) - 1)
    return Verdict(choices[: num_accepted + 1], num_accepted, num_matched)


def verify_tokens(target_probs: torch.Tensor, hints: Sequence[Hint], seed: int, position: int) -> Verdict:
    """Token by token (Leviathan et al. 2211.17192); every token is distributed as `target_probs` of its row.

    target_probs: [num_rows, vocab_size]; hints as in `verify`.
    """
    last = len(target_probs) - 1
    for row, hint in enumerate(hints):
        draft_probs = draft_distribution(hint)
        ratio = likelihood_ratio(target_probs[row], draft_probs, hint.token_id)
        if uniform(seed, position, Purpose.ACCEPT, row) >= ratio:
            return _recover(target_probs, hints, row, 1.0, seed, position)
    return _accept_all(target_probs, hints, seed, position) if len(hints) == last else _hold(hints, last)


def verify_block(target_probs: torch.Tensor, hints: Sequence[Hint], seed: int, position: int) -> Verdict:
    """The block as a whole (block verification, Sun et al. 2403.10444, algorithm 2).

    Never fewer expected tokens than token by token: a hint that would be rejected may be carried by likelier ones
    around it. `scales[i]` is the probability that at least i hints are accepted, given what they are; `chances[i]`
    that acceptance goes to hint i at least when it does not go further. Each number is drawn for this block alone.
    """
    last = len(target_probs) - 1
    scales, chances = block_chances(target_probs, hints)
    num_held = 0
    for row, chance in enumerate(chances, start=1):
        if uniform(seed, position, Purpose.ACCEPT, row) < chance:
            num_held = row
    if num_held < len(hints):
        return _recover(target_probs, hints, num_held, scales[num_held], seed, position)
    return _accept_all(target_probs, hints, seed, position) if len(hints) == last else _hold(hints, last)


def block_chances(target_probs: torch.Tensor, hints: Sequence[Hint]) -> tuple[list[float], list[float]]:
    """(scales [num_hints + 1], chances [num_hints]) of `verify_block`: p_0 .. p_n and h_1 .. h_n of the paper.

    target_probs: [at least num_hints, vocab_size].
    """
    scales, chances = [1.0], []
    for row, hint in enumerate(hints):
        ratio = likelihood_ratio(target_probs[row], draft_distribution(hint), hint.token_id)
        scales.append(min(scales[-1] * ratio, 1.0))
    for row in range(1, len(hints)):
        scale = scales[row]
        # The mass of max(0, scale * p - q), by way of its complement: q has few entries, p has many.
        gain = max(scale - _overlap(target_probs[row], draft_distribution(hints[row]), scale), 0.0)
        chances.append(gain / (gain + 1.0 - scale) if gain + 1.0 - scale > 0.0 else 1.0)
    return scales, [*chances, scales[-1]] if hints else []


def _recover(
    target_probs: torch.Tensor, hints: Sequence[Hint], row: int, scale: float, seed: int, position: int
) -> Verdict:
    """The first `row` hints hold; what follows is drawn from what the next hint left over."""
    weights = residual(target_probs[row], draft_distribution(hints[row]), scale)
    token_id = sample_from(weights, uniform(seed, position + row, Purpose.RECOVER))
    return Verdict([*(hint.token_id for hint in hints[:row]), token_id], row, row)


def _accept_all(target_probs: torch.Tensor, hints: Sequence[Hint], seed: int, position: int) -> Verdict:
    """The verdict if all hints were fed and accepted: the last distribution gives one more token."""
    last = len(hints)
    token_id = sample_from(target_probs[last], uniform(seed, position + last, Purpose.BONUS))
    return Verdict([*(hint.token_id for hint in hints), token_id], last, last)


def _hold(hints: Sequence[Hint], num_fed: int) -> Verdict:
    """The verdict if all hints are accepted, the last of which was not fed."""
    return Verdict([hint.token_id for hint in hints], num_fed, len(hints))


def draft_distribution(hint: Hint) -> DraftDistribution:
    """The distribution that a hint was drawn from. A hint without one counts as certain: verification is exact for any
    fixed guess."""
    return hint.distribution or DraftDistribution((hint.token_id,), (1,))


def likelihood_ratio(target_probs: torch.Tensor, draft_probs: DraftDistribution, token_id: int) -> float:
    """p / q at a token that q can draw.  # target_probs: [vocab_size]"""
    weight = draft_probs.weights[draft_probs.token_ids.index(token_id)]
    return float(target_probs[token_id]) * draft_probs.total / weight


def _overlap(target_probs: torch.Tensor, draft_probs: DraftDistribution, scale: float) -> float:
    """The sum of min(scale * p, q).  # target_probs: [vocab_size]"""
    at_support: list[float] = target_probs[list(draft_probs.token_ids)].tolist()
    total = draft_probs.total
    return math.fsum(
        min(scale * prob, weight / total) for prob, weight in zip(at_support, draft_probs.weights, strict=True)
    )


def residual(target_probs: torch.Tensor, draft_probs: DraftDistribution, scale: float = 1.0) -> torch.Tensor:
    """max(0, scale * p - q), not normalized.  # [vocab_size]

    All zeros only where rounding made p and q equal; p itself is returned then.
    """
    weights = target_probs.double() * scale
    taken = weights.new_tensor(draft_probs.weights) / draft_probs.total
    weights[list(draft_probs.token_ids)] -= taken
    weights.clamp_min_(0.0)
    return weights if bool(weights.any()) else target_probs


def process(logits: torch.Tensor, params: SamplingParams, text: LogitContext) -> torch.Tensor:
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


def _counts(text: LogitContext, start: int, vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
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


def _penalize_repetition(logits: torch.Tensor, penalty: float, text: LogitContext) -> torch.Tensor:
    token_ids, counts = _counts(text, 0, logits.shape[-1])
    index, occurs = (torch.from_numpy(each).to(logits.device) for each in (token_ids, counts > 0))
    scores = logits[:, index]
    penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
    penalized = penalized.clamp(max=torch.finfo(penalized.dtype).max)
    return logits.index_copy(1, index, torch.where(occurs, penalized, scores))


def _penalize_output(logits: torch.Tensor, params: SamplingParams, text: LogitContext) -> torch.Tensor:
    token_ids, counts = _counts(text, text.num_prompt_tokens, logits.shape[-1])
    index, times = (torch.from_numpy(each).to(logits.device) for each in (token_ids, counts))
    times = times.float()
    penalty = params.frequency_penalty * times + params.presence_penalty * (times > 0).float()
    return logits.index_add(1, index, -penalty)


def _forbid_bad_words(logits: torch.Tensor, params: SamplingParams, text: LogitContext) -> torch.Tensor:
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


def _forbid_the_end(logits: torch.Tensor, min_tokens: int, text: LogitContext) -> torch.Tensor:
    is_early = torch.tensor(
        [[text.num_output_tokens(row) < min_tokens] for row in range(len(logits))], device=logits.device
    )
    ends = logits.new_zeros(logits.shape[-1], dtype=torch.bool)
    ends[_within(text.end_token_ids, logits)] = True
    return logits.masked_fill(is_early & ends, NEVER)


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that a token is drawn from, for temperature above 0.

    logits: processed, float32 [num_rows, vocab_size], each row with one finite value at least; returns float32 of the
    same shape, rows adding up to 1. Row by row: nothing here depends on how many rows there are. (`softmax`, `cumsum`
    and `sort` keep to their rows; `sum` over a large vocabulary does not, once torch has more than one thread.)
    """
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


def sample_from(weights: torch.Tensor, number: float) -> int:
    """The token at which the running sum of `weights` passes `number` (in (0, 1)) of the total.  # [vocab_size]"""
    running = weights.double().cumsum(dim=0)
    index = int(torch.searchsorted(running, number * float(running[-1]), right=True))
    return min(index, int(torch.nonzero(weights)[-1]))


def coupled_scores(probs: torch.Tensor, seed: int, positions: Sequence[int]) -> torch.Tensor:
    """Scores of each row's tokens under the shared Gumbel noise; the token with a row's highest score is its choice.

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


def _token_uniforms(row_keys: Sequence[int], vocab_size: int, device: torch.device | None = None) -> torch.Tensor:
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


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Row i's distribution at `token_ids[i]`, and its `num_top` likeliest tokens.

    logits: float32 [len(token_ids), vocab_size], of any scale: they are normalized here.
    """
    if not token_ids:
        return []
    logprobs = torch.log_softmax(logits, dim=-1)
    said = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = (logprobs > said).sum(dim=-1) + 1
    values, indices = torch.topk(logprobs, min(num_top, logits.shape[-1]), dim=-1)
    return [
        TokenLogprobs(logprob, rank, tuple(zip(row_ids, row_values, strict=True)))
        for logprob, rank, row_ids, row_values in zip(
            said[:, 0].tolist(), ranks.tolist(), indices.tolist(), values.tolist(), strict=True
        )
    ]
