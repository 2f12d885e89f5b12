"""Runs a pair of workers in several modes, measured alternately under closed-loop load.

Every mode has its own workers, so that learned costs do not mix. All of them are up, and only one has load at a time.
A round is one slice of each mode, in an order that rotates, and every slice of a round begins with the same prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.shared.figures import percentile, with_quartiles
from benchmarks.shared.machine import machine
from benchmarks.shared.options import parser_of
from benchmarks.shared.worker_pair import Generation, TwoCores, WorkerPair, WorkerProcessHandle, worker_pair
from benchmarks.speculation import bound
from benchmarks.speculation.closed_loop import run_slice
from benchmarks.speculation.round_cost import read
from demo.corpus import held_out_prompts
from outrider.sampling_params import SamplingParams
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import common_pb2
from target_worker.limits import SchedulerLimits

APART = TwoCores(is_shared=False)
DRAFT_CORE = "1"
MAX_HINTS = SchedulerLimits().num_speculative_tokens
"""Most hints per session and step."""
MAX_DRAFT_SESSIONS = "64"
"""More than the streams: a session is attached a moment before the draft worker hears that the last one has ended."""


@dataclass(frozen=True, slots=True)
class Mode:
    """Arguments of one pair of workers. Without `draft_arguments` there is no draft worker: plain decoding, or with
    `has_local_hints` the target's own hints."""

    name: str
    target_arguments: tuple[str, ...] = ()
    draft_arguments: tuple[str, ...] | None = ()
    round_trip_ms: float | None = None  # delay of a proxy between the workers; None: no proxy
    draft: Path | None = None  # model folder; None: the one of all modes
    has_local_hints: bool = False
    cores: TwoCores = APART


@contextlib.asynccontextmanager
async def start_modes(modes: Iterable[Mode], target_dir: Path, draft_dir: Path) -> AsyncIterator[dict[str, WorkerPair]]:
    """Starts pairs by the names of their modes: targets on the cores of their mode, proxies on the draft's."""
    async with contextlib.AsyncExitStack() as stack:
        pairs = {}
        for mode in modes:
            draft_arguments = mode.draft_arguments or ()
            pair = await stack.enter_async_context(
                worker_pair(
                    target_dir,
                    None if mode.draft_arguments is None else mode.draft or draft_dir,
                    target_arguments=mode.target_arguments,
                    draft_arguments=["--max-num-seqs", MAX_DRAFT_SESSIONS, *draft_arguments],
                    cores=mode.cores,
                )
            )
            dialled = None
            if mode.round_trip_ms is not None:
                proxy = await WorkerProcessHandle.start(
                    "benchmarks.shared.delaying_proxy",
                    *("--target-address", pair.target.address, "--cpu-affinity", DRAFT_CORE),
                    *("--round-trip-ms", str(mode.round_trip_ms)),
                )
                stack.push_async_callback(proxy.stop)
                dialled = proxy.address
            pairs[mode.name] = replace(pair, draft_dials=dialled, has_local_hints=mode.has_local_hints)
        yield pairs


@dataclass(frozen=True, slots=True)
class Window:
    """Arrivals within one slice, without its beginning. Counts are over all sessions."""

    tokens_per_s: float
    num_steps: int  # steps of a session, except those that read its prompt
    num_tokens: int  # tokens of these steps
    num_accepted: int  # hints among them
    num_rejected: int  # hints that were rejected and ended a block
    intervals_ms: list[float]  # from one step of a session to its next
    tpot_ms: list[float]  # acceptance of requests that ended within it


def window(generations: Iterable[Generation], begin: float, end: float) -> Window:
    """Measures a window; `begin` and `end` are on the clock of `Generation.arrivals`, in seconds."""
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
    counters: dict[str, float]  # of the target worker, including the slice's beginning
    recorded: Sequence[tuple[Sequence[int], Generation]]
    begin: float  # of the window, seconds
    end: float


async def measure_batches(
    arguments: argparse.Namespace,
    pairs: Mapping[str, WorkerPair],
    prompts: Sequence[list[int]],
    summarize: Callable[[dict[str, list[ModeSlice]]], dict[str, Any]],
) -> dict[str, Any]:
    """Common part of all benchmarks of modes: the machine, the load, and a summary for each batch size.

    Slices of every mode follow each other, round after round; the `warmup` rounds before them are not counted.
    """
    by_batch = {}
    names = list(pairs)
    for num_streams in arguments.batch:
        slices: dict[str, list[ModeSlice]] = {name: [] for name in pairs}
        for index in range(arguments.warmup + arguments.rounds):
            first, turn = index * num_streams % len(prompts), index % len(names)
            for name in names[turn:] + names[:turn]:
                asked = itertools.islice(itertools.cycle(prompts), first, None)
                measured = await _measure_slice(pairs[name], asked, arguments, num_streams)
                if index >= arguments.warmup:
                    slices[name].append(measured)
        by_batch[str(num_streams)] = summarize(slices)
    return {"machine": machine(), "load": load_of(arguments), "batch": by_batch}


async def _measure_slice(
    pair: WorkerPair, prompts: Iterator[list[int]], arguments: argparse.Namespace, num_streams: int
) -> ModeSlice:
    before = read(pair.target)
    ran = await run_slice(
        pair,
        prompts,
        greedy(arguments),
        num_streams=num_streams,
        seconds=arguments.seconds,
        use_draft=pair.draft_stub is not None,
    )
    counters = read(pair.target).since(before).metrics
    own = window([each for _, each in ran.recorded], ran.begin, ran.end)
    return ModeSlice(own, counters, ran.recorded, ran.begin, ran.end)


def greedy(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)


def prompts_of(arguments: argparse.Namespace, target_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer(target_dir)
    return [tokenizer.encode(text) for text in held_out_prompts(arguments.prompts, seed=1)]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all slices of a mode."""

    tokens_per_step: float  # per session, without its prompt
    acceptance: float  # per hint, given that those before it were accepted
    hints_per_step: float  # hints fed per session
    sessions_per_step: float
    step_ms: float  # of the target: forward pass and verification of a batch
    interval_ms: float  # from one step to the next, including waits and all work between them
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
        bound.acceptance_rate(sum(each.num_accepted for each in windows), sum(each.num_rejected for each in windows)),
        counters["spec_decode_num_draft_tokens_total"] / num_parts,
        num_parts / num_steps,
        counters["step_milliseconds_sum"] / num_steps,
        statistics.fmean(intervals) if intervals else 0.0,
        counters["hint_bytes_total"] / max(counters["generation_tokens_total"], 1.0),
    )


def ratios(own: Sequence[ModeSlice], other: Sequence[ModeSlice]) -> list[float]:
    """Ratios of speeds, round by round."""
    return [a.window.tokens_per_s / b.window.tokens_per_s for a, b in zip(own, other, strict=True)]


def speed_figures(slices: Sequence[ModeSlice], plain: Sequence[ModeSlice] | None) -> dict[str, Any]:
    """Tokens per second, time per token, and their ratios to plain decoding round by round."""
    speeds = [each.window.tokens_per_s for each in slices]
    figures = with_quartiles("tokens_per_s", speeds, 1)
    if plain is not None:
        figures |= with_quartiles("speedup", ratios(slices, plain), 3)
    return figures | tpot_figures([ms for each in slices for ms in each.window.tpot_ms])


def tpot_figures(tpot_ms: Sequence[float]) -> dict[str, float]:
    """Time per output token over whole requests; empty if none ended within a slice."""
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


def bound_figures(own: Totals, plain: Totals, speedup: float) -> dict[str, Any]:
    """Speed of one mode relative to the bound of its own steps and to independent acceptance."""
    measured = bound.speedup_bound(own.tokens_per_step, plain.step_ms, own.step_ms)
    tokens = bound.expected_tokens(own.acceptance, own.hints_per_step)
    analytic = bound.speedup_bound(tokens, plain.step_ms, own.step_ms)
    cost = bound.line_through(
        *(plain.sessions_per_step, plain.step_ms),
        *(own.sessions_per_step * (1.0 + own.hints_per_step), own.step_ms),
    )
    free = bound.free_draft(own.acceptance, cost, plain.sessions_per_step, MAX_HINTS)
    # Decoding only; `speedup` also counts prompts, which gain nothing.
    decode_speedup = own.tokens_per_step * plain.interval_ms / own.interval_ms if own.interval_ms else 0.0
    return {
        "bound": round(measured, 3),
        "share_of_bound": round(speedup / measured, 3),
        "decode_speedup": round(decode_speedup, 3),
        "decode_share_of_bound": round(decode_speedup / measured, 3),
        "analytic_tokens_per_step": round(tokens, 3),
        "analytic_speedup": round(analytic, 3),
        "free_draft": {"hints_per_step": free.num_hints, "speedup": round(free.speedup, 3)},
        "share_of_free_draft": round(speedup / free.speedup, 3),
    }


def load_parser(docstring: str, *, batch: Sequence[int], seconds: float, rounds: int) -> argparse.ArgumentParser:
    """The flags common to all benchmarks of modes."""
    parser = parser_of(docstring, draws="the result")
    default = " ".join(map(str, batch))
    parser.add_argument("--batch", type=int, nargs="+", default=list(batch), help=f"streams (default {default})")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="of a slice, after its beginning (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="slices of each mode (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds not counted (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=150, help="per request (default %(default)s)")
    return parser


def load_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those flags, for the result."""
    return {
        "target": arguments.target.name + (", grown" if arguments.grown else ""),
        "draft": arguments.draft.name,
        "seconds": arguments.seconds,
        "rounds": arguments.rounds,
        "warmup": arguments.warmup,
        "tokens": arguments.tokens,
    }
