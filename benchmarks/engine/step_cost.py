"""Measures the cost of one step by the number of tokens.

One sequence with 150 tokens in its KV cache, one core, no other process. Sizes and three engines (the compiled
kernels, the same with the products of oneDNN or torch, transformers' own modules) alternate, so that a change of the
machine's load affects all of them; medians are printed. `--target DIR` takes any model, also a draft.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from unittest.mock import patch

from benchmarks.shared.options import load, parser_of, report, target_model
from outrider.engine.model import Engine, SequenceChunk
from outrider.worker.worker_process import pin_to_cores

CONTEXT_LEN = 150  # tokens
NUM_TOKENS = (1, 2, 4, 6, 8, 32, 128, 512)


def measure(engines: dict[str, Engine], rounds: int, sizes: Sequence[int] = NUM_TOKENS) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step, by engine and number of tokens fed."""
    times: dict[tuple[str, int], list[float]] = {}
    sequences = {}
    for name, engine in engines.items():
        kv = sequences[name] = engine.new_sequence()
        kv.extend(CONTEXT_LEN)
        engine.forward([SequenceChunk(kv, [5] * CONTEXT_LEN, 1)])
    for _ in range(rounds):
        for num_tokens in sizes:
            for name, engine in engines.items():
                kv = sequences[name]
                kv.extend(num_tokens)
                started = time.perf_counter()
                engine.forward([SequenceChunk(kv, [7] * num_tokens, num_tokens)])
                times.setdefault((name, num_tokens), []).append((time.perf_counter() - started) * 1e3)
                kv.truncate(CONTEXT_LEN)
    return {name: {str(n): round(statistics.median(times[name, n]), 2) for n in sizes} for name in engines}


def main() -> None:
    parser = parser_of(__doc__, has_draft=False)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    pin_to_cores("0")
    with target_model(arguments) as model_dir:
        engines = {
            "kernels": load(model_dir),
            "eager": load(model_dir, enforce_eager=True),
        }
        with patch("outrider.engine.layers.linear.products", return_value=None):
            engines["kernels, a library's products"] = load(model_dir)
        step_ms = measure(engines, arguments.rounds)
    ratios = {name: round(own["8"] / own["1"], 2) for name, own in step_ms.items()}
    report(arguments, {"step_ms_by_num_tokens": step_ms, "eight_over_one": ratios})
