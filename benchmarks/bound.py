"""What speculation can gain at the most, were the draft free. Pure.

A step that feeds hints takes longer than a plain one and gives more tokens; if nothing passed between steps but what
passes between plain ones, the speed-up would be tokens per step times plain step time over its own. What a measured
speed-up lacks of that bound went into waiting for hints and into the work between steps.
"""

from __future__ import annotations

from typing import NamedTuple


class CostLine(NamedTuple):
    """What a step costs over the number of tokens fed; milliseconds."""

    fixed_ms: float
    token_ms: float

    def step_ms(self, num_tokens: float) -> float:
        return self.fixed_ms + self.token_ms * num_tokens


def acceptance_rate(num_accepted: int, num_rejected: int) -> float:
    """The chance that a hint holds, given that those before it do; every rejection ends a block."""
    num_tried = num_accepted + num_rejected
    return num_accepted / num_tried if num_tried else 0.0


def expected_tokens(acceptance: float, num_hints: float) -> float:
    """Tokens of a step, (1 - a^(n + 1)) / (1 - a) for n hints that hold with chance a each, independently."""
    if acceptance >= 1.0:
        return num_hints + 1.0
    return (1.0 - acceptance ** (num_hints + 1.0)) / (1.0 - acceptance)


def speedup_bound(tokens_per_step: float, plain_step_ms: float, step_ms: float) -> float:
    """Speed over plain decoding, did steps follow each other as plain ones do."""
    return tokens_per_step * plain_step_ms / step_ms


def line_through(num_tokens: float, step_ms: float, more_tokens: float, more_ms: float) -> CostLine:
    """A step's time over the number of tokens fed, from two measured points; never falling."""
    if more_tokens <= num_tokens:
        return CostLine(step_ms, 0.0)
    token_ms = max(more_ms - step_ms, 0.0) / (more_tokens - num_tokens)
    return CostLine(step_ms - token_ms * num_tokens, token_ms)


class FreeDraft(NamedTuple):
    """The best that a draft which costs nothing and is always in time could do."""

    num_hints: int
    speedup: float


def free_draft(acceptance: float, cost: CostLine, num_sessions: float, max_hints: int) -> FreeDraft:
    """The best number of hints per session and step, up to `max_hints`, and the speed over plain decoding."""
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
