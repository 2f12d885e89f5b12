"""A pair of workers on two cores and held-out prompts: what several benchmarks run on."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator

from benchmarks.shared.options import parser_of, target_model
from benchmarks.shared.worker_pair import TwoCores, WorkerPair, worker_pair
from demo.corpus import held_out_prompts
from outrider.text.tokenizer import Tokenizer


def pair_parser(docstring: str) -> argparse.ArgumentParser:
    """The flags that say which workers are started."""
    parser = parser_of(docstring)
    for worker in ("target", "draft"):
        parser.add_argument(
            f"--{worker}-argument", action="append", default=[], help="passed on, such as --hint-wait-ms=0"
        )
    parser.add_argument(
        "--share-cores",
        action="store_true",
        help="let the target use the draft's core too, as `outrider serve --share-cores` does (default: a core each)",
    )
    return parser


@contextlib.asynccontextmanager
async def pinned_pair(
    arguments: argparse.Namespace, num_prompts: int, *target_arguments: str, seed: int = 1
) -> AsyncIterator[tuple[WorkerPair, list[list[int]]]]:
    """The workers that the flags ask for, and the token ids of `num_prompts` held-out prompts."""
    with target_model(arguments) as target_dir:
        tokenizer = Tokenizer(target_dir)
        prompts = [tokenizer.encode(text) for text in held_out_prompts(num_prompts, seed=seed)]
        async with worker_pair(
            target_dir,
            arguments.draft,
            target_arguments=[*target_arguments, *arguments.target_argument],
            draft_arguments=arguments.draft_argument,
            cores=TwoCores(is_shared=arguments.share_cores),
        ) as pair:
            yield pair, prompts
