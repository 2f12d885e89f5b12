"""Speculation off and on, same target worker, one request at a time: `python -m benchmarks.speedup --help`.

The target runs on one core and the draft on another. Every prompt is generated with and without the draft in turn,
so that a change of the machine's mood meets both. Rates are tokens after the first per second; the speed-up is the
median over prompts of the ratio within a round, with the quartiles beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.target_model import DEMO, add_target_arguments, target_model
from benchmarks.worker_pair import Generation, WorkerPair, WorkerProcessHandle, worker_pair
from demo.corpus import held_out_prompts
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, off and on, in one round."""

    off_tokens_per_s: float
    on_tokens_per_s: float
    num_steps: int
    num_draft_tokens: int
    num_accepted: int
    num_tokens: int
    num_outcomes: int
    num_predicted: int
    num_ready: int
    is_identical: bool


async def measure(pair: WorkerPair, prompts: list[list[int]], num_tokens: int, rounds: int) -> list[Sample]:
    """Interleaved off and on; the first pass over the prompts is not counted, it lets the worker's costs settle."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    samples = []
    for prompt in prompts[: max(1, len(prompts) // 3)]:
        for use_draft in (False, True):
            await pair.generate(prompt, params, use_draft=use_draft)
    for round_index in range(rounds):
        for prompt in prompts:
            order = (False, True) if round_index % 2 == 0 else (True, False)
            results = {
                use_draft: await pair.generate(prompt, params, use_draft=use_draft) for use_draft in order
            }
            samples.append(_sample(results[False], results[True]))
    return samples


def _sample(off: Generation, on: Generation) -> Sample:
    stats = on.finished.stats
    return Sample(
        off.decode_tokens_per_s,
        on.decode_tokens_per_s,
        stats.num_steps,
        stats.num_draft_tokens,
        stats.num_accepted_draft_tokens,
        len(on.token_ids),
        stats.num_outcomes,
        stats.num_predicted_outcomes,
        stats.num_ready_outcomes,
        off.token_ids == on.token_ids,
    )


def summarize(samples: list[Sample]) -> dict[str, Any]:
    ratios = [sample.on_tokens_per_s / sample.off_tokens_per_s for sample in samples]
    quartiles = statistics.quantiles(ratios, n=4)
    num_steps = sum(sample.num_steps for sample in samples)
    num_drafted = sum(sample.num_draft_tokens for sample in samples)
    num_accepted = sum(sample.num_accepted for sample in samples)
    num_outcomes = max(sum(sample.num_outcomes for sample in samples), 1)
    return {
        "off_tokens_per_s": round(statistics.median(sample.off_tokens_per_s for sample in samples), 1),
        "on_tokens_per_s": round(statistics.median(sample.on_tokens_per_s for sample in samples), 1),
        "speedup": round(quartiles[1], 2),
        "speedup_quartiles": [round(quartiles[0], 2), round(quartiles[2], 2)],
        "speedup_of_totals": round(
            sum(1 / sample.off_tokens_per_s for sample in samples)
            / sum(1 / sample.on_tokens_per_s for sample in samples),
            2,
        ),
        "mean_acceptance_length": round(1 + num_accepted / num_steps, 2),
        "draft_acceptance_rate": round(num_accepted / max(num_drafted, 1), 3),
        "mean_hints_per_step": round(num_drafted / num_steps, 2),
        "prediction_hit_rate": round(sum(sample.num_predicted for sample in samples) / num_outcomes, 3),
        "ready_rate": round(sum(sample.num_ready for sample in samples) / num_outcomes, 3),
        "identical": all(sample.is_identical for sample in samples),
        "samples": len(samples),
    }


def step_gap(handle: WorkerProcessHandle) -> dict[str, float]:
    """From a step's end to the next one's start, hints ready: mean and shares, from the worker's own histogram."""
    url = f"http://{handle.address.rsplit(':', 1)[0]}:{handle.facts['metrics_port']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    values = {
        line.split("{")[0] + _bound(line): float(line.split()[-1])
        for line in lines
        if "step_gap" in line and "{" in line
    }
    count = values["outrider_step_gap_milliseconds_count"]
    return {
        "mean_ms": round(values["outrider_step_gap_milliseconds_sum"] / count, 3),
        "share_under_1_ms": round(values["outrider_step_gap_milliseconds_bucket<=1.0"] / count, 4),
        "share_under_3_ms": round(values["outrider_step_gap_milliseconds_bucket<=3.0"] / count, 4),
        "steps": count,
    }


def _bound(line: str) -> str:
    return "<=" + line.split('le="')[1].split('"')[0] if 'le="' in line else ""


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with target_model(arguments) as target_dir:
        tokenizer = Tokenizer(target_dir)
        prompts = [
            tokenizer.encode(text) for text in held_out_prompts(arguments.prompts, seed=arguments.seed)
        ]
        async with worker_pair(
            target_dir,
            Path(arguments.draft),
            target_arguments=["--cpu-affinity", "0", *arguments.target_argument],
            draft_arguments=["--cpu-affinity", "1", *arguments.draft_argument],
        ) as pair:
            samples = await measure(pair, prompts, arguments.tokens, arguments.rounds)
            return {**summarize(samples), "step_gap": step_gap(pair.target)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_target_arguments(parser)
    parser.add_argument("--draft", default=str(DEMO / "draft"))
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which prompts")
    parser.add_argument("--tokens", type=int, default=100, help="per request (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="passes over the prompts (default %(default)s)")
    parser.add_argument(
        "--target-argument", action="append", default=[], help="passed on, such as --hint-wait-ms=0"
    )
    parser.add_argument("--draft-argument", action="append", default=[], help="passed on")
    print(json.dumps(asyncio.run(run(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
