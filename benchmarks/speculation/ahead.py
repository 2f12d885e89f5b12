"""Compares drafting ahead, synchronous drafting and a free draft.

Five modes use the same two models under the same load:

- plain: the target alone;
- synchronous-N: the target waits for N hints, then the draft waits for the verdict on them. The draft keeps
  no alternatives and drafts at most N tokens beyond the committed ones;
- ahead: the draft continues while the target verifies, along its primary path only;
- ahead+enumerate: the draft also grows alternatives;
- ahead+enumerate+lookup: the workers' defaults. The target also takes hints from the session's own tokens.

A synchronous draft makes its N hints in one step (`--max-chain-nodes`), for all streams together, as many as
requested; `vain_wait_share` is the share of steps in which the target waited in vain.

The bound is the speed with the same tokens per step and step times if steps followed each other as plain ones do
(`bound`). Step times are means over all steps, the few that read prompts included. Two predictions
assume independent acceptance at the measured rate: `analytic` with the measured number of hints per step,
`free_draft` with the best number of hints, always in time.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared import plot
from benchmarks.shared.figures import with_quartiles
from benchmarks.shared.options import report, target_model
from benchmarks.speculation.modes import (
    Mode,
    ModeSlice,
    bound_figures,
    load_parser,
    measure_batches,
    prompts_of,
    ratios,
    speed_figures,
    start_modes,
    step_figures,
    total,
)

PLAIN, SYNCHRONOUS, AHEAD, ENUMERATE = "plain", "synchronous", "ahead", "ahead+enumerate"
LOOKUP = "ahead+enumerate+lookup"
KINDS = (PLAIN, SYNCHRONOUS, AHEAD, ENUMERATE, LOOKUP)
NO_ALTERNATIVES = ("--max-alternatives", "0")
SYNCHRONOUS_WAIT_MS = 50.0


def synchronous(num_hints: int) -> Mode:
    return Mode(
        f"{SYNCHRONOUS}-{num_hints}",
        (
            *("--wait-for-num-hints", str(num_hints), "--num-speculative-tokens", str(num_hints)),
            *("--hint-wait-ms", str(SYNCHRONOUS_WAIT_MS), "--always-listen"),
        ),
        (
            *("--max-lookahead", str(num_hints), *NO_ALTERNATIVES, "--min-reach", "0"),
            *("--max-chain-nodes", str(num_hints), "--max-nodes-per-step", "64"),
        ),
    )


def modes(kinds: Sequence[str], num_hints: Sequence[int]) -> list[Mode]:
    """Modes of these kinds and plain decoding; one synchronous mode for each of `num_hints`."""
    wanted = [Mode(PLAIN, draft_arguments=None)]
    if SYNCHRONOUS in kinds:
        wanted += [synchronous(each) for each in num_hints]
    if AHEAD in kinds:
        wanted.append(Mode(AHEAD, draft_arguments=NO_ALTERNATIVES))
    if ENUMERATE in kinds:
        wanted.append(Mode(ENUMERATE))
    if LOOKUP in kinds:
        wanted.append(Mode(LOOKUP, target_arguments=("--lookup",)))
    return wanted


def vain_wait_share(slices: Sequence[ModeSlice], step_ms: float) -> float:
    """Share of the intervals between steps that are so long that the target must have waited to the limit."""
    intervals = [ms for each in slices for ms in each.window.intervals_ms]
    longest = SYNCHRONOUS_WAIT_MS + 0.8 * step_ms
    return sum(ms >= longest for ms in intervals) / len(intervals) if intervals else 0.0


def prediction_figures(slices: Sequence[ModeSlice]) -> dict[str, float]:
    """How often the tree contained the target's token, and hints below it, over requests that ended in a slice."""
    stats = [generation.finished.stats for each in slices for _, generation in each.recorded]
    num_outcomes = sum(each.num_outcomes for each in stats)
    if not num_outcomes:
        return {}
    return {
        "prediction_hit_rate": round(sum(each.num_predicted_outcomes for each in stats) / num_outcomes, 3),
        "ready_rate": round(sum(each.num_ready_outcomes for each in stats) / num_outcomes, 3),
    }


def summarize(slices: Mapping[str, Sequence[ModeSlice]]) -> dict[str, Any]:
    """Figures of one batch size by mode, and the best synchronous setting."""
    plain = total(slices[PLAIN])
    summary: dict[str, Any] = {}
    for name, own in slices.items():
        totals = total(own)
        figures = speed_figures(own, None if name == PLAIN else slices[PLAIN]) | step_figures(totals)
        if name != PLAIN:
            figures |= bound_figures(totals, plain, figures["speedup"]) | prediction_figures(own)
        if name.startswith(SYNCHRONOUS):
            figures["vain_wait_share"] = round(vain_wait_share(own, totals.step_ms), 4)
        summary[name] = figures
    best = best_synchronous({name: each["speedup"] for name, each in summary.items() if name != PLAIN})
    result: dict[str, Any] = {"modes": summary}
    if best is not None:
        result["best_synchronous"] = best
        result["over_best_synchronous"] = {
            name: with_quartiles("ratio", ratios(slices[name], slices[best]), 3)
            for name in (AHEAD, ENUMERATE, LOOKUP)
            if name in slices
        }
    return result


def best_synchronous(speedups: Mapping[str, float]) -> str | None:
    """The fastest synchronous mode; None if there is none."""
    names = [name for name in speedups if name.startswith(SYNCHRONOUS)]
    return max(names, key=lambda name: speedups[name], default=None)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws speed-ups by batch size, with the free draft."""
    groups: dict[str, dict[str, plot.Value]] = {}
    for num_streams, figures in result["batch"].items():
        group: dict[str, plot.Value] = {}
        shown = {figures.get("best_synchronous"): "best synchronous"}
        shown |= {name: name for name in (AHEAD, ENUMERATE, LOOKUP)}
        for name, label in shown.items():
            if name in figures["modes"]:
                own = figures["modes"][name]
                group[label] = (own["speedup"], *own["speedup_quartiles"])
        if ENUMERATE in figures["modes"]:
            own = figures["modes"][ENUMERATE]
            group["bound: its own steps, nothing between them"] = (own["bound"],) * 3
            group["free draft"] = (own["free_draft"]["speedup"],) * 3
        groups[f"{num_streams} streams"] = group
    title = f"Speed over plain decoding, {result['load']['target']}"
    plot.bars(path, title, groups, "times plain")


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    wanted = modes(arguments.modes, arguments.synchronous)
    with target_model(arguments) as target_dir:
        async with start_modes(wanted, target_dir, arguments.draft) as pairs:
            return await measure_batches(arguments, pairs, prompts_of(arguments, target_dir), summarize)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = load_parser(__doc__, batch=(1, 8), seconds=2.0, rounds=3)
    parser.add_argument("--modes", nargs="+", choices=KINDS, default=list(KINDS), help="plain is always included")
    parser.add_argument(
        "--synchronous", type=int, nargs="+", default=[2, 3, 5, 7], help="hints to try (default 2 3 5 7)"
    )
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    report(arguments, asyncio.run(run(arguments)), draw)
