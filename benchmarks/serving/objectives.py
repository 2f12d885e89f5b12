"""Goodput and tokens under an objective for the time per output token (TPOT), by its level.

Requests of two kinds alternate in one closed loop, as in `mixed`: held-out prompts, and a kind whose hints are rarely
accepted, so that it pays for rows of others. All carry the same objective, at several levels relative to the median
TPOT of plain decoding, which is measured first. Three pairs of workers are compared, slices of all of them and of all
levels in turn: `plain` (no draft), `free` (a draft, no objective) and `honoured` (a draft, and the target knows the
objective). The goodput is the share of the requests that met the level; those of `plain` and `free` are judged by each
level, too. A request's own TPOT is that of its caller: time from first to last token over the tokens between.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.shared import plot
from benchmarks.shared.figures import percentile, spread
from benchmarks.shared.options import report, say, target_model
from benchmarks.shared.worker_pair import Generation
from benchmarks.speculation.closed_loop import run_slice
from benchmarks.speculation.mixed import BAD, BAD_KINDS, GOOD, Kind, MixedPair, alternating, bad_kind, windows_of
from benchmarks.speculation.modes import (
    Mode,
    ModeSlice,
    greedy,
    load_parser,
    measure_batches,
    prompts_of,
    ratios,
    start_modes,
    step_figures,
    total,
)
from outrider.objective import NO_OBJECTIVE, Objective
from outrider.sampling_params import SamplingParams

PLAIN, FREE, HONOURED = "plain", "free", "honoured"


@dataclass
class ObjectivePair(MixedPair):
    """A pair that sends every prompt with one objective."""

    objective: Objective = NO_OBJECTIVE

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Generation:
        return await MixedPair.generate(self, token_ids, sampling, objective=self.objective, **options)


def level_name(level: float) -> str:
    """Name of the slices with an objective of so many times plain decoding's TPOT."""
    return f"{HONOURED} {level:g}"


def shares_met(slices: Sequence[ModeSlice], tpot_ms: float) -> list[float]:
    """Share of a slice's requests whose time per token is at most this; slices in which none ended are left out."""
    return [
        sum(ms <= tpot_ms for ms in each.window.tpot_ms) / len(each.window.tpot_ms)
        for each in slices
        if each.window.tpot_ms
    ]


def figures_of(
    slices: Sequence[ModeSlice], plain: Sequence[ModeSlice], kinds: Mapping[tuple[int, ...], Kind]
) -> dict[str, Any]:
    """Speed and times per token of one mode; ratios are to plain decoding, round by round."""
    p99s = [
        percentile(own.window.tpot_ms, 0.99) / percentile(other.window.tpot_ms, 0.99)
        for own, other in zip(slices, plain, strict=True)
        if own.window.tpot_ms and other.window.tpot_ms
    ]
    figures: dict[str, Any] = {
        "tokens_per_s": spread(each.window.tokens_per_s for each in slices),
        "tokens_per_s_over_plain": spread(ratios(slices, plain)),
        "tpot_p99_over_plain": spread(p99s),
        **step_figures(total(slices)),
        "ttft_ms": spread(ms for each in slices if (ms := _ttft_ms(each)) is not None),
    }
    for name in (GOOD, BAD):
        times_ms = [ms for each in windows_of(name, slices, kinds) for ms in each.tpot_ms]
        median_ms = round(statistics.median(times_ms), 2) if times_ms else None
        figures[name] = {"tpot_ms_p50": median_ms, "requests": len(times_ms)}
    return figures


def _ttft_ms(own: ModeSlice) -> float | None:
    """Median time to the first token of the requests that began within a slice; None if there were none."""
    began = [each for _, each in own.recorded if own.begin <= each.started_at and 0 < each.first_token_at < own.end]
    return statistics.median(1e3 * (each.first_token_at - each.started_at) for each in began) if began else None


def summarize(
    slices: Mapping[str, Sequence[ModeSlice]],
    kinds: Mapping[tuple[int, ...], Kind],
    levels: Sequence[float],
    plain_ms: float,
) -> dict[str, Any]:
    """Figures of all modes, and the curve: by level the goodput of each mode and what it costs in tokens."""
    curve = []
    for level in levels:
        own = slices[level_name(level)]
        curve.append(
            {
                "level": level,
                "tpot_ms": round(level * plain_ms, 3),
                "goodput": {
                    PLAIN: spread(shares_met(slices[PLAIN], level * plain_ms)),
                    FREE: spread(shares_met(slices[FREE], level * plain_ms)),
                    HONOURED: spread(shares_met(own, level * plain_ms)),
                },
                HONOURED: figures_of(own, slices[PLAIN], kinds),
            }
        )
    modes = {name: figures_of(slices[name], slices[PLAIN], kinds) for name in (PLAIN, FREE)}
    return {"plain_tpot_ms": round(plain_ms, 3), **modes, "curve": curve}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws goodput, tokens per second and the 99th percentile over the level of the objective."""
    (num_streams, figures), *_ = result["batch"].items()
    goodput: dict[str, list[plot.Point]] = {name: [] for name in (HONOURED, FREE, PLAIN)}
    others: dict[str, dict[str, list[plot.Point]]] = {
        name: {HONOURED: [], FREE: []} for name in ("tokens_per_s_over_plain", "tpot_p99_over_plain")
    }
    for each in figures["curve"]:
        for name, points in goodput.items():
            points.append(_point(each["level"], each["goodput"][name]))
        for figure, series in others.items():
            series[HONOURED].append(_point(each["level"], each[HONOURED][figure]))
            series[FREE].append(_point(each["level"], figures[FREE][figure]))
    title = f"Objectives for the time per token, {num_streams} streams, half drafting badly, {result['load']['target']}"
    panels = {
        "goodput, share of requests": goodput,
        "tokens/s over plain": others["tokens_per_s_over_plain"],
        "p99 TPOT over plain": others["tpot_p99_over_plain"],
    }
    plot.line_panels(path, title, panels, "objective, times plain decoding's median TPOT")


def _point(x: float, figure: Mapping[str, Any]) -> plot.Point:
    return x, figure["median"], figure["quartiles"][0], figure["quartiles"][1]


async def plain_tpot_ms(pair: MixedPair, prompts: Sequence[list[int]], arguments: argparse.Namespace) -> float:
    """Median time per token of plain decoding under this load, in the second of two slices. Ends the process if a
    slice is too short for requests to end in it."""
    for seconds in (0.5 * arguments.seconds, arguments.seconds):
        ran = await run_slice(
            pair,
            itertools.cycle(prompts),
            greedy(arguments),
            num_streams=arguments.batch[0],
            seconds=seconds,
            use_draft=False,
        )
    tpot_ms = statistics.median(ran.tpot_ms) if ran.tpot_ms else math.inf
    if arguments.tokens * tpot_ms > 1e3 * arguments.seconds:
        sys.exit(
            f"benchmarks.objectives: requests of {arguments.tokens} tokens take longer here than a slice of "
            f"{arguments.seconds:g} s, so that few would end in it: set --seconds higher or --tokens lower"
        )
    return tpot_ms


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    both = frozenset({GOOD, BAD})
    # The levels share workers, which would know prompts that those of other modes have to read.
    uncached = ("--no-enable-prefix-caching",)
    modes = [
        Mode(PLAIN, uncached, draft_arguments=None),
        Mode(FREE, uncached, uncached),
        Mode(HONOURED, uncached, uncached),
    ]
    with target_model(arguments) as target_dir:
        good = Kind(GOOD, prompts_of(arguments, target_dir), greedy(arguments))
        config = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
        bad = bad_kind(arguments.bad_kind, good, config["vocab_size"], arguments.temperature)
        kinds = {tuple(prompt): kind for kind in (good, bad) for prompt in kind.prompts}
        prompts = alternating([good, bad])
        async with start_modes(modes, target_dir, arguments.draft) as started:
            pairs = {
                name: ObjectivePair(
                    *(pair.target, pair.draft, pair.target_stub, pair.draft_stub),
                    kinds=kinds,
                    with_draft=both if pair.draft is not None else frozenset(),
                )
                for name, pair in started.items()
            }
            plain_ms = await plain_tpot_ms(pairs[PLAIN], prompts, arguments)
            say(f"plain decoding takes {plain_ms:.2f} ms per token")
            for level in arguments.levels:
                objective = Objective(tpot_ms=level * plain_ms)
                pairs[level_name(level)] = replace(pairs[HONOURED], objective=objective)
            del pairs[HONOURED]
            result = await measure_batches(
                arguments, pairs, prompts, lambda slices: summarize(slices, kinds, arguments.levels, plain_ms)
            )
    result["load"] |= {"bad_kind": arguments.bad_kind, "temperature": arguments.temperature}
    return result


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = load_parser(__doc__, batch=(8,), seconds=3.0, rounds=5)
    parser.add_argument(
        "--levels",
        type=float,
        nargs="+",
        default=[0.8, 1.0, 1.1, 1.25, 1.5],
        help="objectives, in times plain decoding's median TPOT (default 0.8 1.0 1.1 1.25 1.5)",
    )
    parser.add_argument("--bad-kind", choices=BAD_KINDS, default="random-hot", help="as of mixed (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.3, help="of hot requests (default %(default)s)")
    parsed = parser.parse_args(arguments)
    if len(parsed.batch) > 1:
        parser.error("--batch: one number of streams, by whose plain decoding objectives are set")
    return parsed


def main() -> None:
    arguments = parse_arguments()
    report(arguments, asyncio.run(run(arguments)), draw)
