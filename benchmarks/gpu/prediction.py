"""Predictions of `outrider tune` from a session's step times, beside what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.gpu.language import Language
from benchmarks.gpu.page import Parts, figure
from command_line.tune.model import Pair
from command_line.tune.placement.devices import PRICES, gpu_type
from command_line.tune.placement.prediction import GpuProfiles, Placements, on_gpus, predict
from command_line.tune.placement.report import placement_words
from command_line.tune.times import StepTimes

BATCHES: Final = (1, 8)
NUM_TEXTS: Final = 8
NUM_TOKENS: Final = 300
NUM_HINTS_MAX: Final = 8
SMALL_GPU: Final = "l4"


def step_times(steps: Mapping[str, Mapping[str, float]]) -> StepTimes:
    """Times by rows, and by sequence, of steps named "sequences x rows". Raises KeyError where one is missing."""
    ms = {kind: each["ms"] for kind, each in steps.items()}
    per_sequence = max(0.0, ms.get("8x1", ms["1x8"]) - ms["1x8"]) / 7
    rows = [(size, ms[f"1x{size}"]) for size in (1, 4, 8)]
    if "8x5" in ms:
        rows.append((40, max(ms["8x5"] - 7 * per_sequence, ms["1x8"])))
    return StepTimes.measured(rows, per_sequence)


def predicted(parts: Parts, language: Language) -> Placements | None:
    """The placements of this session's models; None where their steps were not timed."""
    target, draft, on_cpu = (
        figure(parts, "engine", name) for name in ("target_steps", "draft_steps", "draft_steps_on_cpu")
    )
    if not target or not draft:
        return None
    starts = range(1, 1 + NUM_TEXTS * NUM_TOKENS, NUM_TOKENS)
    texts = tuple(language.ranks(start % (len(language.successors) - 1) + 1, NUM_TOKENS) for start in starts)
    pair = Pair(step_times(target), step_times(draft), texts)
    name = str(figure(parts, "device", "device") or "")
    profiles = GpuProfiles(pair, gpu_type(name), step_times(on_cpu) if on_cpu else None)
    return predict(on_gpus(profiles, SMALL_GPU, dict(PRICES)), BATCHES, NUM_HINTS_MAX)


def lines(found: Placements) -> list[str]:
    """The predictions for the page."""
    shown = [f"predicted from these steps, tokens/s at {' and '.join(map(str, found.batches))} streams (best γ):"]
    for each in found.forecasts:
        cells = "; ".join(
            f"{rate:.0f}" + (f" ({gamma})" if gamma else "")
            for rate, gamma in zip(each.tokens_per_s, each.num_hints, strict=True)
        )
        shown.append(f"  {'= ' if each.placement.is_equal_cost else ''}{each.placement.name}: {cells}")
    return [*shown, *placement_words(found)]


def entry(parts: Parts, language: Language) -> dict[str, Any]:
    """The entry of the predictions in a session's report."""
    found = predicted(parts, language)
    if found is None:
        return {"status": "skipped", "why": "no steps were timed", "seconds": 0.0, "figures": {}}
    return {"status": "done", "why": "", "seconds": 0.0, "figures": {"lines": lines(found)}}
