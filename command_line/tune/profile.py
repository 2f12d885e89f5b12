"""Measures a model on this machine: step time by number of tokens.

Steps run as in the workers, through `outrider.engine`, with the tensor work that follows each. Sizes are measured in
rotation, so that a change of the machine's load affects all of them. An untimed step of the same size comes before
each timed one and leaves the caches as serving would. Medians are kept. The KV cache contains random numbers: a
step's time does not depend on them, and no prompt has to be fed. One model is in memory at a time.

torch is imported only for measuring, so that `--help` is fast.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from command_line.tune.findings import ModelProfile, Settings
from command_line.tune.times import StepTimes

if TYPE_CHECKING:
    import torch

    from outrider.engine.heads.head_engine import HeadEngine
    from outrider.engine.kv.kv_cache import KVSequence
    from outrider.engine.model import Engine

MS_PER_S: Final = 1e3
TARGET_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DRAFT_SIZES: Final = (1, 4, 8)
NUM_SEQUENCES: Final = 8  # over which the same tokens are spread, to measure the cost of a sequence
NUM_ROUNDS: Final = 25
NUM_STEPS_LEAST: Final = 8  # per size, that must fit into the budget, untimed ones included
NUM_CANDIDATES: Final = 5  # the draft worker's top-k


@contextmanager
def loaded(
    model_dir: Path, settings: Settings, *, is_target: bool, longest: int, num_layers: int | None = None
) -> Iterator[Engine]:
    """An engine with KV for `NUM_SEQUENCES` sequences of `longest` tokens, at most the model's own limit.

    num_layers: that run, None for all. Restores torch's number of threads afterwards. Raises ModelLoadError.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    from outrider.engine.loading.loading import load_model
    from outrider.engine.options import Device, Dtype, EngineOptions, Quantization

    num_threads, verbosity = torch.get_num_threads(), transformers_logging.get_verbosity()
    config = EngineOptions(
        model=model_dir,
        device=Device(settings.device),
        dtype=Dtype(settings.dtype),
        quantization=Quantization(settings.quantization if is_target else "none"),
        num_threads=settings.num_threads if is_target else 1,
        max_num_seqs=NUM_SEQUENCES,
        max_model_len=min(longest, longest_sequence(model_dir)),
        early_exit_layer=num_layers,
    )
    if num_layers is not None:
        transformers_logging.set_verbosity_error()  # it would list the layers that are left out
    try:
        yield load_model(config)
    finally:
        torch.set_num_threads(num_threads)
        transformers_logging.set_verbosity(verbosity)


def longest_sequence(model_dir: Path) -> int:
    """The model's own limit, in tokens. Raises ModelLoadError if its configuration cannot be read."""
    from transformers import AutoConfig

    from outrider.engine.model import ModelLoadError

    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot read {model_dir / 'config.json'}: {error}") from error
    return getattr(config, "max_position_embeddings", None) or 1 << 20


def step_times(
    engine: Engine | HeadEngine, sizes: Sequence[int], settings: Settings, *, is_target: bool
) -> ModelProfile:
    """Median step times by tokens of one sequence, and the extra time of spreading them over several.

    Rows of a head read features of the target, random ones, so that they all run at once.

    The smallest size is always measured. Larger ones are left out if a round of them would exceed the budget.
    """
    for cache in (tensor for layer in engine.caches for tensor in layer):
        cache.uniform_(-1.0, 1.0)
    context_len = max(1, min(settings.context_len, engine.max_model_len // 2))
    deadline = time.perf_counter() + settings.budget_s
    num_sequences_max = num_affordable(engine, engine.max_model_len)
    fitting = [size for size in sizes if context_len + size <= engine.max_model_len]
    shapes = [(size, 1) for size in fitting] + [(1, num_sequences_max)] * (num_sequences_max > 1)
    samples: dict[tuple[int, int], list[float]] = {}
    with _timer(engine, num_sequences_max, context_len, _argmax if is_target else _candidates) as timed:
        # Largest last: the steps so far show whether some rounds of all sizes still fit.
        for shape in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape)):
            round_s = sum(times[-1] for times in samples.values()) / MS_PER_S
            if samples and NUM_STEPS_LEAST * round_s > settings.budget_s:
                break
            timed(*shape)  # also allocates
            samples[shape] = [timed(*shape)]
        for _ in range(NUM_ROUNDS):
            for shape, times in samples.items():
                timed(*shape)
                times.append(timed(*shape))
            if time.perf_counter() > deadline:
                break
    medians = {shape: statistics.median(times) for shape, times in samples.items()}
    together = StepTimes.measured([(size, ms) for (size, count), ms in medians.items() if count == 1])
    sequence_ms = 0.0
    if num_sequences_max > 1 and (1, num_sequences_max) in medians:
        more_ms = medians[1, num_sequences_max] - together.at(num_sequences_max)
        sequence_ms = max(more_ms, 0.0) / (num_sequences_max - 1)
    smallest = fitting[0], 1
    first, _, last = statistics.quantiles(samples[smallest], n=4)
    spread = (last - first) / 2 / medians[smallest]
    return ModelProfile(replace(together, sequence_ms=sequence_ms), engine.num_parameters, spread, context_len)


@contextmanager
def _timer(
    engine: Engine | HeadEngine, num_sequences_max: int, context_len: int, after: Callable[[torch.Tensor], None]
) -> Iterator[Callable[[int, int], float]]:
    """A function that runs a step, for (tokens, sequences), with `after` on its logits, and returns its
    milliseconds."""
    from outrider.engine.model import SequenceChunk

    give_features = _features_for(engine)
    sequences = [engine.new_sequence() for _ in range(num_sequences_max)]
    for kv in sequences:
        kv.extend(context_len)

    def timed(num_tokens: int, num_sequences: int) -> float:
        chunks = []
        for kv in sequences[:num_sequences]:
            kv.extend(num_tokens)
            give_features(kv, num_tokens)
            chunks.append(SequenceChunk(kv, [7] * num_tokens, num_tokens))
        started = time.perf_counter()
        after(engine.forward(chunks))
        ended = time.perf_counter()
        for kv in sequences[:num_sequences]:
            kv.truncate(context_len)
        return (ended - started) * MS_PER_S

    try:
        yield timed
    finally:
        for kv in sequences:
            kv.free()


def _features_for(engine: Engine | HeadEngine) -> Callable[[KVSequence, int], None]:
    """Gives a head features of the last entries of a sequence; a model needs none."""
    import torch

    from outrider.engine.heads.head_engine import HeadEngine

    if not isinstance(engine, HeadEngine):
        return lambda *_: None
    head = engine

    def give(kv: KVSequence, num_entries: int) -> None:
        start = max(kv.length - num_entries - 1, 0)
        head.set_features(kv.slots(start, kv.length), torch.rand(kv.length - start, head.feature_size))

    return give


def num_affordable(engine: Engine | HeadEngine, length: int) -> int:
    """Sequences of this length that the KV cache can contain, from 1 to `NUM_SEQUENCES`."""
    num_blocks = engine.allocator.num_blocks - 1
    return max(1, min(NUM_SEQUENCES, num_blocks // engine.allocator.blocks_for(length)))


def _argmax(logits: torch.Tensor) -> None:
    """Token choice of a greedy target step, from its logits.  # [num_tokens, vocab_size]"""
    logits.argmax(dim=-1).tolist()


def _candidates(logits: torch.Tensor) -> None:
    """Candidates of a greedy draft step, from its logits.  # [num_nodes, vocab_size]"""
    import torch

    values, indices = torch.topk(torch.softmax(logits, dim=-1), min(NUM_CANDIDATES, logits.shape[-1]), dim=-1)
    logits.argmax(dim=-1).tolist(), indices.tolist(), values.tolist()
