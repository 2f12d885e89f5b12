"""Measures gain and wire cost of rejection sampling at temperature 1.

Variants of one request (acceptance rule, entries and precision of a hint's distribution) alternate on every prompt,
so that a change of the machine's load affects all of them. Bytes are those of the messages with hints, as the target
counts them; tokens per step and the speed over plain decoding are the gain.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
from dataclasses import replace
from typing import Any

from benchmarks.shared.figures import with_quartiles
from benchmarks.shared.options import report
from benchmarks.shared.pinned_pair import pair_parser, pinned_pair
from benchmarks.shared.worker_pair import Generation, WorkerPair
from outrider.sampling_params import AcceptanceRule, SamplingParams, SpeculationSettings


def variant(text: str) -> SpeculationSettings:
    """Parses `RULE:ENTRIES:BITS`, such as block:8:8; 0 leaves a number to the worker. `coupled` needs none of them."""
    if text == "coupled":
        return SpeculationSettings()
    rule, entries, bits = text.split(":")
    return SpeculationSettings(
        acceptance_rule=AcceptanceRule[rule.upper()],
        num_draft_probs=int(entries),
        draft_probs_bits=int(bits),
    )


async def measure(
    pair: WorkerPair,
    prompts: list[list[int]],
    names: list[str],
    temperature: float,
    num_tokens: int,
    rounds: int,
) -> dict[str, list[Generation]]:
    """Runs every prompt with every variant and plainly, alternating; results by name. The first pass is not counted."""
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    seeds = itertools.count(1)
    results: dict[str, list[Generation]] = {name: [] for name in ("plain", *names)}
    for round_index in range(-1, rounds):
        for prompt in prompts if round_index >= 0 else prompts[:3]:
            for name in results:
                speculation = None if name == "plain" else variant(name)
                seed = next(seeds) if name == "coupled" else None
                generation = await pair.generate(
                    prompt, replace(params, seed=seed), use_draft=name != "plain", speculation=speculation
                )
                if round_index >= 0:
                    results[name].append(generation)
    return results


def summarize(results: dict[str, list[Generation]]) -> dict[str, Any]:
    plain = results["plain"]
    summary: dict[str, Any] = {
        "plain_tokens_per_s": round(statistics.median(each.decode_tokens_per_s for each in plain), 1)
    }
    for name, generations in results.items():
        if name == "plain":
            continue
        stats = [each.finished.stats for each in generations]
        num_tokens = sum(len(each.token_ids) for each in generations)
        ratios = [on.decode_tokens_per_s / off.decode_tokens_per_s for on, off in zip(generations, plain, strict=True)]
        num_steps = sum(each.num_steps for each in stats)
        summary[name] = {
            "bytes_per_token": round(sum(each.num_hint_bytes for each in stats) / num_tokens, 1),
            "tokens_per_step": round(num_tokens / num_steps, 2),
            "hints_per_step": round(sum(each.num_draft_tokens for each in stats) / num_steps, 2),
            "draft_acceptance_rate": round(
                sum(each.num_accepted_draft_tokens for each in stats)
                / max(sum(each.num_draft_tokens for each in stats), 1),
                3,
            ),
            **with_quartiles("speedup", ratios, 2),
        }
    return summary


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    # Variants that do not pay would otherwise silence those that do.
    always = () if arguments.may_pause else ("--always-listen",)
    async with pinned_pair(arguments, arguments.prompts, *always) as (pair, prompts):
        results = await measure(
            pair, prompts, arguments.variant, arguments.temperature, arguments.tokens, arguments.rounds
        )
        return summarize(results)


def main() -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="per request (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="passes over the prompts (default %(default)s)")
    parser.add_argument(
        "--variant",
        action="append",
        help="RULE:ENTRIES:BITS, 0 for the worker's choice, or coupled (default: a few)",
    )
    parser.add_argument(
        "--may-pause",
        action="store_true",
        help="let the target pause a draft that does not pay, as it does in service; then name one variant",
    )
    arguments = parser.parse_args()
    arguments.variant = arguments.variant or ["token:0:0", "block:0:0", "block:4:8", "block:32:16", "coupled"]
    report(arguments, asyncio.run(run(arguments)))
