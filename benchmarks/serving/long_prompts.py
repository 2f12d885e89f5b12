"""Measures how long prompts delay decoding streams.

Some streams decode; then several prompts of thousands of tokens arrive at once. The gaps between a stream's chunks
are compared before and while the prompts are computed. They should grow by one chunk's time at most: the time to
compute as many prompt tokens as a step allows, measured in the same round on the idle worker. Each round has new
prompts, so that the prefix cache contains none of them. The target's draft worker gets all sessions and computes the
long prompts as well.

The models are the demo's, lengthened (`long_models`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.shared import plot
from benchmarks.shared.figures import percentile, spread
from benchmarks.shared.long_models import long_models
from benchmarks.shared.machine import machine
from benchmarks.shared.options import given, parser_of, report, say, target_model
from benchmarks.shared.worker_pair import Generation, WorkerPair, worker_pair
from outrider.sampling_params import SamplingParams

SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
STREAM_PROMPT_LEN: Final = 100  # tokens
BUDGET: Final = 512  # tokens of a step, the target worker's own default


@dataclass(frozen=True, slots=True)
class Round:
    """Gaps between the chunks of the running streams, and reference times; milliseconds."""

    before_ms: list[float]
    while_ms: list[float]
    chunk_ms: float  # of a prompt's beginning, alone
    prompt_ms: float  # of a whole prompt, alone
    prompts_ms: list[float]  # TTFT of the prompts that arrived together
    tokens_per_s: tuple[float, float]  # of all streams, before and while


def gaps_ms(generations: Sequence[Generation], begin: float, end: float) -> list[float]:
    """Gaps between two arrivals of a stream, the second within [begin, end]."""
    found = []
    for generation in generations:
        times = [when for when, _ in generation.arrivals]
        found += [1e3 * (b - a) for a, b in itertools.pairwise(times) if begin <= b <= end]
    return found


def rate(generations: Sequence[Generation], begin: float, end: float) -> float:
    """Tokens per second."""
    counts = [n for generation in generations for when, n in generation.arrivals if begin <= when <= end]
    return sum(counts) / (end - begin)


def figures(gaps: Sequence[float]) -> dict[str, float]:
    return {name: percentile(gaps, share) for name, share in SHARES.items()}


def summarize(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over rounds with their quartiles; differences are taken within rounds."""
    before, during = [figures(each.before_ms) for each in rounds], [figures(each.while_ms) for each in rounds]
    rises = {name: [b[name] - a[name] for a, b in zip(before, during, strict=True)] for name in SHARES}
    chunks = [each.chunk_ms for each in rounds]
    return {
        "itl_before_ms": {name: spread(each[name] for each in before) for name in SHARES},
        "itl_while_ms": {name: spread(each[name] for each in during) for name in SHARES},
        "chunk_ms": spread(chunks),
        "rise_over_chunk": {
            name: spread(rise / chunk for rise, chunk in zip(rises[name], chunks, strict=True)) for name in SHARES
        },
        "prompt_alone_ms": spread(each.prompt_ms for each in rounds),
        "ttft_while_ms": {
            "first": spread(min(each.prompts_ms) for each in rounds),
            "last": spread(max(each.prompts_ms) for each in rounds),
        },
        "tokens_per_s_before": spread(each.tokens_per_s[0] for each in rounds),
        "tokens_per_s_while": spread(each.tokens_per_s[1] for each in rounds),
    }


class Load:
    """Load generator for one pair of workers."""

    def __init__(self, pair: WorkerPair, arguments: argparse.Namespace, vocab_size: int) -> None:
        self._pair, self._arguments = pair, arguments
        self._chance, self._vocab_size = random.Random(arguments.seed), vocab_size

    def _new_prompt(self, num_tokens: int) -> list[int]:
        return self._chance.choices(range(self._vocab_size), k=num_tokens)

    async def _ttft_ms(self, num_tokens: int) -> float:
        """TTFT of a new prompt of `num_tokens` tokens."""
        generation = await self._pair.generate(
            self._new_prompt(num_tokens), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        )
        return 1e3 * (generation.first_token_at - generation.started_at)

    async def round(self) -> Round:
        arguments = self._arguments
        budget = BUDGET - arguments.streams
        chunk_ms = statistics.median([await self._ttft_ms(budget) for _ in range(5)])
        prompt_ms = await self._ttft_ms(arguments.prompt_tokens)
        endless = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
        streams = [Generation() for _ in range(arguments.streams)]
        running = [
            asyncio.create_task(self._pair.generate(self._new_prompt(STREAM_PROMPT_LEN), endless, result=stream))
            for stream in streams
        ]
        try:
            await asyncio.sleep(1.0)
            begin = time.perf_counter()
            await asyncio.sleep(arguments.seconds)
            middle_at = time.perf_counter()
            asked = (self._ttft_ms(arguments.prompt_tokens) for _ in range(arguments.prompts))
            prompts_ms = await asyncio.gather(*asked)
            end = time.perf_counter()
            for task in running:
                if task.done():
                    raise RuntimeError(f"a stream ended too early: --max-tokens ({task.exception()})")
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        return Round(
            gaps_ms(streams, begin, middle_at),
            gaps_ms(streams, middle_at, end),
            chunk_ms,
            prompt_ms,
            list(prompts_ms),
            (rate(streams, begin, middle_at), rate(streams, middle_at, end)),
        )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws percentiles of the gaps before and while, and of those before plus one chunk's time."""

    def value(made: Mapping[str, Any], more: float = 0.0) -> tuple[float, float, float]:
        low, high = made["quartiles"]
        return made["median"] + more, low + more, high + more

    chunk_ms = result["chunk_ms"]["median"]
    groups = {
        name: {
            "before": value(result["itl_before_ms"][name]),
            "while the prompts are computed": value(result["itl_while_ms"][name]),
            "before, and one chunk": value(result["itl_before_ms"][name], chunk_ms),
        }
        for name in SHARES
    }
    load = result["load"]
    title = f"ITL of {load['streams']} streams, {load['prompts']} prompts of {load['prompt_tokens']} tokens arrive"
    plot.bars(path, title, groups, "ms")


def table(result: Mapping[str, Any]) -> str:
    """The result as a table for people."""
    lines = [f"one chunk, alone: {result['chunk_ms']['median']:.1f} ms"]
    lines.append(f"{'ITL, ms':8}{'before':>10}{'while':>10}{'rise, in chunks':>18}")
    for name in SHARES:
        before, during = result["itl_before_ms"][name], result["itl_while_ms"][name]
        rise = result["rise_over_chunk"][name]
        low, high = rise["quartiles"]
        lines.append(
            f"{name:8}{before['median']:10.1f}{during['median']:10.1f}{rise['median']:10.2f} ({low:.2f} to {high:.2f})"
        )
    return "\n".join(lines)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    longest = max(arguments.prompt_tokens, STREAM_PROMPT_LEN + arguments.max_tokens) + 64
    with (
        target_model(arguments) as target,
        long_models(target, arguments.draft, longest) as (long_target, long_draft),
    ):
        vocab_size = json.loads((long_target / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        workers = ("--kv-cache-gib", str(arguments.kv_cache_gib))
        async with worker_pair(long_target, long_draft, target_arguments=workers, draft_arguments=workers) as pair:
            load = Load(pair, arguments, vocab_size)
            rounds = []
            for number in range(arguments.warmup + arguments.rounds):
                say(f"round {number + 1} of {arguments.warmup + arguments.rounds}")
                rounds.append(await load.round())
    return {"machine": machine(), "load": given(arguments), **summarize(rounds[arguments.warmup :])}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, has_table=True, draws="the percentiles")
    parser.add_argument("--streams", type=int, default=4, help="that decode (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="that arrive at once (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of each (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of a round before they arrive (default %(default)s)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=12000,
        help="of a stream, long enough not to end (default %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds not counted (default %(default)s)")
    parser.add_argument("--kv-cache-gib", type=float, default=4.0, help="of each worker (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    report(arguments, asyncio.run(run(arguments)), draw, table)
