"""Measures the cost of a repeated prompt.

The whole system is up (`outrider serve`: coordinator, target worker, draft worker), speculation on. In each round a
new prompt of some thousand tokens, taken from held-out code, is sent twice. The result shows the time to the first
token of both, and whether the draft's hints are as good the second time: if the target's prefix cache contains the
prompt and the draft's does not, hints come late or not at all.

The models are the demo's, lengthened (`long_models`). Decoding is greedy, so that both answers must be
equal.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import tokenizers

from benchmarks.serving.http_servers import MODEL_NAME, running_outrider
from benchmarks.shared import plot
from benchmarks.shared.figures import spread
from benchmarks.shared.long_models import long_models
from benchmarks.shared.machine import machine
from benchmarks.shared.options import given, parser_of, report, say, target_model
from command_line.client import COMPLETIONS, new_client, stream
from demo.corpus import held_out_prompts

CHARS_PER_TOKEN_MAX: Final = 5.0  # characters per token of held-out code: about 3.7


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it."""

    ttft_ms: float
    e2el_ms: float
    text: str
    num_cached_tokens: int
    statistics: Mapping[str, Any]  # of the request's speculation

    @property
    def num_accepted(self) -> int:
        return int(self.statistics["num_accepted_draft_tokens"])

    @property
    def num_draft_tokens(self) -> int:
        return int(self.statistics["num_draft_tokens"])


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt, sent for the first time and again."""

    first: Answer
    again: Answer


async def ask(client: httpx.AsyncClient, prompt: str, num_tokens: int) -> Answer:
    """Sends a streamed request. Raises ApiError, and KeyError for an answer without statistics."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        # Otherwise a busy machine may find that hints do not pay, and there would be nothing to compare.
        "speculation": {"always": True, "detail": True},
    }
    said = await stream(client, COMPLETIONS, body, lambda pieces: None)
    details = said.usage.get("prompt_tokens_details") or {}
    num_cached_tokens = int(details.get("cached_tokens") or 0)
    statistics = said.metrics["speculative_decoding"]
    return Answer(1e3 * said.ttft_s, 1e3 * said.e2e_s, said.text, num_cached_tokens, statistics)


def prompts_of(target: Path, count: int, num_tokens: int, seed: int) -> list[str]:
    """Excerpts of held-out code of about `num_tokens` tokens in the target's tokenizer."""
    tokenizer = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
    num_chars = int(CHARS_PER_TOKEN_MAX * num_tokens)
    texts = held_out_prompts(count, seed=seed, chars_min=num_chars, chars_max=num_chars)
    cut = [tokenizer.encode(text).ids[:num_tokens] for text in texts]
    if any(len(ids) < num_tokens for ids in cut):
        raise ValueError(f"held-out texts of {num_chars} characters have fewer than {num_tokens} tokens")
    return [tokenizer.decode(ids) for ids in cut]


def rate(answers: Sequence[Answer]) -> float:
    """Accepted over verified hints."""
    return sum(each.num_accepted for each in answers) / max(sum(each.num_draft_tokens for each in answers), 1)


def summarize(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians over rounds with their quartiles; ratios and differences within rounds."""
    firsts, agains = [pair.first for pair in pairs], [pair.again for pair in pairs]
    return {
        "ttft_first_ms": spread(each.ttft_ms for each in firsts),
        "ttft_again_ms": spread(each.ttft_ms for each in agains),
        "ttft_again_over_first": spread(pair.again.ttft_ms / pair.first.ttft_ms for pair in pairs),
        "cached_tokens_again": spread(float(each.num_cached_tokens) for each in agains),
        "after_first_token_ms": {
            name: spread(each.e2el_ms - each.ttft_ms for each in answers)
            for name, answers in (("first", firsts), ("again", agains))
        },
        "draft_acceptance_rate": {"first": round(rate(firsts), 3), "again": round(rate(agains), 3)},
        "draft_acceptance_rate_difference": spread(rate([p.again]) - rate([p.first]) for p in pairs),
        "mean_acceptance_length": {
            # None if no step had hints: each then commits one token.
            name: spread(float(each.statistics["mean_acceptance_length"] or 1.0) for each in answers)
            for name, answers in (("first", firsts), ("again", agains))
        },
        "num_steps": {
            name: spread(float(each.statistics["num_steps"]) for each in answers)
            for name, answers in (("first", firsts), ("again", agains))
        },
        "same_texts": sum(pair.first.text == pair.again.text for pair in pairs),
    }


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws the time to the first token of both requests."""
    groups = {
        "TTFT": {
            name: (made["median"], *made["quartiles"])
            for name, made in (("first", result["ttft_first_ms"]), ("again", result["ttft_again_ms"]))
        }
    }
    plot.bars(path, f"A prompt of {result['load']['prompt_tokens']} tokens, asked twice", groups, "ms")


def table(result: Mapping[str, Any]) -> str:
    """The result as a table for people."""
    ratio = result["ttft_again_over_first"]
    rates, lengths = result["draft_acceptance_rate"], result["mean_acceptance_length"]
    low, high = ratio["quartiles"]
    return "\n".join([
        f"TTFT: first {result['ttft_first_ms']['median']:.0f} ms, again {result['ttft_again_ms']['median']:.0f} ms, "
        f"{ratio['median']:.1%} ({low:.1%} to {high:.1%})",
        f"acceptance: first {rates['first']:.3f}, again {rates['again']:.3f}; mean acceptance length: first "
        f"{lengths['first']['median']:.2f}, again {lengths['again']['median']:.2f}",
        f"the same text {result['same_texts']} times of {ratio['rounds']}",
    ])  # fmt: skip


async def measure(arguments: argparse.Namespace, url: str, prompts: Sequence[str]) -> list[Pair]:
    pairs = []
    async with new_client(url) as client:
        for number, prompt in enumerate(prompts):
            say(f"round {number + 1} of {len(prompts)}")
            first = await ask(client, prompt, arguments.tokens)
            pairs.append(Pair(first, await ask(client, prompt, arguments.tokens)))
    return pairs[arguments.warmup :]


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    longest = arguments.prompt_tokens + arguments.tokens + 64
    # Without lookup: the draft's hints are measured.
    words = ("--no-lookup", *(("--no-prefix-caching",) if arguments.no_prefix_caching else ()))
    with target_model(arguments) as short, long_models(short, arguments.draft, longest) as (target, draft):
        num_prompts = arguments.warmup + arguments.rounds
        prompts = prompts_of(target, num_prompts, arguments.prompt_tokens, arguments.seed)
        async with running_outrider(target, draft, *words) as server:
            pairs = await measure(arguments, server.asked.url, prompts)
    return {"machine": machine(), "load": given(arguments), **summarize(pairs)}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, has_table=True, draws="the times to the first token")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="(default %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="prompts (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds not counted (default %(default)s)")
    parser.add_argument(
        "--no-prefix-caching", action="store_true", help="on both workers, to see what there is to gain"
    )
    parser.add_argument("--seed", type=int, default=0, help="which prompts")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    report(arguments, asyncio.run(run(arguments)), draw, table)
