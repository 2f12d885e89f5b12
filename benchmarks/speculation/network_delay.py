"""Measures speculation over a slow network.

The draft worker reaches the target through a proxy in its own process. The proxy delays all data by 50 % of the round
trip each way, in order and without limiting bandwidth. `direct` has no proxy; the difference to a round trip of 0 ms
is the proxy's own cost. Plain decoding and all delays alternate, each with its own workers.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared import plot
from benchmarks.shared.options import report, target_model
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

PLAIN, DIRECT = "plain", "direct"


def delay_name(round_trip_ms: float) -> str:
    return f"{round_trip_ms:g} ms"


def modes(delays_ms: Sequence[float]) -> list[Mode]:
    """Plain decoding, a pair without a proxy, and one pair for each round trip."""
    delayed = [Mode(delay_name(each), round_trip_ms=each) for each in delays_ms]
    return [Mode(PLAIN, draft_arguments=None), Mode(DIRECT), *delayed]


def summarize(slices: Mapping[str, Sequence[ModeSlice]]) -> dict[str, Any]:
    """Figures of one batch size by mode."""
    return {
        name: speed_figures(own, None if name == PLAIN else slices[PLAIN]) | step_figures(total(own))
        for name, own in slices.items()
    }


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws speed-ups over the round trip, a line for each batch size."""
    series = {
        f"{num_streams} streams": [
            (ms, figures[delay_name(ms)]["speedup"], *figures[delay_name(ms)]["speedup_quartiles"])
            for ms in result["round_trips_ms"]
        ]
        for num_streams, figures in result["batch"].items()
    }
    title = f"Speed over plain decoding by network delay, {result['load']['target']}"
    plot.lines(path, title, series, "round trip between draft and target, ms", "times plain")


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with target_model(arguments) as target_dir:
        async with start_modes(modes(arguments.delays), target_dir, arguments.draft) as pairs:
            result = await measure_batches(arguments, pairs, prompts_of(arguments, target_dir), summarize)
    return result | {"round_trips_ms": arguments.delays}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = load_parser(__doc__, batch=(1,), seconds=2.5, rounds=4)
    parser.add_argument(
        "--delays",
        type=float,
        nargs="+",
        default=[0.0, 1.0, 5.0, 20.0],
        help="round trips in milliseconds, 50 %% each way (default 0 1 5 20)",
    )
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    report(arguments, asyncio.run(run(arguments)), draw)
