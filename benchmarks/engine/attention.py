"""Measures attention over the paged cache on one core: with the processor's dot products of bfloat16 and without them.

Steps of one and of several sequences, of few rows, some of them nodes of a hint tree, and of a prompt's chunk, on
contexts of several lengths; the two alternate. `products_per_s` counts the multiplications that the rows need, 2 ·
head_dim for each key that a row sees.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.shared.machine import machine
from benchmarks.shared.options import report
from outrider.engine.compiled.kernels import MAX_QUERIES, Instructions, Shape, attention_instructions, kernels
from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.engine.layers.attention import QueryBlock
from outrider.engine.layers.decoder import RaggedStep
from outrider.worker.worker_process import pin_to_cores

BLOCK_SIZE = 16
DOT_PRODUCTS, ANY = "dot products", "any processor's"


class Load(NamedTuple):
    num_sequences: int
    num_rows: int  # of each
    num_tokens: int  # of each in the cache, with the rows' own
    num_nodes: int = 0  # rows that are nodes of a tree, beside each other


LOADS = (
    *(Load(1, 1, 150), Load(1, 1, 1000), Load(8, 5, 150), Load(8, 5, 1000)),
    *(Load(1, 9, 1000), Load(1, 9, 1000, 4), Load(1, 9, 4000), Load(1, 9, 4000, 4)),
    *(Load(1, 512, 512), Load(1, 512, 1000), Load(1, 512, 4000)),
)


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


def seconds(heads: Heads, load: Load, rounds: int) -> dict[str, list[float]]:
    """Times of a layer's attention, by instructions."""
    found = kernels(torch.bfloat16)
    assert found is not None
    allocator = BlockAllocator(load.num_sequences * -(-load.num_tokens // BLOCK_SIZE) + 1, BLOCK_SIZE)
    blocks = []
    for _ in range(load.num_sequences):
        kv = KVSequence(allocator)
        kv.extend(load.num_tokens)
        end = load.num_tokens - load.num_nodes
        blocks.append(QueryBlock(KVSequence(allocator, kv.block_ids, end), load.num_rows - load.num_nodes))
        if load.num_nodes:
            paths = [[entry] for entry in range(end, load.num_tokens)]
            blocks.append(QueryBlock(kv, load.num_nodes, end, paths))
    step = RaggedStep(blocks, BLOCK_SIZE)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    qkv = torch.randn(step.num_rows, width).bfloat16()
    output = torch.empty(step.num_rows, heads.num_heads * heads.head_dim, dtype=torch.bfloat16)
    keys, values = (
        torch.randn(allocator.num_blocks * BLOCK_SIZE, heads.num_kv_heads, heads.head_dim).bfloat16() for _ in range(2)
    )
    scores = np.empty(MAX_QUERIES * step.num_keys_max, dtype=np.float32)
    slots = np.empty(step.num_keys_max, dtype=np.int32)
    times: dict[str, list[float]] = {DOT_PRODUCTS: [], ANY: []}
    for index in range(-1, rounds):
        for name, own in times.items():
            shape = Shape(
                num_heads=heads.num_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                instructions=Instructions.AVX512_BF16 if name == DOT_PRODUCTS else 0,
                scale=heads.head_dim**-0.5,
            )
            began = time.perf_counter()
            found.attend(
                *(qkv.data_ptr(), output.data_ptr(), ctypes.addressof(step.struct), ctypes.addressof(shape)),
                *(keys.data_ptr(), values.data_ptr(), scores.ctypes.data, step.num_keys_max, slots.ctypes.data),
                *(0, step.num_members),
            )
            if index >= 0:
                own.append(time.perf_counter() - began)
    return times


def figures(heads: Heads, load: Load, rounds: int) -> dict[str, Any]:
    """Medians of a layer's attention, and their ratio."""
    end = load.num_tokens - load.num_nodes
    num_on_line = load.num_rows - load.num_nodes
    num_seen = load.num_sequences * (sum(range(end - num_on_line + 1, end + 1)) + load.num_nodes * (end + 1))
    num_products = 2 * heads.head_dim * heads.num_heads * num_seen
    medians = {name: statistics.median(own) for name, own in seconds(heads, load, rounds).items()}
    return {
        "sequences": load.num_sequences,
        "rows": load.num_rows,
        "nodes among them": load.num_nodes,
        "tokens": load.num_tokens,
        **{f"{name}, ms": round(1e3 * median, 3) for name, median in medians.items()},
        "ratio": round(medians[DOT_PRODUCTS] / medians[ANY], 2),
        "products_per_s": f"{num_products / medians[DOT_PRODUCTS]:.3g}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=24, help="query heads (default %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--head-dim", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="of both ways (default %(default)s)")
    arguments = parser.parse_args()
    if attention_instructions(torch.bfloat16) is None:
        parser.error("this processor has no dot products of bfloat16 (AVX512_BF16), or the kernels are not compiled")
    pin_to_cores("0")
    torch.set_num_threads(1)
    heads = Heads(arguments.heads, arguments.kv_heads, arguments.head_dim)
    loads = [figures(heads, load, arguments.rounds) for load in LOADS]
    report(arguments, {"machine": machine(), "loads": loads})


if __name__ == "__main__":
    main()
