"""What a prompt costs when it is asked again: `python -m benchmarks.prefix_cache --help`.

The whole system is up (`outrider serve`: coordinator, target worker, draft worker), speculation on. In each round a new
prompt of some thousand tokens, cut from held-out code, is asked and then asked again. Told are the time to the first
token of both, and whether the draft's hints are worth as much the second time: where a target worker finds a prompt in
its prefix cache and the draft worker does not find it in its own, hints come late or not at all.

The models are the demo's, lengthened (`benchmarks.long_models`). Greedy, so that both answers must be the same text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
import tokenizers

from benchmarks import plot
from benchmarks.long_models import long_models
from benchmarks.machine import machine
from benchmarks.peers.http_servers import MODEL_NAME, HttpServer, outrider_server
from benchmarks.peers.summary import spread
from benchmarks.target_model import DEMO, add_target_arguments, target_model
from demo.corpus import held_out_prompts
from outrider.cli.bench.requests import new_bench_client
from outrider.free_ports import free_ports

TIMEOUT_S: Final = 300.0
CHARS_PER_TOKEN_MAX: Final = 5.0  # of held-out code: about 3.7


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
    """The same prompt, asked for the first time and again."""

    first: Answer
    again: Answer


async def ask(client: httpx.AsyncClient, url: str, prompt: str, num_tokens: int) -> Answer:
    """A streamed answer. Raises httpx.HTTPError, and RuntimeError for one that is not complete."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        # Else a busy machine may find that hints do not pay, and there would be nothing to compare.
        "speculation": {"always": True, "detail": True},
    }
    first_s, text, last = None, "", dict[str, Any]()
    sent_s = time.perf_counter()
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                said = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
                if said and first_s is None:
                    first_s = time.perf_counter()
                text += said
                last |= {name: event[name] for name in ("usage", "metrics") if event.get(name)}
    ended_s = time.perf_counter()
    if first_s is None or "usage" not in last or "metrics" not in last:
        raise RuntimeError(f"an answer without text or statistics: {text[:100]!r} {last}")
    details = last["usage"].get("prompt_tokens_details") or {}
    return Answer(
        1e3 * (first_s - sent_s),
        1e3 * (ended_s - sent_s),
        text,
        int(details.get("cached_tokens") or 0),
        last["metrics"]["speculative_decoding"],
    )


def prompts_of(target: Path, count: int, num_tokens: int, seed: int) -> list[str]:
    """Texts of held-out code that the target's tokenizer reads as about `num_tokens` tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
    num_chars = int(CHARS_PER_TOKEN_MAX * num_tokens)
    texts = held_out_prompts(count, seed=seed, chars_min=num_chars, chars_max=num_chars)
    cut = [tokenizer.encode(text).ids[:num_tokens] for text in texts]
    if any(len(ids) < num_tokens for ids in cut):
        raise ValueError(f"held-out texts of {num_chars} characters have fewer than {num_tokens} tokens")
    return [tokenizer.decode(ids) for ids in cut]


def rate(answers: Sequence[Answer]) -> float:
    """Accepted of all verified hints."""
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
            # None where no step had hints: each says one token then.
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
    """Time to the first token, asked for the first time and again."""
    groups = {
        "TTFT": {
            name: (made["median"], *made["quartiles"])
            for name, made in (("first", result["ttft_first_ms"]), ("again", result["ttft_again_ms"]))
        }
    }
    plot.bars(path, f"A prompt of {result['load']['prompt_tokens']} tokens, asked twice", groups, "ms")


def table(result: Mapping[str, Any]) -> str:
    """For people."""
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
    async with new_bench_client(TIMEOUT_S, api_key=None) as client:
        for number, prompt in enumerate(prompts):
            print(f"round {number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
            first = await ask(client, url, prompt, arguments.tokens)
            pairs.append(Pair(first, await ask(client, url, prompt, arguments.tokens)))
    return pairs[arguments.warmup :]


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    num_prompts = arguments.warmup + arguments.rounds
    longest = arguments.prompt_tokens + arguments.tokens + 64
    with (
        tempfile.TemporaryDirectory() as logs,
        target_model(arguments) as target,
        long_models(target, arguments.draft, longest) as (long_target, long_draft),
    ):
        prompts = prompts_of(long_target, num_prompts, arguments.prompt_tokens, arguments.seed)
        http_port, grpc_port = free_ports(2)
        asked = outrider_server(long_target, long_draft, port=http_port, grpc_port=grpc_port)
        # Without lookup: what is looked at are the draft's hints.
        words = ("--no-lookup", *(("--no-prefix-caching",) if arguments.no_prefix_caching else ()))
        server = await HttpServer.start(replace(asked, command=(*asked.command, *words)), Path(logs))
        try:
            pairs = await measure(arguments, asked.url, prompts)
        finally:
            await server.stop()
    given = {name: each.name if isinstance(each, Path) else each for name, each in vars(arguments).items()}
    return {"machine": machine(), "load": given, **summarize(pairs)}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefix_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_target_arguments(parser)
    parser.add_argument("--draft", type=Path, default=DEMO / "draft")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="(default %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="prompts (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds not counted (default %(default)s)")
    parser.add_argument(
        "--no-prefix-caching", action="store_true", help="on both workers, to see what there is to gain"
    )
    parser.add_argument("--seed", type=int, default=0, help="which prompts")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the times to the first token")
    parser.add_argument("--json", action="store_true", help="print everything, for machines")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    result = asyncio.run(run(arguments))
    print(json.dumps(result, indent=1) if arguments.json else table(result))
    if arguments.plot is not None:
        draw(result, arguments.plot)


if __name__ == "__main__":
    main()
