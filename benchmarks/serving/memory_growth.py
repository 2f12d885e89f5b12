"""Measures how the memory of a pair of workers grows over thousands of short requests.

Each request has a prompt of random tokens and a random length, so that steps of every number of rows occur. oneDNN
compiles products for each of them, and keeps them up to a bound. With a small bound (--products) next to nothing grows.
Memory is the resident memory of the processes, in MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from pathlib import Path
from typing import Any

from benchmarks.shared.options import given, parser_of, report, say, target_model
from benchmarks.shared.worker_pair import WorkerPair, WorkerProcessHandle, worker_pair
from outrider.sampling_params import SamplingParams
from outrider.text.tokenizer import Tokenizer

NUM_OUTPUT_TOKENS = 16
PROMPT_TOKENS = (20, 100)  # least and most
MIB = 1 << 20


def resident_mib(worker: WorkerProcessHandle) -> float:
    """Resident memory of a worker's process."""
    pages = int(Path(f"/proc/{worker.facts['pid']}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / MIB, 1)


async def measure(pair: WorkerPair, arguments: argparse.Namespace, vocab_size: int) -> list[dict[str, float]]:
    """Sends all requests, `concurrency` at once; a row for every `every` of them."""
    chance = random.Random(1)
    assert pair.draft is not None
    workers = {"target_mib": pair.target, "draft_mib": pair.draft}
    rows: list[dict[str, float]] = []
    num_begun = 0

    def look(num_requests: int) -> None:
        rows.append({"requests": num_requests} | {name: resident_mib(each) for name, each in workers.items()})
        say(str(rows[-1]))

    async def client() -> None:
        nonlocal num_begun
        while num_begun < arguments.requests:
            num_begun += 1
            number = num_begun
            prompt = [chance.randrange(vocab_size) for _ in range(chance.randint(*PROMPT_TOKENS))]
            temperature = chance.choice([0.0, 0.0, 0.8])
            params = SamplingParams(temperature=temperature, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
            await pair.generate(prompt, params)
            if number % arguments.every == 0:
                look(number)

    look(0)
    await asyncio.gather(*(client() for _ in range(arguments.concurrency)))
    return rows


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.products is not None:  # as the workers read it (`outrider.engine.compiled.products`)
        os.environ["LRU_CACHE_CAPACITY"] = str(arguments.products)
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(2 * arguments.products)
    with target_model(arguments) as target_dir:
        vocab_size = Tokenizer(target_dir).vocab_size
        async with worker_pair(target_dir, arguments.draft) as pair:
            return given(arguments) | {"rows": await measure(pair, arguments, vocab_size)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--every", type=int, default=1000, help="requests between two readings")
    parser.add_argument("--products", type=int, help="products that oneDNN may keep, instead of 512")
    arguments = parser.parse_args()
    report(arguments, asyncio.run(run(arguments)))


if __name__ == "__main__":
    main()
