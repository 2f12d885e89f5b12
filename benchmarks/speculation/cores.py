"""Compares ways to share two cores out between a target and its draft.

Plain decoding on one core and on both, a draft with a core of its own as `outrider serve` runs them, and a draft whose
core the target uses, too, where it measures that to be faster (`--share-cores`). The second is what the draft's core
would give without a draft: the same machine, spent on more target. Closed-loop load, modes alternate. Coordinator and
clients, which need time on the same cores, are not part of it: `serving_cores` has them.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.shared import plot
from benchmarks.shared.options import report, target_model
from benchmarks.shared.worker_pair import TwoCores
from benchmarks.speculation.modes import (
    Mode,
    ModeSlice,
    load_parser,
    measure_batches,
    prompts_of,
    speed_figures,
    start_modes,
    step_figures,
    total,
)

ONE, BOTH, APART, SHARED = "plain, one core", "plain, both cores", "draft apart", "draft, cores shared"
TOGETHER: Final = TwoCores(is_shared=True)
MODES: Final = (
    Mode(ONE, draft_arguments=None),
    Mode(BOTH, draft_arguments=None, cores=TOGETHER),
    Mode(APART),
    Mode(SHARED, cores=TOGETHER),
)


def summarize(slices: Mapping[str, Sequence[ModeSlice]]) -> dict[str, Any]:
    """Figures of each mode; speed-ups are over plain decoding on both cores: the same machine."""
    return {name: speed_figures(own, slices[BOTH]) | step_figures(total(own)) for name, own in slices.items()}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws tokens per second with their quartiles."""
    groups = {
        f"{num_streams} streams": {
            mode: (each["tokens_per_s"], *each["tokens_per_s_quartiles"]) for mode, each in figures.items()
        }
        for num_streams, figures in result["batch"].items()
    }
    plot.bars(path, f"Two cores, {result['load']['target']}", groups, "tokens/s")


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with target_model(arguments) as target_dir:
        async with start_modes(MODES, target_dir, arguments.draft) as pairs:
            return await measure_batches(arguments, pairs, prompts_of(arguments, target_dir), summarize)


def main() -> None:
    arguments = load_parser(__doc__, batch=(1, 8), seconds=4.0, rounds=4).parse_args()
    report(arguments, asyncio.run(run(arguments)), draw)
