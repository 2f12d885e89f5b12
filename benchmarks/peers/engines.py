"""Measures a draft pool for vLLM: the same vLLM plain, with its own draft model, and with hints.

- `plain`: vLLM on two cores.
- `own`: vLLM with its own draft model (`--speculative-config draft_model`), on two cores.
- `apart`: vLLM with Outrider's scheduler on core 0, and the draft worker on core 1: as many cores in total.
- `shared`: vLLM with Outrider's scheduler on two cores, and the draft worker on core 1 whenever vLLM leaves it idle
  (`nice`; vLLM's threads sleep while they wait): as many cores in total.
- `no-hints`: vLLM with Outrider's scheduler on two cores, and no draft worker that could be reached: its price.

Each is a process that loads its models once, and they alternate in rounds, so that a change of the machine's load
affects all of them. All get the same token ids, decode greedily, without prefix caching and past the end token. A
turn's rate is all its new tokens over its wall time, prefill included. Medians and quartiles are over rounds, ratios
are taken within rounds. `others_busy` is the CPU use, in cores, of everything else on the machine during turns: with
more than a little of it the figures say nothing. `differing` counts the outputs that are not those of `plain`, and
`equal_tokens` is the share of tokens before the first difference: in float32 none should differ, in bfloat16 vLLM's own
outputs depend on the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.peers.process import (
    Answer,
    Peer,
    PeerError,
    add_turn_arguments,
    add_vllm_arguments,
    check_vllm,
    cpu_seconds,
)
from benchmarks.peers.systems import MAX_MODEL_LEN, PLAIN, Family, System, peer_environment
from benchmarks.shared.figures import spread
from benchmarks.shared.machine import machine
from benchmarks.shared.options import given, parser_of, report, say, target_model
from benchmarks.shared.worker_pair import WorkerProcessHandle
from demo.corpus import held_out_prompts
from outrider.text.tokenizer import Tokenizer

OWN: Final = "own"
APART: Final = "apart"
SHARED: Final = "shared"
NO_HINTS: Final = "no-hints"
WAYS: Final = (PLAIN, OWN, APART, SHARED, NO_HINTS)
PASSIVE: Final = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""Threads of vLLM that wait sleep, and leave their core to the draft worker."""
NOWHERE: Final = "127.0.0.1:9"
"""An address at which no draft worker listens."""
PROPOSER: Final = "outrider.engines.vllm.no_drafts.NoDrafts"


@dataclass(frozen=True, slots=True)
class Turn:
    """One way in one round at one batch size."""

    number: int
    batch: int
    way: str
    tokens_per_s: float
    others_busy: float  # cores
    texts: list[list[int]]


def settings_of(way: str, arguments: argparse.Namespace, target: Path, draft_address: str) -> dict[str, Any]:
    """The settings of a way's process."""
    plugin = {
        "scheduler_cls": "outrider.engines.vllm.scheduler.HintScheduler",
        "async_scheduling": False,
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": arguments.num_speculative_tokens,
        },
        "additional_config": {"outrider": {"draft_workers": [NOWHERE if way == NO_HINTS else draft_address]}},
    }
    return {
        "target": str(target.resolve()),
        "draft": str(arguments.draft.resolve()) if way == OWN else None,
        "cores": [0] if way == APART else [0, 1],
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max(arguments.batch),
        "dtype": arguments.dtype,
        "plugin": None if way in (PLAIN, OWN) else plugin,
    }


async def start(way: str, arguments: argparse.Namespace, target: Path, draft_address: str) -> Peer:
    """Starts a way's process. Raises PeerError."""
    settings = settings_of(way, arguments, target, draft_address)
    environment = peer_environment(System(Family.VLLM, PLAIN, len(settings["cores"])), arguments.vllm_preload)
    environment |= PASSIVE if way == SHARED else {}
    command = [str(arguments.vllm_python), "-m", "benchmarks.peers.vllm_engine", json.dumps(settings)]
    peer = await Peer.start(way, command, environment)
    say(f"{way} is ready")
    return peer


async def turn(peer: Peer, way: str, number: int, asked: Sequence[list[list[int]]], num_tokens: int) -> Turn:
    """Runs one turn. Raises PeerError."""
    ours = [psutil.Process().pid]  # whose children all systems are
    before, all_before = cpu_seconds(ours), sum(psutil.cpu_times()[:3])
    answers: list[Answer] = [await peer.ask(batch, num_tokens) for batch in asked]
    seconds = sum(answer.seconds for answer in answers)
    others_s = (sum(psutil.cpu_times()[:3]) - all_before) - (cpu_seconds(ours) - before)
    texts = [text for answer in answers for text in answer.texts]
    return Turn(number, len(asked[0]), way, sum(map(len, texts)) / seconds, max(others_s, 0.0) / seconds, texts)


async def measure(arguments: argparse.Namespace, target: Path, prompts: Iterator[list[int]]) -> list[Turn]:
    """Starts all ways and runs the rounds. Raises PeerError."""
    turns: list[Turn] = []
    async with AsyncExitStack() as stack:
        flags = ("--model", str(arguments.draft), "--max-model-len", str(MAX_MODEL_LEN), "--cpu-affinity", "1")
        draft = await WorkerProcessHandle.start("draft_worker", *flags, through=("nice", "-n", "19"))
        stack.push_async_callback(draft.stop)
        peers: dict[str, Peer] = {}
        for way in arguments.ways:  # one after the other: each takes both cores to start
            peers[way] = await start(way, arguments, target, draft.address)
            stack.push_async_callback(peers[way].stop)
        order = list(peers)
        for number in range(-arguments.warmup, arguments.rounds):
            for batch in arguments.batch:
                asked = [[next(prompts) for _ in range(batch)] for _ in range(-(-arguments.prompts // batch))]
                first = number % len(order)
                for way in order[first:] + order[:first]:
                    done = await turn(peers[way], way, number, asked, arguments.tokens)
                    say(f"round {number + 1}, batch {batch}, {way}: {done.tokens_per_s:.0f} tokens/s")
                    if number >= 0:
                        turns.append(done)
    return turns


def summarize(turns: Sequence[Turn]) -> dict[str, Any]:
    """Figures by batch size and way."""
    result: dict[str, Any] = {}
    for batch in sorted({each.batch for each in turns}):
        of_batch = [each for each in turns if each.batch == batch]
        plain = {each.number: each for each in of_batch if each.way == PLAIN}
        own = {each.number: each for each in of_batch if each.way == OWN}
        ways = {}
        for way in dict.fromkeys(each.way for each in of_batch):
            found = [each for each in of_batch if each.way == way]
            pairs = [
                (text, other)
                for each in found
                if each.number in plain
                for text, other in zip(each.texts, plain[each.number].texts, strict=True)
            ]
            num_tokens = sum(len(text) for text, _ in pairs)
            ways[way] = {
                "tokens_per_s": spread(each.tokens_per_s for each in found),
                "over_plain": spread(
                    each.tokens_per_s / plain[each.number].tokens_per_s for each in found if each.number in plain
                ),
                "over_own": spread(
                    each.tokens_per_s / own[each.number].tokens_per_s for each in found if each.number in own
                ),
                "differing": f"{sum(text != other for text, other in pairs)} of {len(pairs)}",
                "equal_tokens": round(sum(equal_length(*pair) for pair in pairs) / max(num_tokens, 1), 4),
                "others_busy": round(statistics.median(each.others_busy for each in found), 2),
            }
        result[f"batch_{batch}"] = ways
    return result


def equal_length(text: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens come before the first that differs."""
    return next((index for index, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(text))


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark; returns the result without the machine's description."""
    num_asked = sum(-(-arguments.prompts // batch) * batch for batch in arguments.batch)
    with target_model(arguments) as target:
        tokenizer = Tokenizer(target)
        texts = held_out_prompts((arguments.rounds + arguments.warmup) * num_asked, seed=arguments.seed)
        return summarize(await measure(arguments, target, iter([tokenizer.encode(text) for text in texts])))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_vllm_arguments(parser)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(default: all)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default %(default)s)")
    add_turn_arguments(parser)
    parser.add_argument("--num-speculative-tokens", type=int, default=7, help="most per step (default %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.vllm_python is None:
        parser.error("--vllm-python names the python of an environment with vLLM (tests/engines/install_vllm.sh)")
    return arguments


def main() -> None:
    arguments = parse()
    try:
        check_vllm(arguments.vllm_python)
        result = asyncio.run(run(arguments))
    except PeerError as error:
        sys.exit(f"benchmarks.engines: {error}")
    report(arguments, {"machine": machine(), "settings": given(arguments), **result})


if __name__ == "__main__":
    main()
