"""Ways of running a pair of workers, measured in turns under closed-loop load.

Every mode has workers of its own, so that what one has learned about its hints does not reach another; all are alive at
once and only the one whose turn it is has something to do. A round is one slice of each mode, in an order that turns
from round to round, and every slice of a round begins with the same prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.batch import RAMP_S, run_slice
from benchmarks.bound import acceptance_rate
from benchmarks.machine import machine
from benchmarks.round_cost import read
from benchmarks.target_model import DEMO, add_target_arguments
from benchmarks.worker_pair import Generation, WorkerPair, WorkerProcessHandle, worker_pair
from demo.corpus import held_out_prompts
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer
from protos.outrider.v1 import common_pb2

TARGET_CORE, DRAFT_CORE = "0", "1"
MAX_DRAFT_SESSIONS = "64"
"""More than streams: a session is attached a moment before the draft worker hears that the last one has ended."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How one pair is started. Without `draft_arguments` there is no draft worker: plain decoding."""

    name: str
    target_arguments: tuple[str, ...] = ()
    draft_arguments: tuple[str, ...] | None = ()
    round_trip_ms: float | None = None  # put between the workers by a proxy; None: no proxy


@dataclass
class RecordingPair(WorkerPair):
    """A pair that keeps what it generated, with the prompt, for whoever measures a slice."""

    draft_dials: str | None = None  # instead of the target's own address
    recorded: list[tuple[Sequence[int], Generation]] = field(default_factory=list)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, **options: Any
    ) -> Generation:
        result = options.setdefault("result", Generation())
        options.setdefault("target_address", self.draft_dials)
        self.recorded.append((token_ids, result))
        return await WorkerPair.generate(self, token_ids, sampling, **options)


@contextlib.asynccontextmanager
async def start_modes(
    modes: Iterable[Mode], target_dir: Path, draft_dir: Path
) -> AsyncIterator[dict[str, RecordingPair]]:
    """Pairs by the names of their modes: targets on one core, drafts and proxies on another."""
    async with contextlib.AsyncExitStack() as stack:
        pairs = {}
        for mode in modes:
            draft_arguments = mode.draft_arguments or ()
            pair = await stack.enter_async_context(
                worker_pair(
                    target_dir,
                    None if mode.draft_arguments is None else draft_dir,
                    target_arguments=["--cpu-affinity", TARGET_CORE, *mode.target_arguments],
                    draft_arguments=[
                        *("--cpu-affinity", DRAFT_CORE, "--max-num-seqs", MAX_DRAFT_SESSIONS),
                        *draft_arguments,
                    ],
                )
            )
            dialled = None
            if mode.round_trip_ms is not None:
                proxy = await WorkerProcessHandle.start(
                    "benchmarks.delaying_proxy",
                    *("--target-address", pair.target.address, "--cpu-affinity", DRAFT_CORE),
                    *("--round-trip-ms", str(mode.round_trip_ms)),
                )
                stack.push_async_callback(proxy.stop)
                dialled = proxy.address
            pairs[mode.name] = RecordingPair(
                pair.target, pair.draft, pair.target_stub, pair.draft_stub, dialled
            )
        yield pairs


@dataclass(frozen=True, slots=True)
class Window:
    """What arrived within one slice, its beginning left out. Counts are over all sessions."""

    tokens_per_s: float
    num_steps: int  # that a session took part in, those that read its prompt left out
    num_tokens: int  # that these gave
    num_accepted: int  # hints among them
    num_rejected: int  # hints that ended a block
    intervals_ms: list[float]  # from one step of a session to its next
    tpot_ms: list[float]  # of requests that ended within it


def window(generations: Iterable[Generation], begin: float, end: float) -> Window:
    """`begin` and `end` on the clock of `Generation.arrivals`, seconds."""
    num_steps = num_tokens = num_all = num_accepted = num_rejected = 0
    intervals_ms: list[float] = []
    tpot_ms: list[float] = []
    for each in generations:
        position = 0
        before: float | None = None
        for at, count in each.arrivals:
            origins = each.origins[position : position + count]
            position += count
            if begin <= at < end:
                num_all += count
                if before is not None:
                    num_steps += 1
                    num_tokens += count
                    num_accepted += origins.count(common_pb2.TOKEN_ORIGIN_ACCEPTED)
                    num_rejected += origins.count(common_pb2.TOKEN_ORIGIN_RECOVERED)
                    intervals_ms.append((at - before) * 1e3)
            before = at
        if begin <= each.ended_at < end and len(each.token_ids) > 1:
            tpot_ms.append(1e3 / each.decode_tokens_per_s)
    tokens_per_s = num_all / (end - begin)
    return Window(tokens_per_s, num_steps, num_tokens, num_accepted, num_rejected, intervals_ms, tpot_ms)


@dataclass(frozen=True, slots=True)
class ModeSlice:
    """One slice of one mode."""

    window: Window
    counters: dict[str, float]  # of the target worker, over the slice and its beginning
    recorded: list[tuple[Sequence[int], Generation]]
    begin: float  # of the window, seconds
    end: float


async def measure_slice(
    pair: RecordingPair,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    *,
    num_streams: int,
    seconds: float,
    first: int,
) -> ModeSlice:
    """Closed loop for `seconds`, beginning with the prompt of number `first`."""
    pair.recorded = []
    before = read(pair.target)
    asked = itertools.islice(itertools.cycle(prompts), first % len(prompts), None)
    begin = time.perf_counter() + RAMP_S
    await run_slice(
        pair,
        asked,
        sampling,
        num_streams=num_streams,
        seconds=seconds,
        use_draft=pair.draft_stub is not None,
    )
    end = begin + seconds
    counters = read(pair.target).since(before).metrics
    generations = [each for _, each in pair.recorded]
    return ModeSlice(window(generations, begin, end), counters, pair.recorded, begin, end)


async def measure_in_turns(
    pairs: Mapping[str, RecordingPair],
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    *,
    num_streams: int,
    seconds: float,
    rounds: int,
    warmup: int,
) -> dict[str, list[ModeSlice]]:
    """Slices of every mode, round after round; `warmup` rounds before them are not counted."""
    slices: dict[str, list[ModeSlice]] = {name: [] for name in pairs}
    names = list(pairs)
    for index in range(warmup + rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            measured = await measure_slice(
                pairs[name],
                prompts,
                sampling,
                num_streams=num_streams,
                seconds=seconds,
                first=index * num_streams,
            )
            if index >= warmup:
                slices[name].append(measured)
    return slices


async def measure_batches(
    arguments: argparse.Namespace,
    pairs: Mapping[str, RecordingPair],
    prompts: Sequence[list[int]],
    summarize: Callable[[dict[str, list[ModeSlice]]], dict[str, Any]],
) -> dict[str, Any]:
    """What every benchmark of modes says: the machine, the load, and its own summary of each batch size."""
    by_batch = {}
    for num_streams in arguments.batch:
        slices = await measure_in_turns(
            pairs,
            prompts,
            greedy(arguments),
            num_streams=num_streams,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            warmup=arguments.warmup,
        )
        by_batch[str(num_streams)] = summarize(slices)
    return {"machine": machine(), "load": load_of(arguments), "batch": by_batch}


def greedy(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)


def prompts_of(arguments: argparse.Namespace, target_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer(target_dir)
    return [tokenizer.encode(text) for text in held_out_prompts(arguments.prompts, seed=1)]


@dataclass(frozen=True, slots=True)
class Totals:
    """All slices of a mode together."""

    tokens_per_step: float  # of a session, beyond its prompt
    acceptance: float  # of a hint, given that those before it held
    hints_per_step: float  # fed, of a session
    sessions_per_step: float
    step_ms: float  # of the target: forward pass and verification, of a batch
    interval_ms: float  # from one step to the next, waits and all work between them included
    hint_bytes_per_token: float


def total(slices: Sequence[ModeSlice]) -> Totals:
    counters: dict[str, float] = {}
    for each in slices:
        for name, value in each.counters.items():
            counters[name] = counters.get(name, 0.0) + value
    windows = [each.window for each in slices]
    num_steps = counters["step_milliseconds_count"]
    num_parts = counters["step_sessions_sum"]
    intervals = [ms for each in windows for ms in each.intervals_ms]
    return Totals(
        sum(each.num_tokens for each in windows) / max(sum(each.num_steps for each in windows), 1),
        acceptance_rate(
            sum(each.num_accepted for each in windows), sum(each.num_rejected for each in windows)
        ),
        counters["spec_decode_num_draft_tokens_total"] / num_parts,
        num_parts / num_steps,
        counters["step_milliseconds_sum"] / num_steps,
        statistics.fmean(intervals) if intervals else 0.0,
        counters["hint_bytes_total"] / max(counters["generation_tokens_total"], 1.0),
    )


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles; a single value is all three."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return statistics.median(values), quartiles[0], quartiles[2]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def speed_figures(slices: Sequence[ModeSlice], plain: Sequence[ModeSlice] | None) -> dict[str, Any]:
    """Tokens per second and time per token, and the ratios to plain decoding round by round."""
    speeds = [each.window.tokens_per_s for each in slices]
    tokens_per_s, *quartiles = middle(speeds)
    figures: dict[str, Any] = {
        "tokens_per_s": round(tokens_per_s, 1),
        "tokens_per_s_quartiles": [round(each, 1) for each in quartiles],
    }
    if plain is not None:
        ratios = [own / other.window.tokens_per_s for own, other in zip(speeds, plain, strict=True)]
        speedup, *quartiles = middle(ratios)
        figures["speedup"] = round(speedup, 3)
        figures["speedup_quartiles"] = [round(each, 3) for each in quartiles]
    return figures | tpot_figures([ms for each in slices for ms in each.window.tpot_ms])


def tpot_figures(tpot_ms: Sequence[float]) -> dict[str, float]:
    """Time per output token over whole requests; nothing where none ended within a slice."""
    if not tpot_ms:
        return {}
    return {
        "tpot_ms_p50": round(statistics.median(tpot_ms), 2),
        "tpot_ms_p99": round(percentile(tpot_ms, 0.99), 2),
    }


def step_figures(totals: Totals) -> dict[str, float]:
    return {
        "tokens_per_step": round(totals.tokens_per_step, 3),
        "acceptance": round(totals.acceptance, 3),
        "hints_per_step": round(totals.hints_per_step, 2),
        "step_ms": round(totals.step_ms, 3),
        "interval_ms": round(totals.interval_ms, 3),
        "hint_bytes_per_token": round(totals.hint_bytes_per_token, 1),
    }


def add_load_arguments(
    parser: argparse.ArgumentParser, *, batch: Sequence[int], seconds: float, rounds: int
) -> None:
    """Flags that every benchmark of modes has."""
    add_target_arguments(parser)
    parser.add_argument("--draft", type=Path, default=DEMO / "draft")
    default = " ".join(map(str, batch))
    parser.add_argument(
        "--batch", type=int, nargs="+", default=list(batch), help=f"streams (default {default})"
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="of a slice, after its beginning (default %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="slices of each mode (default %(default)s)"
    )
    parser.add_argument("--warmup", type=int, default=1, help="rounds not counted (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=150, help="per request (default %(default)s)")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE.svg", help="draw the result")


def load_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What to write down of those flags."""
    return {
        "target": arguments.target.name + (", grown" if arguments.grown else ""),
        "draft": arguments.draft.name,
        "seconds": arguments.seconds,
        "rounds": arguments.rounds,
        "warmup": arguments.warmup,
        "tokens": arguments.tokens,
    }


def report(
    arguments: argparse.Namespace,
    result: Mapping[str, Any],
    draw: Callable[[Mapping[str, Any], Path], None],
) -> None:
    """The result to standard output and, where it is asked for, the plot."""
    print(json.dumps(result, indent=1))
    if arguments.plot is not None:
        draw(result, arguments.plot)
