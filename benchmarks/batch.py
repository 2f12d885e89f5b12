"""Closed-loop load on a pair of workers, speculation off and on in turns: `python -m benchmarks.batch --help`.

For each batch size so many streams ask prompt after prompt, for a slice of time without and one with the draft, and so
on. What counts are tokens that arrived within a slice, its beginning left out. The first slices of each kind are not
counted: the worker learns whether listening pays (`target_worker/listening.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.target_model import DEMO, add_target_arguments, target_model
from benchmarks.worker_pair import Generation, WorkerPair, worker_pair
from demo.corpus import held_out_prompts
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer

RAMP_S = 1.0  # of every slice, until all streams are under way


@dataclass(frozen=True, slots=True)
class Slice:
    """What one slice of time gave."""

    tokens_per_s: float
    tpot_ms: list[float]  # of requests that ended within it
    mean_acceptance_length: float | None


async def run_slice(
    pair: WorkerPair,
    prompts: Iterator[list[int]],
    params: SamplingParams,
    *,
    num_streams: int,
    seconds: float,
    use_draft: bool,
) -> Slice:
    """Closed loop: every stream asks its next prompt when the last one is answered."""
    generations: list[Generation] = []

    async def stream() -> None:
        while True:
            generations.append(Generation())
            await pair.generate(next(prompts), params, use_draft=use_draft, result=generations[-1])

    started = time.perf_counter()
    streams = [asyncio.create_task(stream()) for _ in range(num_streams)]
    await asyncio.sleep(RAMP_S + seconds)
    ended = time.perf_counter()
    for task in streams:
        task.cancel()
    for result in await asyncio.gather(*streams, return_exceptions=True):
        if not isinstance(result, asyncio.CancelledError):
            raise RuntimeError(f"a stream broke: {result!r}")
    begun = started + RAMP_S
    num_tokens = sum(n for each in generations for at, n in each.arrivals if begun <= at < ended)
    whole = [each for each in generations if begun <= each.ended_at < ended and len(each.token_ids) > 1]
    stats = [each.finished.stats for each in whole]
    num_steps = sum(each.num_steps for each in stats)
    return Slice(
        num_tokens / (ended - begun),
        [1e3 / each.decode_tokens_per_s for each in whole],
        1 + sum(each.num_accepted_draft_tokens for each in stats) / num_steps if num_steps else None,
    )


def summarize(slices: dict[bool, list[Slice]]) -> dict[str, Any]:
    off, on = slices[False], slices[True]
    ratios = [b.tokens_per_s / a.tokens_per_s for a, b in zip(off, on, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    lengths = [each.mean_acceptance_length for each in on if each.mean_acceptance_length is not None]
    summary: dict[str, Any] = {
        "off_tokens_per_s": round(statistics.median(each.tokens_per_s for each in off), 1),
        "on_tokens_per_s": round(statistics.median(each.tokens_per_s for each in on), 1),
        "speedup": round(statistics.median(ratios), 3),
        "speedup_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
        "mean_acceptance_length": round(statistics.mean(lengths), 2) if lengths else None,
        "slices": len(ratios),
    }
    for name, some in (("off", off), ("on", on)):
        tpots = sorted(tpot for each in some for tpot in each.tpot_ms)
        if tpots:
            summary[f"{name}_tpot_ms_p50"] = round(statistics.median(tpots), 2)
            summary[f"{name}_tpot_ms_p99"] = round(tpots[min(int(0.99 * len(tpots)), len(tpots) - 1)], 2)
    return summary


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.tokens, ignore_eos=True)
    results: dict[str, Any] = {}
    with target_model(arguments) as target_dir:
        tokenizer = Tokenizer(target_dir)
        texts = held_out_prompts(arguments.prompts, seed=1)
        async with worker_pair(
            target_dir,
            Path(arguments.draft),
            target_arguments=["--cpu-affinity", "0", *arguments.target_argument],
            draft_arguments=["--cpu-affinity", "1", *arguments.draft_argument],
        ) as pair:
            for num_streams in arguments.batch:
                slices: dict[bool, list[Slice]] = {False: [], True: []}
                prompts = itertools.cycle([tokenizer.encode(text) for text in texts])
                for index in range(-arguments.warmup, arguments.rounds):
                    for use_draft in (False, True) if index % 2 == 0 else (True, False):
                        measured = await run_slice(
                            pair,
                            prompts,
                            params,
                            num_streams=num_streams,
                            seconds=arguments.seconds,
                            use_draft=use_draft,
                        )
                        if index >= 0:
                            slices[use_draft].append(measured)
                results[str(num_streams)] = summarize(slices)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_target_arguments(parser)
    parser.add_argument("--draft", default=str(DEMO / "draft"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="streams (default 1 8 32)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a slice (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="slices of each kind (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="not counted (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=150, help="per request (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--target-argument", action="append", default=[], help="passed on")
    parser.add_argument("--draft-argument", action="append", default=[], help="passed on")
    print(json.dumps(asyncio.run(run(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
