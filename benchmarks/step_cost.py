"""What one step costs by the number of tokens it feeds: `python -m benchmarks.step_cost --help`.

One sequence with 150 tokens behind it, one core, no other process: the economics that speculation lives from. Sizes,
and three engines (the compiled kernels, the same with the products of oneDNN or torch, transformers' own modules), are
measured in turns, so that a change of the machine's mood meets all of them; medians are printed. `--target DIR` takes
any model, a draft too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from unittest.mock import patch

from benchmarks.target_model import add_target_arguments, target_model
from outrider.engine.loading import load_model
from outrider.engine.model import Engine, EngineConfig, SequenceChunk
from outrider.worker_process import pin_to_cores

CONTEXT_LEN = 150  # tokens
NUM_TOKENS = (1, 2, 4, 6, 8, 32, 128, 512)


def measure(
    engines: dict[str, Engine], rounds: int, sizes: Sequence[int] = NUM_TOKENS
) -> dict[str, dict[str, float]]:
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_target_arguments(parser)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    pin_to_cores("0")
    with target_model(arguments) as model_dir:
        engines = {
            "kernels": load_model(EngineConfig(model_dir)),
            "eager": load_model(EngineConfig(model_dir, use_kernels=False)),
        }
        with patch("outrider.engine.linear.products", return_value=None):
            engines["kernels, a library's products"] = load_model(EngineConfig(model_dir))
        step_ms = measure(engines, arguments.rounds)
    ratios = {name: round(own["8"] / own["1"], 2) for name, own in step_ms.items()}
    print(json.dumps({"step_ms_by_num_tokens": step_ms, "eight_over_one": ratios}, indent=1))


if __name__ == "__main__":
    main()
