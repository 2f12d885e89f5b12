"""Measures where a step's time goes and what the device would permit (the roofline model, Williams et al. 2009).

A step reads all weights and the KV of all its sequences once, and multiplies every row by every weight. So it takes at
least the device's time to read them, and at least its time to compute; both speeds are measured on the device itself,
by reading alone and by multiplying alone. Few rows are bound by reading, which is why several tokens can be verified
for about the price of one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from outrider.engine import device_steps, model
from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.layers import decoder
from outrider.engine.model import Engine, SequenceChunk
from outrider.engine.ranks.rank_group import RankGroup
from outrider.engine.sampling.sampling import greedy_choices

READ_BYTES: Final = {"cpu": 1 << 28, "cuda": 1 << 31}
PRODUCT_WIDTH: Final = {"cpu": 1024, "cuda": 8192}
NUM_TRIES: Final = 7


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """The device's speed when it only reads, and when it only multiplies."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians of one kind of step, milliseconds."""

    num_sequences: int
    num_rows: int  # of each sequence
    whole_ms: float
    spread_ms: float  # between the fastest and the slowest quarter
    plan_ms: float  # laying the step out and passing it on, in the interpreter
    ranks_ms: float  # sums and gathering over the ranks
    choice_ms: float  # the most likely token of every row
    read_ms: float  # the least that reading takes
    compute_ms: float  # the least that arithmetic takes

    @property
    def model_ms(self) -> float:
        """Time of all layers and the output layer."""
        return max(self.whole_ms - self.plan_ms - self.ranks_ms - self.choice_ms, 0.0)

    @property
    def is_bound_by_reading(self) -> bool:
        """Whether reading weights and KV takes longer than the arithmetic."""
        return self.read_ms >= self.compute_ms

    @property
    def share_of_limit(self) -> float:
        """The least time that the device permits as a share of the step's time, 0 to 1."""
        return max(self.read_ms, self.compute_ms) / self.whole_ms


@dataclass(slots=True)
class _Clock:
    """Time spent inside wrapped calls, seconds."""

    total_s: float = 0.0
    synchronize: Callable[[], None] = field(default=lambda: None)

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            self.synchronize()
            started = time.perf_counter()
            result = call(*arguments, **options)
            self.synchronize()
            self.total_s += time.perf_counter() - started
            return result

        return timed


def measure_device(device: str, dtype: torch.dtype) -> DeviceSpeed:
    """Measures reading of uncached data and multiplication of cached data, with torch's current threads."""
    kind = torch.device(device).type
    synchronize = _synchronizer(device)
    numbers = torch.ones(READ_BYTES[kind] // 4, device=device)
    width = PRODUCT_WIDTH[kind]
    left = torch.randn(width, width, device=device).to(dtype)
    right = torch.randn(width, width, device=device).to(dtype)
    read_s = _best_s(lambda: numbers.sum(), synchronize)
    multiply_s = _best_s(lambda: left @ right, synchronize)
    return DeviceSpeed(4 * numbers.numel() / read_s, 2 * width**3 / multiply_s)


def _best_s(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    times = []
    for _ in range(NUM_TRIES):
        synchronize()
        started = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def _synchronizer(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def profile_steps(
    engine: Engine,
    speed: DeviceSpeed,
    weight_bytes: int,
    kinds: Sequence[tuple[int, int]],
    context_len: int,
    num_steps: int,
) -> Iterator[StepTimes]:
    """Times of decoding steps for each (number of sequences, rows of each), with `context_len` tokens before them.

    weight_bytes: read by a step on this rank.
    """
    sequences: list[KVSequence] = []
    synchronize = _synchronizer(engine.device)
    num_weights = weight_bytes / torch.finfo(engine.caches[0][0].dtype).bits * 8
    try:
        for num_sequences, num_rows in sorted(kinds):
            while len(sequences) < num_sequences:
                sequences.append(_filled(engine, context_len))
            own = sequences[:num_sequences]
            whole, plan, ranks, choice = [], [], [], []
            with _timing(synchronize) as (plan_clock, ranks_clock):
                for step in range(num_steps + 2):
                    plan_clock.total_s = ranks_clock.total_s = 0.0
                    for kv in own:
                        kv.extend(num_rows)
                    started = time.perf_counter()
                    logits = engine.forward([SequenceChunk(kv, [7] * num_rows, num_rows) for kv in own])
                    synchronize()
                    decided = time.perf_counter()
                    greedy_choices(logits)
                    ended = time.perf_counter()
                    for kv in own:
                        kv.truncate(context_len)
                    if step >= 2:  # the first ones run with cold caches
                        whole.append((ended - started) * 1e3)
                        plan.append(plan_clock.total_s * 1e3)
                        ranks.append(ranks_clock.total_s * 1e3)
                        choice.append((ended - decided) * 1e3)
            kv_bytes = num_sequences * context_len * engine.kv_bytes_per_token
            quarters = statistics.quantiles(whole, n=4)
            yield StepTimes(
                num_sequences,
                num_rows,
                statistics.median(whole),
                quarters[2] - quarters[0],
                statistics.median(plan),
                statistics.median(ranks),
                statistics.median(choice),
                (weight_bytes + kv_bytes) / speed.bytes_per_s * 1e3,
                2 * num_weights * num_sequences * num_rows / speed.flops_per_s * 1e3,
            )
    finally:
        for kv in sequences:
            kv.free()


def _filled(engine: Engine, context_len: int) -> KVSequence:
    kv = engine.new_sequence()
    while kv.length < context_len:
        num_tokens = min(256, context_len - kv.length)
        kv.extend(num_tokens)
        engine.forward([SequenceChunk(kv, [5] * num_tokens, 0)])
    return kv


@contextmanager
def _timing(synchronize: Callable[[], None]) -> Iterator[tuple[_Clock, _Clock]]:
    """Clocks for laying steps out and for communication between ranks."""
    plan, ranks = _Clock(), _Clock(synchronize=synchronize)
    with ExitStack() as stack:
        for owner, name, clock in (
            (decoder, "RaggedStep", plan),
            (model, "plan_step", plan),
            (device_steps, "plan_paged", plan),
            (RankGroup, "sum", ranks),
            (RankGroup, "gather", ranks),
            (RankGroup, "send", ranks),
        ):
            stack.enter_context(_timed(owner, name, clock))
        yield plan, ranks


@contextmanager
def _timed(owner: object, name: str, clock: _Clock) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, clock.wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
