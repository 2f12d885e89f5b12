"""Speculation over a slow line: `python -m benchmarks.network_delay --help`.

The draft worker reaches the target through a proxy in a process of its own that holds every piece of data back for half
a round trip each way, in order and without limiting bandwidth. `direct` has no proxy; against a round trip of 0 ms it
says what the proxy itself costs. Plain decoding and all delays take turns, each with workers of its own.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot
from benchmarks.modes import (
    Mode,
    ModeSlice,
    add_load_arguments,
    measure_batches,
    prompts_of,
    report,
    speed_figures,
    start_modes,
    step_figures,
    total,
)
from benchmarks.target_model import target_model

PLAIN, DIRECT = "plain", "direct"


def delay_name(round_trip_ms: float) -> str:
    return f"{round_trip_ms:g} ms"


def modes(delays_ms: Sequence[float]) -> list[Mode]:
    """Plain decoding, a pair without a proxy, and one for each round trip."""
    delayed = [Mode(delay_name(each), round_trip_ms=each) for each in delays_ms]
    return [Mode(PLAIN, draft_arguments=None), Mode(DIRECT), *delayed]


def summarize(slices: Mapping[str, Sequence[ModeSlice]]) -> dict[str, Any]:
    """Figures of one batch size by mode."""
    return {
        name: speed_figures(own, None if name == PLAIN else slices[PLAIN]) | step_figures(total(own))
        for name, own in slices.items()
    }


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Speed-ups over the round trip, a line for each batch size."""
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_load_arguments(parser, batch=(1,), seconds=2.5, rounds=4)
    parser.add_argument(
        "--delays",
        type=float,
        nargs="+",
        default=[0.0, 1.0, 5.0, 20.0],
        help="round trips, milliseconds, half each way (default 0 1 5 20)",
    )
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    report(arguments, asyncio.run(run(arguments)), draw)


if __name__ == "__main__":
    main()
