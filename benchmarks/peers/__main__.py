"""Outrider, transformers' assisted generation and vLLM's CPU build on the same weights: `python -m benchmarks.peers`.

The plan: Outrider's target runs on core 0 and its draft on core 1, off and on. A peer runs on core 0 alone (as many
cores for the target as Outrider's target has) and on both (as many cores in total as Outrider with its draft), plain
and with the same draft. Each peer configuration is a process of its own that loads its models once; then all take
turns in rounds, so that a change of the machine's mood meets everybody. An idle system must not disturb: what it burns
is in the result (`idle_cores`, `others_busy_max`). Everybody gets the same token ids, greedy, bfloat16, no prefix
caching, no end of text; a turn's rate is all its new tokens over its wall time, prefill included, and beside it stands
the rate after the first tokens. Medians and quartiles are over rounds, ratios are taken within rounds.

Left out: transformers beyond one request at a time, because assisted generation takes one. To vLLM's advantage its
engine sits in the process that asks it, while Outrider's times hold a gRPC hop and its Python client, which has no core
of its own.

Outrider's texts with and without a draft must be equal, or the exit status is 1; other systems round differently, and
how many of their texts equal ours is only reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import plot
from benchmarks.machine import machine
from benchmarks.peers.measure import Setup, check_memory, idle_costs, measure, running_systems, say
from benchmarks.peers.process import PeerError, add_vllm_arguments, check_vllm
from benchmarks.peers.summary import num_differing, summarize
from benchmarks.peers.systems import DRAFT, WEAK, Family, all_systems, select
from benchmarks.target_model import DEMO, add_target_arguments, target_model
from demo.corpus import held_out_prompts
from outrider.tokenizer import Tokenizer


async def run(arguments: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """The result, without what the machine is."""
    num_asked = sum(-(-arguments.prompts // batch) * batch for batch in arguments.batch)
    with target_model(arguments) as target:
        setup = replace(setup, target=target)
        check_memory(setup)
        tokenizer = Tokenizer(target)
        texts = held_out_prompts((arguments.rounds + arguments.warmup) * num_asked, seed=arguments.seed)
        async with running_systems(setup) as (running, facts):
            idle = await idle_costs(running)
            turns = await measure(
                running,
                iter([tokenizer.encode(text) for text in texts]),
                batches=arguments.batch,
                num_prompts=arguments.prompts,
                num_tokens=arguments.tokens,
                num_rounds=arguments.rounds,
                num_warmup=arguments.warmup,
            )
    return {
        "peers": facts,
        "processes": idle,
        "num_outrider_texts_that_differ": num_differing(turns),
        **summarize(turns),
    }


def draw(path: Path, result: dict[str, Any], title: str) -> None:
    """Tokens per second by batch size and system."""
    groups = {
        name.replace("_", " "): {
            system: (figures["tokens_per_s"]["median"], *figures["tokens_per_s"]["quartiles"])
            for system, figures in result[name]["systems"].items()
        }
        for name in result
        if name.startswith("batch_")
    }
    plot.bars(path, title, groups, "tokens/s, prefill included; median and quartiles")


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, Setup]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_target_arguments(parser)
    parser.add_argument("--draft", type=Path, default=DEMO / "draft")
    parser.add_argument("--weak-draft", type=Path, help="a worse draft, measured as a third mode")
    add_vllm_arguments(parser)
    parser.add_argument(
        "--systems",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="only these, such as 'outrider-*' 'vllm-*-2'",
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests at once (default 1 8)")
    parser.add_argument("--prompts", type=int, default=4, help="of a turn, at least (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="per request (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds not counted (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which prompts")
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=5, help="of the peers (default %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw tokens per second as bars")
    arguments = parser.parse_args(argv)
    drafts = {DRAFT: arguments.draft} | ({WEAK: arguments.weak_draft} if arguments.weak_draft else {})
    known = all_systems(has_vllm=arguments.vllm_python is not None, has_weak_draft=WEAK in drafts)
    try:
        systems = select(known, arguments.systems)
    except argparse.ArgumentTypeError as error:
        parser.error(f"--systems: {error}")
    return arguments, Setup(
        systems,
        arguments.target,
        drafts,
        arguments.vllm_python,
        arguments.vllm_preload,
        arguments.num_speculative_tokens,
        max(arguments.batch),
    )


def main() -> None:
    arguments, setup = parse()
    if arguments.vllm_python is None:
        say("vLLM is left out; --vllm-python names the python of an environment that has it")
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < 2:
        sys.exit("benchmarks.peers: needs two cores")
    try:
        if any(system.family is Family.VLLM for system in setup.systems):
            check_vllm(arguments.vllm_python)
        result = asyncio.run(run(arguments, setup))
    except PeerError as error:
        sys.exit(f"benchmarks.peers: {error}")
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()
    }
    for name in ("target", "draft", "weak_draft", "vllm_python", "plot"):
        settings[name] = Path(settings[name]).name if settings[name] else None
    settings["vllm_preload"] = [path.name for path in arguments.vllm_preload]
    print(json.dumps({"machine": machine(), "settings": settings, **result}, indent=1))
    if arguments.plot:
        size = "target grown to 275 M" if arguments.grown else arguments.target.name
        draw(arguments.plot, result, f"Greedy, {arguments.tokens} tokens, bfloat16, {size}")
    if result["num_outrider_texts_that_differ"]:
        sys.exit("benchmarks.peers: a draft changed Outrider's text")


if __name__ == "__main__":
    main()
