"""Measures the cost of batch invariance: a step of the engine compared with transformers' own forward pass.

transformers computes plain linear layers and its own attention, whose rows depend on the batch composition; the
engine's forms do not. One core, one sequence. Decoding steps, blocks of hints and whole prompts alternate, so that a
change of the machine's load affects both sides. Results are medians in milliseconds, and the median ratio with its
quartiles.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.shared.figures import with_quartiles
from benchmarks.shared.options import load, parser_of, report, target_model
from outrider.engine.model import Engine, SequenceChunk
from outrider.worker.worker_process import pin_to_cores

SHAPES = {"decode, 1 token": (200, 1), "block of 8": (200, 8), "prompt of 64": (0, 64), "prompt of 256": (0, 256),
          "prompt of 512": (0, 512)}  # fmt: skip
NUM_LOGITS = 8


@torch.inference_mode()
def engine_ms(engine: Engine, token_ids: list[int], context_len: int, num_tokens: int) -> float:
    kv = engine.new_sequence()
    if context_len:
        kv.extend(context_len)
        engine.forward([SequenceChunk(kv, token_ids[:context_len], 1)])
    kv.extend(num_tokens)
    chunk = SequenceChunk(kv, token_ids[context_len : context_len + num_tokens], min(num_tokens, NUM_LOGITS))
    started = time.perf_counter()
    engine.forward([chunk])
    elapsed_ms = (time.perf_counter() - started) * 1e3
    kv.free()
    return elapsed_ms


@torch.inference_mode()
def transformers_ms(model: Any, token_ids: list[int], context_len: int, num_tokens: int) -> float:
    cache = transformers.DynamicCache()
    if context_len:
        model(torch.tensor([token_ids[:context_len]]), past_key_values=cache, logits_to_keep=1)
    rows = torch.tensor([token_ids[context_len : context_len + num_tokens]])
    started = time.perf_counter()
    model(rows, past_key_values=cache, logits_to_keep=min(num_tokens, NUM_LOGITS))
    return (time.perf_counter() - started) * 1e3


def measure(model_dir: Path, rounds: int) -> dict[str, Any]:
    engine = load(model_dir, max_num_seqs=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    ).eval()
    token_ids = [(7919 * i + 13) % engine.vocab_size for i in range(600)]
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in SHAPES}
    for round_index in range(-1, rounds):
        for name, shape in SHAPES.items():
            pair = engine_ms(engine, token_ids, *shape), transformers_ms(model, token_ids, *shape)
            if round_index >= 0:
                samples[name].append(pair)
    return {name: summarize(pairs) for name, pairs in samples.items()}


def summarize(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        "engine_ms": round(statistics.median(ours for ours, _ in pairs), 1),
        "transformers_ms": round(statistics.median(theirs for _, theirs in pairs), 1),
        **with_quartiles("ratio", [ours / theirs for ours, theirs in pairs], 2),
    }


def main() -> None:
    parser = parser_of(__doc__, has_draft=False)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    pin_to_cores("0")
    torch.set_num_threads(1)
    with target_model(arguments) as model_dir:
        report(arguments, measure(model_dir, arguments.rounds))
