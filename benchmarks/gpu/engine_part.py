"""Figures of the target's engine, without workers: steps, prompts, and the bits of a sequence in several batches."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.gpu.models_part import models_of, prompts_of
from benchmarks.gpu.outcome import Outcome, Setting
from outrider.engine.loading.loading import load_model
from outrider.engine.loading.machine import usable_cores
from outrider.engine.loading.memory_plan import ServingShape, plan_memory
from outrider.engine.loading.self_test import batch_invariance_failures
from outrider.engine.options import Device, EngineOptions
from outrider.engine.profiling import measure_device, profile_steps
from outrider.engine.sequence_chunk import SequenceChunk

if TYPE_CHECKING:
    from outrider.engine.model import Engine

KINDS: Final = ((1, 1), (1, 4), (1, 8), (8, 1), (8, 5))
"""Steps that are timed, the draft's too: (sequences, rows of each)."""
CONTEXT_LEN: Final = 512
PROMPT_LEN: Final = 2000
PROMPT_CHUNK: Final = 512  # rows of a step, the workers' default
KV_GIB: Final = {"target": 6.0, "draft": 2.0}
TINY_KV_GIB: Final = 0.2


LONGEST: Final = 2600  # tokens of a sequence
CPU_LEAST_S: Final = 30.0  # to load a draft there and time it
CPU_KINDS: Final = ((1, 1), (1, 4), (1, 8))


def load(folder: Path, device: str, kv_cache_gib: float, num_threads: int = 1) -> Engine:
    """An engine for eight sequences."""
    return load_model(
        EngineOptions(
            model=folder,
            device=Device(device),
            max_num_seqs=8,
            max_model_len=LONGEST,
            kv_cache_gib=kv_cache_gib,
            num_threads=num_threads,
        )
    )


def kv_gib(setting: Setting, role: str) -> float:
    """Memory for the KV of a role."""
    return TINY_KV_GIB if setting.is_tiny else KV_GIB[role]


def num_cpu_threads(setting: Setting) -> int:
    """Threads of a draft on the CPU: all cores but two, which the target's process and the event loops have."""
    return 1 if setting.is_tiny else max(1, len(usable_cores()) - 2)


def timed_steps(
    engine: Engine, folder: Path, num_steps: int, kinds: Sequence[tuple[int, int]] = KINDS
) -> dict[str, dict[str, float]]:
    """Medians of every kind of step: milliseconds, their spread, and the share of what reading alone would take."""
    device = torch.device(engine.device).type
    needs = plan_memory(folder, ServingShape.of(engine.config, 1, device))
    speed = measure_device(engine.device, torch.bfloat16)
    found = {}
    for each in profile_steps(engine, speed, needs.weights_read, kinds, CONTEXT_LEN, num_steps):
        found[f"{each.num_sequences}x{each.num_rows}"] = {
            "ms": round(each.whole_ms, 3),
            "spread_ms": round(each.spread_ms, 3),
            "plan_ms": round(each.plan_ms, 3),
            "choice_ms": round(each.choice_ms, 3),
            "share_of_limit": round(each.share_of_limit, 3),
            "weights_gb_per_s": round(needs.weights_read / each.whole_ms / 1e6, 1),
        }
    return found


def prompt_ms(engine: Engine, token_ids: Sequence[int], chunk: int, num_tries: int = 3) -> float:
    """Median milliseconds from a prompt to the choice of its first token, `chunk` rows a step."""
    times = []
    for _ in range(num_tries):
        kv = engine.new_sequence()
        started = time.perf_counter()
        for start in range(0, len(token_ids), chunk):
            part = list(token_ids[start : start + chunk])
            kv.extend(len(part))
            logits = engine.forward([SequenceChunk(kv, part, 1)])
        int(logits[-1].argmax())
        times.append(1e3 * (time.perf_counter() - started))
        kv.free()
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Composition:
    """A way to run a sequence: how it is cut, and what else is in each of its steps."""

    name: str
    prefix: tuple[int, ...]  # rows of the steps before the rows that are compared
    tail: tuple[int, ...]  # rows of the steps that compute these
    others: tuple[int, ...] = ()  # rows of other sequences in every step
    is_last: bool = False  # behind the others, not before them


TAIL: Final = 5
OTHERS_LONGEST: Final = 1024  # entries of a sequence beside the compared one, which then begins anew
ALONE: Final = Composition("alone, row by row", (300,), (1,) * TAIL)
COMPOSITIONS: Final = (
    Composition("a block of 5 rows", (300,), (TAIL,)),
    Composition("a prefix in three steps", (100, 150, 50), (1,) * TAIL),
    Composition("the first of 8 sequences", (300,), (1,) * TAIL, (1,) * 7),
    Composition("the last of 8 sequences", (300,), (1,) * TAIL, (1,) * 7, is_last=True),
    Composition("8 sequences with 5 rows each", (300,), (TAIL,), (TAIL,) * 7, is_last=True),
    Composition("beside a prompt of 512 rows", (300,), (1,) * TAIL, (512,)),
    Composition("beside prompts of many sizes", (300,), (2, 3), (1, 7, 33, 64, 129), is_last=True),
)


def logits_in(engine: Engine, token_ids: Sequence[int], how: Composition) -> torch.Tensor:
    """The last rows' logits of a sequence that is run in this way.  # [TAIL, vocab_size]"""
    kv = engine.new_sequence()
    others = [engine.new_sequence() for _ in how.others]
    rows, done = [], 0
    try:
        for index, size in enumerate((*how.prefix, *how.tail)):
            chunks = []
            for other, num_rows in zip(others, how.others, strict=True):
                if other.length + num_rows > OTHERS_LONGEST:
                    other.truncate(0)
                other.extend(num_rows)
                beside = [(13 * i + index) % (engine.vocab_size - 1) + 1 for i in range(num_rows)]
                chunks.append(SequenceChunk(other, beside, 1))
            kv.extend(size)
            own = SequenceChunk(kv, list(token_ids[done : done + size]), size)
            logits = engine.forward([*chunks, own] if how.is_last else [own, *chunks])
            first = len(chunks) if how.is_last else 0
            rows.append(logits[first : first + size].clone())
            done += size
    finally:
        for sequence in (kv, *others):
            sequence.free()
    return torch.cat(rows)[-TAIL:]


def changed_compositions(engine: Engine, token_ids: Sequence[int]) -> list[str]:
    """Names of the compositions in which a sequence's logits have other bits than alone."""
    expected = logits_in(engine, token_ids, ALONE)
    return [each.name for each in COMPOSITIONS if not torch.equal(logits_in(engine, token_ids, each), expected)]


def run(setting: Setting, outcome: Outcome) -> None:
    """Writes the target's figures, then the draft's steps."""
    tokens = prompts_of(models_of(setting).language, 1, PROMPT_LEN)[0]
    num_steps = 10 if setting.is_tiny else 40
    began = time.perf_counter()
    engine = load(setting.target, setting.device, kv_gib(setting, "target"))
    outcome.put("target_loaded_in_s", round(time.perf_counter() - began, 1))
    outcome.put("numerics", engine.numerics)
    outcome.put("attends_over_the_block_table", engine.is_paged)
    steps = engine._device_steps
    outcome.put("graphs", 0 if steps is None else len(steps._graphs))
    _measure(setting, outcome, engine, tokens, num_steps)
    del engine, steps
    gc.collect()
    if not setting.is_tiny:
        torch.cuda.empty_cache()
    began = time.perf_counter()
    draft = load(setting.draft, setting.device, kv_gib(setting, "draft"))
    outcome.put("draft_loaded_in_s", round(time.perf_counter() - began, 1))
    outcome.put("draft_steps", timed_steps(draft, setting.draft, num_steps))
    del draft
    gc.collect()
    if setting.seconds_left < CPU_LEAST_S:
        outcome.skip("draft_steps_on_cpu", "no time")
        return
    on_cpu = load(setting.draft, "cpu", kv_gib(setting, "draft"), num_cpu_threads(setting))
    outcome.put("draft_steps_on_cpu", timed_steps(on_cpu, setting.draft, 8, CPU_KINDS))


def _measure(setting: Setting, outcome: Outcome, engine: Engine, tokens: Sequence[int], num_steps: int) -> None:
    steps: dict[str, dict[str, float]] = timed_steps(engine, setting.target, num_steps)
    outcome.put("target_steps", steps)
    one = steps["1x1"]
    outcome.put("share_of_measured_bandwidth", one["share_of_limit"])
    outcome.put("eight_over_one", round(steps["8x1"]["ms"] / one["ms"], 3))
    outcome.put("eight_by_five_over_one", round(steps["8x5"]["ms"] / one["ms"], 3))
    figures: dict[str, Callable[[], Any]] = {
        "changed_compositions": lambda: changed_compositions(engine, tokens[: sum(ALONE.prefix) + TAIL]),
        "self_test_failures": lambda: batch_invariance_failures(engine),
        "prompt_of_2000_ms": lambda: round(prompt_ms(engine, tokens, PROMPT_CHUNK), 1),
        "prompt_of_2000_in_one_step_ms": lambda: round(prompt_ms(engine, tokens, PROMPT_LEN), 1),
    }
    for name, measure in figures.items():
        if setting.seconds_left < 10.0:
            outcome.skip(name, "no time")
            continue
        try:
            outcome.put(name, measure())
        except (RuntimeError, ValueError) as error:
            outcome.skip(name, f"{type(error).__name__}: {error}")
