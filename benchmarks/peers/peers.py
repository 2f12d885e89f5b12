"""Compares Outrider, transformers' assisted generation and vLLM's CPU build.

Outrider's target runs on core 0 and its draft on core 1, with speculation off and on, and as `outrider serve` shares
both cores out (`outrider-plain-2`, `outrider-draft-2`). A peer runs on core 0 alone (as many cores for the target as
Outrider's target) and on both (as many cores in total as Outrider with its draft), plain and with the same draft. Each
peer configuration is a process that loads its models once. All systems alternate in rounds, so that a change of the
machine's load affects all of them. The result shows the CPU use of idle systems (`idle_cores`, `others_busy_max`). All
get the same token ids, decode greedily in bfloat16, without prefix caching and past the end token. A turn's rate is all
its new tokens over its wall time, prefill included; the rate after the first tokens is shown as well. Medians and
quartiles are over rounds, ratios are taken within rounds.

transformers is measured with one request at a time only, because assisted generation takes one. vLLM has an
advantage: its engine runs in the client's process, while Outrider's times include a gRPC hop and its Python client,
which has no core of its own.

Outrider's outputs with and without a draft must be equal, or the exit status is 1. Other systems round differently;
the number of their outputs that equal ours is only reported.

`--prompt-tokens 2000 --tokens 1` compares times to the first token of long prompts: a turn is nothing else then.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import Setup, check_memory, measure, running_systems
from benchmarks.peers.process import PeerError, add_turn_arguments, add_vllm_arguments, check_vllm, idle_costs
from benchmarks.peers.summary import num_differing, summarize
from benchmarks.peers.systems import DRAFT, MAX_MODEL_LEN, WEAK, Family, all_systems, select
from benchmarks.shared import plot
from benchmarks.shared.long_models import lengthen
from benchmarks.shared.machine import machine
from benchmarks.shared.options import given, parser_of, report, say, target_model
from demo.corpus import held_out_prompts
from outrider.text.tokenizer import Tokenizer

CHARS_PER_TOKEN_MAX = 6
"""More than a token of the held-out texts has on average, so that a prompt can be cut to its length."""


async def run(arguments: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """Runs the benchmark; returns the result without the machine's description."""
    num_asked = sum(-(-arguments.prompts // batch) * batch for batch in arguments.batch)
    with target_model(arguments) as target, lengthened(replace(setup, target=target)) as setup:
        check_memory(setup)
        prompts = held_out(target, (arguments.rounds + arguments.warmup) * num_asked, arguments)
        async with running_systems(setup) as (running, facts):
            pids = {system.name: each.pids for system, each in running.items()}
            idle = await idle_costs(pids, seconds=2.0)
            turns = await measure(
                running,
                iter(prompts),
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


@contextmanager
def lengthened(setup: Setup) -> Iterator[Setup]:
    """The setup, with lengthened copies of its models where they are made for less; deleted afterwards."""
    if setup.max_model_len <= MAX_MODEL_LEN:
        yield setup
        return
    with tempfile.TemporaryDirectory() as scratch:
        target = lengthen(setup.target, Path(scratch) / "target", setup.max_model_len)
        drafts = {
            mode: lengthen(folder, Path(scratch) / mode, setup.max_model_len) for mode, folder in setup.drafts.items()
        }
        yield replace(setup, target=target, drafts=drafts)


def held_out(target: Path, count: int, arguments: argparse.Namespace) -> list[list[int]]:
    """Token ids of held-out prompts, with `--prompt-tokens` of that length."""
    tokenizer, num_tokens = Tokenizer(target), arguments.prompt_tokens
    if num_tokens is None:
        return [tokenizer.encode(text) for text in held_out_prompts(count, seed=arguments.seed)]
    num_chars = CHARS_PER_TOKEN_MAX * num_tokens
    try:
        texts = held_out_prompts(count, seed=arguments.seed, chars_min=num_chars, chars_max=num_chars)
    except ValueError as error:
        raise PeerError(f"--prompt-tokens {num_tokens}: {error}; choose fewer") from error
    prompts = [tokenizer.encode(text)[:num_tokens] for text in texts]
    if any(len(prompt) < num_tokens for prompt in prompts):
        raise PeerError(f"--prompt-tokens {num_tokens}: a text of {num_chars} characters has fewer with this tokenizer")
    return prompts


def draw(path: Path, result: dict[str, Any], title: str) -> None:
    """Draws tokens per second by batch size and system."""
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
    parser = parser_of(__doc__, draws="tokens per second as bars")
    parser.add_argument("--weak-draft", type=Path, help="a worse draft, measured as another mode")
    add_vllm_arguments(parser)
    parser.add_argument(
        "--systems",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="only these, such as 'outrider-*' 'vllm-*-2'",
    )
    add_turn_arguments(parser)
    parser.add_argument("--num-speculative-tokens", type=int, default=5, help="of the peers (default %(default)s)")
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="length of all prompts; by default most have 27 to 190 tokens"
    )
    arguments = parser.parse_args(argv)
    if arguments.prompt_tokens is not None and arguments.prompt_tokens < 1:
        parser.error("--prompt-tokens must be at least 1")
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
        max((arguments.prompt_tokens or 0) + arguments.tokens, MAX_MODEL_LEN),
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
    size = "target grown to 275 M" if arguments.grown else arguments.target.name
    title = f"Greedy, {arguments.tokens} tokens, bfloat16, {size}"
    report(
        arguments,
        {"machine": machine(), "settings": given(arguments), **result},
        lambda _, path: draw(path, result, title),
    )
    if result["num_outrider_texts_that_differ"]:
        sys.exit("benchmarks.peers: a draft changed Outrider's output")
