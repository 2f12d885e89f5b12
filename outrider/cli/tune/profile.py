"""Measures a model on this machine: what a step costs by the number of tokens fed.

Steps are run as the workers run them, through `outrider.engine`, with the tensor work that follows each. Sizes are
measured in turns, so that a change of the machine's mood meets all of them, each after an untimed step of its own size,
which leaves the caches as serving would; medians are kept. The KV cache holds
random numbers: a step's time does not depend on them, and no prompt has to be fed. One model is in memory at a time.

torch is imported when something is measured, so that `--help` does not wait for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outrider.cli.tune.findings import ModelProfile, Settings
from outrider.cli.tune.times import StepTimes

if TYPE_CHECKING:
    import torch

    from outrider.engine.model import Engine

MS_PER_S: Final = 1e3
TARGET_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DRAFT_SIZES: Final = (1, 4, 8)
NUM_SEQUENCES: Final = 8  # among which the same tokens are spread to see what a sequence costs
NUM_ROUNDS: Final = 25
NUM_STEPS_LEAST: Final = 8  # of each size that must fit into the budget, untimed ones among them
NUM_CANDIDATES: Final = 5  # of the draft worker's top-k


@contextmanager
def loaded(model_dir: Path, settings: Settings, *, is_target: bool, longest: int) -> Iterator[Engine]:
    """An engine with room for `NUM_SEQUENCES` sequences of `longest` tokens, shortened to the model's own limit.

    Threads of torch are as before afterwards. Raises ModelLoadError.
    """
    import torch

    from outrider.engine.loading import load_model
    from outrider.engine.model import EngineConfig

    num_threads = torch.get_num_threads()
    config = EngineConfig(
        model_dir,
        dtype=settings.dtype,
        quantization=settings.quantization if is_target else "none",
        num_threads=settings.num_threads if is_target else 1,
        max_num_seqs=NUM_SEQUENCES,
        max_model_len=min(longest, longest_sequence(model_dir)),
    )
    try:
        yield load_model(config)
    finally:
        torch.set_num_threads(num_threads)


def longest_sequence(model_dir: Path) -> int:
    """The model's own limit, tokens. Raises ModelLoadError when its configuration cannot be read."""
    from transformers import AutoConfig

    from outrider.engine.model import ModelLoadError

    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot read {model_dir / 'config.json'}: {error}") from error
    return getattr(config, "max_position_embeddings", None) or 1 << 20


def step_times(engine: Engine, sizes: Sequence[int], settings: Settings, *, is_target: bool) -> ModelProfile:
    """Medians by tokens fed to one sequence, and what spreading them over several adds; within the budget.

    The smallest size is measured whatever it takes; larger ones are left out once a round of them would not fit.
    """
    for cache in (tensor for layer in engine.caches for tensor in layer):
        cache.uniform_(-1.0, 1.0)
    context_len = max(1, min(settings.context_len, engine.max_model_len // 2))
    deadline = time.perf_counter() + settings.budget_s
    num_sequences_max = num_affordable(engine, engine.max_model_len)
    sequences = [engine.new_sequence() for _ in range(num_sequences_max)]
    for kv in sequences:
        kv.extend(context_len)
    after = _argmax if is_target else _candidates

    def timed(num_tokens: int, num_sequences: int = 1) -> float:
        """Milliseconds of one step."""
        from outrider.engine.model import SequenceChunk

        chunks = []
        for kv in sequences[:num_sequences]:
            kv.extend(num_tokens)
            chunks.append(SequenceChunk(kv, [7] * num_tokens, num_tokens))
        started = time.perf_counter()
        after(engine.forward(chunks))
        ended = time.perf_counter()
        for kv in sequences[:num_sequences]:
            kv.truncate(context_len)
        return (ended - started) * MS_PER_S

    try:
        samples: dict[tuple[int, int], list[float]] = {}
        fitting = [size for size in sizes if context_len + size <= engine.max_model_len]
        shapes = [(size, 1) for size in fitting] + [(1, num_sequences_max)] * (num_sequences_max > 1)
        # Largest last: the steps so far say whether some rounds of all of them still fit.
        for shape in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape)):
            if (
                samples
                and NUM_STEPS_LEAST * sum(times[-1] for times in samples.values()) / MS_PER_S
                > settings.budget_s
            ):
                break
            timed(*shape)  # allocates, too
            samples[shape] = [timed(*shape)]
        for _ in range(NUM_ROUNDS):
            for shape, times in samples.items():
                timed(*shape)
                times.append(timed(*shape))
            if time.perf_counter() > deadline:
                break
    finally:
        for kv in sequences:
            kv.free()
    medians = {shape: statistics.median(times) for shape, times in samples.items()}
    together = StepTimes.measured([(size, ms) for (size, count), ms in medians.items() if count == 1])
    sequence_ms = 0.0
    if (1, num_sequences_max) in medians and num_sequences_max > 1:
        sequence_ms = medians[1, num_sequences_max] - together.at(num_sequences_max)
        sequence_ms = max(sequence_ms, 0.0) / (num_sequences_max - 1)
    smallest = fitting[0], 1
    first, _, last = statistics.quantiles(samples[smallest], n=4)
    return ModelProfile(
        replace(together, sequence_ms=sequence_ms),
        engine.num_parameters,
        (last - first) / 2 / medians[smallest],
        context_len,
    )


def num_affordable(engine: Engine, length: int) -> int:
    """Sequences of so many tokens that the KV cache holds at once, at most `NUM_SEQUENCES`, 1 at the least."""
    num_blocks = engine.allocator.num_blocks - 1
    return max(1, min(NUM_SEQUENCES, num_blocks // engine.allocator.blocks_for(length)))


def _argmax(logits: torch.Tensor) -> None:
    """What a greedy target step does with its logits.  # [num_tokens, vocab_size]"""
    logits.argmax(dim=-1).tolist()


def _candidates(logits: torch.Tensor) -> None:
    """What a greedy draft step does with its logits.  # [num_nodes, vocab_size]"""
    import torch

    values, indices = torch.topk(torch.softmax(logits, dim=-1), min(NUM_CANDIDATES, logits.shape[-1]), dim=-1)
    logits.argmax(dim=-1).tolist(), indices.tolist(), values.tolist()
