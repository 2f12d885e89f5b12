"""Which hints become tokens (design section 5).

One forward pass over the last committed token and v hints gives v + 1 distributions. `rows[i]` belongs to position
`position + i`, and `hints[i]` is the guess for that position; there may be one hint more than was fed to the
model: a guess for the last position costs nothing to verify, and when it holds, everything that the draft wrote
beyond it stays live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from outrider.engine.logit_processing import TextBefore, num_rows_alive, process
from outrider.engine.logprobs import token_logprobs
from outrider.engine.sampling import coupled_choice, probabilities, sample_from
from outrider.engine.verdict import Verdict as Verdict
from outrider.hint_tree import DraftDistribution, Hint
from outrider.randomness import Purpose, uniform
from outrider.sampling_params import AcceptanceRule, DecodingMode, SamplingParams


def verify(
    logits: torch.Tensor,
    hints: Sequence[Hint],
    params: SamplingParams,
    seed: int,
    text: TextBefore,
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
    """All hints were fed and hold: a distribution is left over for one token more."""
    last = len(hints)
    token_id = sample_from(target_probs[last], uniform(seed, position + last, Purpose.BONUS))
    return Verdict([*(hint.token_id for hint in hints), token_id], last, last)


def _hold(hints: Sequence[Hint], num_fed: int) -> Verdict:
    """All hints hold, the last of which was not fed."""
    return Verdict([hint.token_id for hint in hints], num_fed, len(hints))


def draft_distribution(hint: Hint) -> DraftDistribution:
    """What a hint was drawn from. Without one it counts as certain: verification is exact for any fixed guess."""
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
        min(scale * prob, weight / total)
        for prob, weight in zip(at_support, draft_probs.weights, strict=True)
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
