"""Upper bound of the gain from speculation with a free draft. Pure.

A step with hints takes longer than a plain one and commits more tokens. If steps followed each other as plain ones
do, the speed-up would be tokens per step × plain step time ÷ step time. The difference to a measured speed-up went
into waiting for hints and into the work between steps.
"""

from __future__ import annotations

from typing import NamedTuple


class CostLine(NamedTuple):
    """Step time as a line over the number of tokens fed; milliseconds."""

    fixed_ms: float
    token_ms: float

    def step_ms(self, num_tokens: float) -> float:
        return self.fixed_ms + self.token_ms * num_tokens


def acceptance_rate(num_accepted: int, num_rejected: int) -> float:
    """Probability that a hint is accepted, given that those before it were; every rejection ends a block."""
    num_tried = num_accepted + num_rejected
    return num_accepted / num_tried if num_tried else 0.0


def expected_tokens(acceptance: float, num_hints: float) -> float:
    """Tokens of a step, (1 - a^(n + 1)) / (1 - a) for n hints accepted independently with probability a each."""
    if acceptance >= 1.0:
        return num_hints + 1.0
    return (1.0 - acceptance ** (num_hints + 1.0)) / (1.0 - acceptance)


def speedup_bound(tokens_per_step: float, plain_step_ms: float, step_ms: float) -> float:
    """Speed over plain decoding if steps followed each other as plain ones do."""
    return tokens_per_step * plain_step_ms / step_ms


def line_through(num_tokens: float, step_ms: float, more_tokens: float, more_ms: float) -> CostLine:
    """Step time over the number of tokens fed, from two measured points; never falling."""
    if more_tokens <= num_tokens:
        return CostLine(step_ms, 0.0)
    token_ms = max(more_ms - step_ms, 0.0) / (more_tokens - num_tokens)
    return CostLine(step_ms - token_ms * num_tokens, token_ms)


class FreeDraft(NamedTuple):
    """Best result with a draft that costs nothing and is always in time."""

    num_hints: int
    speedup: float


def free_draft(acceptance: float, cost: CostLine, num_sessions: float, max_hints: int) -> FreeDraft:
    """Best number of hints per session and step, up to `max_hints`, and its speed over plain decoding."""
    plain_ms = cost.step_ms(num_sessions)
    return max(
        (
            FreeDraft(
                num_hints,
                speedup_bound(
                    expected_tokens(acceptance, num_hints),
                    plain_ms,
                    cost.step_ms(num_sessions * (1 + num_hints)),
                ),
            )
            for num_hints in range(max_hints + 1)
        ),
        key=lambda each: each.speedup,
    )
