"""Bounds what rows that serve one session cost the others of its step. Pure.

Rows are shared out for the sum of tokens, and an objective takes those that it needs. So one session whose client
predicts its output, or wants it fast, could make a step twice as long for sessions that get one token from it. Here its
rows are taken back until they cost the others 10 % of a plain step, or until no step is much longer than what plain
decoding would take for the tokens that the others expect from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider.hints.step_cost import StepLine

NEIGHBOURS_FACTOR: Final = 1.1
"""Time per token of the others, relative to plain decoding, that such rows may lead to. With eight sessions, 10 ms a
step and 0.55 a row, a prediction of which 97 % is accepted gets 2.7 times plain decoding's speed and costs the others
8 %. With 1.25 these are 5.2 times and 23 %, without a bound 9.2 times and 88 %."""


def spare_neighbours(
    counts: Sequence[int], gains: Sequence[Sequence[float]], cost: StepLine, floors: Sequence[int | None]
) -> list[int]:
    """Returns the hints to feed per session, fewer than `counts` where they cost others too much.

    gains: those of `speculation.allot`. floors[s]: hints that a session whose rows are bounded keeps in any case; None
    for the others, which keep all.
    """
    counts = list(counts)
    others = [1.0 + sum(own[:count]) for own, count, floor in zip(gains, counts, floors, strict=True) if floor is None]
    rows = sorted(
        (gains[s][i], -i, s) for s, floor in enumerate(floors) if floor is not None for i in range(floor, counts[s])
    )
    if not others or not rows:
        return counts
    plain_ms = cost.step_ms(len(gains))
    num_free = int((NEIGHBOURS_FACTOR - 1.0) * plain_ms / cost.token_ms)
    num_earned = cost.num_tokens(NEIGHBOURS_FACTOR * min(others) * plain_ms) - len(gains) - (sum(counts) - len(rows))
    for _, _, s in rows[: max(len(rows) - max(num_free, num_earned), 0)]:
        counts[s] -= 1
    return counts
