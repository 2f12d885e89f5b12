"""What one target step costs by the number of tokens it feeds: `python -m benchmarks.step_cost --help`.

One sequence with 150 tokens behind it, one core, no other process: the economics that speculation lives from. Sizes
are measured in turns, so that a change of the machine's mood meets all of them; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from benchmarks.target_model import add_target_arguments, target_model
from outrider.engine.model import Engine, EngineConfig, SequenceChunk, load_model
from outrider.worker_process import pin_to_cores

CONTEXT_LEN = 150  # tokens
NUM_TOKENS = (1, 2, 4, 6, 8)


def measure(engine: Engine, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step by the number of tokens fed."""
    kv = engine.new_sequence()
    kv.extend(CONTEXT_LEN)
    engine.forward([SequenceChunk(kv, [5] * CONTEXT_LEN, 1)])
    times: dict[int, list[float]] = {num_tokens: [] for num_tokens in NUM_TOKENS}
    for _ in range(rounds):
        for num_tokens, samples in times.items():
            kv.extend(num_tokens)
            started = time.perf_counter()
            engine.forward([SequenceChunk(kv, [7] * num_tokens, num_tokens)])
            samples.append((time.perf_counter() - started) * 1e3)
            kv.truncate(CONTEXT_LEN)
    return {str(num_tokens): round(statistics.median(samples), 2) for num_tokens, samples in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_target_arguments(parser)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    pin_to_cores("0")
    with target_model(arguments) as model_dir:
        step_ms = measure(load_model(EngineConfig(model_dir)), arguments.rounds)
    ratio = round(step_ms[str(NUM_TOKENS[-1])] / step_ms["1"], 2)
    print(json.dumps({"step_ms_by_num_tokens": step_ms, "eight_over_one": ratio}, indent=1))


if __name__ == "__main__":
    main()
