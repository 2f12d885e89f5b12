"""Measures one request at a time with and without speculation.

The target runs on one core and the draft on another. Every prompt is generated alternately with and without the
draft, so that a change of the machine's load affects both. Rates are tokens after the first per second. The speed-up
is the median over prompts of the ratio within a round, with its quartiles.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.shared.figures import with_quartiles
from benchmarks.shared.options import report
from benchmarks.shared.pinned_pair import pair_parser, pinned_pair
from benchmarks.shared.worker_pair import Generation, WorkerPair, WorkerProcessHandle
from outrider.sampling_params import SamplingParams


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
    """Runs off and on alternately. The first pass over the prompts is not counted: the worker's measured costs
    settle."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    samples = []
    for prompt in prompts[: max(1, len(prompts) // 3)]:
        for use_draft in (False, True):
            await pair.generate(prompt, params, use_draft=use_draft)
    for round_index in range(rounds):
        for prompt in prompts:
            order = (False, True) if round_index % 2 == 0 else (True, False)
            results = {use_draft: await pair.generate(prompt, params, use_draft=use_draft) for use_draft in order}
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
    num_steps = sum(sample.num_steps for sample in samples)
    num_drafted = sum(sample.num_draft_tokens for sample in samples)
    num_accepted = sum(sample.num_accepted for sample in samples)
    num_outcomes = max(sum(sample.num_outcomes for sample in samples), 1)
    return {
        "off_tokens_per_s": round(statistics.median(sample.off_tokens_per_s for sample in samples), 1),
        "on_tokens_per_s": round(statistics.median(sample.on_tokens_per_s for sample in samples), 1),
        **with_quartiles("speedup", [each.on_tokens_per_s / each.off_tokens_per_s for each in samples], 2),
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


def step_gap(target: WorkerProcessHandle) -> dict[str, float]:
    """Gap from a step's end to the next one's start with hints ready: mean and shares, from the worker's histogram."""
    prefix = "outrider_step_gap_milliseconds_"
    values = {
        each.name.removeprefix(prefix) + each.labels.get("le", ""): each.value
        for each in target.metrics()
        if each.name.startswith(prefix)
    }
    return {
        "mean_ms": round(values["sum"] / values["count"], 3),
        "share_under_1_ms": round(values["bucket1.0"] / values["count"], 4),
        "share_under_3_ms": round(values["bucket3.0"] / values["count"], 4),
        "steps": values["count"],
    }


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    async with pinned_pair(arguments, arguments.prompts, seed=arguments.seed) as (pair, prompts):
        samples = await measure(pair, prompts, arguments.tokens, arguments.rounds)
        return {**summarize(samples), "step_gap": step_gap(pair.target)}


def main() -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which prompts")
    parser.add_argument("--tokens", type=int, default=100, help="per request (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="passes over the prompts (default %(default)s)")
    arguments = parser.parse_args()
    report(arguments, asyncio.run(run(arguments)))
