"""Slices as they might have been measured."""

from __future__ import annotations

from benchmarks.speculation.modes import ModeSlice, Window


def window_of(
    tokens_per_s: float,
    *,
    num_steps: int = 100,
    num_accepted: int = 0,
    num_rejected: int = 0,
    intervals_ms: tuple[float, ...] = (5.0,),
    tpot_ms: tuple[float, ...] = (5.0,),
) -> Window:
    num_tokens = num_steps + num_accepted
    return Window(
        tokens_per_s,
        num_steps,
        num_tokens,
        num_accepted,
        num_rejected,
        list(intervals_ms),
        list(tpot_ms),
    )


def slice_of(own: Window, *, num_sessions: int = 1, step_ms: float = 4.0, num_hints: int = 0) -> ModeSlice:
    """`num_hints`: fed, over all steps."""
    counters = {
        "step_milliseconds_sum": step_ms * own.num_steps / num_sessions,
        "step_milliseconds_count": own.num_steps / num_sessions,
        "step_sessions_sum": float(own.num_steps),
        "spec_decode_num_draft_tokens_total": float(num_hints),
        "hint_bytes_total": 10.0 * own.num_tokens,
        "generation_tokens_total": float(own.num_tokens),
    }
    return ModeSlice(own, counters, [], 0.0, 1.0)
