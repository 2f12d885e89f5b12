"""What batch invariance costs: a step of the engine against transformers' own forward pass of the same weights.

`python -m benchmarks.invariance_cost --help`. transformers computes plain linear layers and its own attention, whose
rows depend on their company; the engine's forms do not. One core, one sequence; decoding steps, blocks of hints and
prompts in one piece take turns, so that a change of the machine's mood meets both sides. Medians of milliseconds,
and the median ratio with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.target_model import add_target_arguments, target_model
from outrider.engine.loading import load_model
from outrider.engine.model import Engine, EngineConfig, SequenceChunk
from outrider.worker_process import pin_to_cores

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
    engine = load_model(EngineConfig(model_dir, max_num_seqs=2))
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
    quartiles = statistics.quantiles([ours / theirs for ours, theirs in pairs], n=4)
    return {
        "engine_ms": round(statistics.median(ours for ours, _ in pairs), 1),
        "transformers_ms": round(statistics.median(theirs for _, theirs in pairs), 1),
        "ratio": round(quartiles[1], 2),
        "ratio_quartiles": [round(quartiles[0], 2), round(quartiles[2], 2)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_target_arguments(parser)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    pin_to_cores("0")
    torch.set_num_threads(1)
    with target_model(arguments) as model_dir:
        print(json.dumps(measure(model_dir, arguments.rounds), indent=1))


if __name__ == "__main__":
    main()
