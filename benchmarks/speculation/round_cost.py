"""Measures the cost of a round beside the forward pass.

A round is one target step of one session. Closed-loop load runs on a pair of workers, without and with the draft. CPU
time per thread comes from the kernel's scheduler, messages and bytes from the workers' own counters. In each worker
the thread named after its model runs the forward passes and the code between them; all others are gRPC and the event
loop.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.options import report
from benchmarks.shared.pinned_pair import pair_parser, pinned_pair
from benchmarks.shared.worker_pair import WorkerPair, WorkerProcessHandle
from benchmarks.speculation.closed_loop import run_slice
from outrider.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of one worker at one moment."""

    cpu_us: dict[str, float]  # by kind of thread: "model", "other"
    metrics: dict[str, float]  # sums over labels

    def since(self, before: Reading) -> Reading:
        return Reading(_difference(self.cpu_us, before.cpu_us), _difference(self.metrics, before.metrics))


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def read(worker: WorkerProcessHandle) -> Reading:
    return Reading(_thread_times(int(str(worker.facts["pid"]))), _metrics(worker))


def _thread_times(pid: int) -> dict[str, float]:
    """CPU microseconds of a process by kind of thread, from the kernel's run-time accounting."""
    times = {"model": 0.0, "other": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        kind = "model" if "model" in (task / "comm").read_text() else "other"
        times[kind] += int((task / "schedstat").read_text().split()[0]) / 1e3
    return times


def _metrics(worker: WorkerProcessHandle) -> dict[str, float]:
    values: dict[str, float] = {}
    for each in worker.metrics():
        if not each.name.endswith("_bucket"):
            name = each.name.removeprefix("outrider_")
            values[name] = values.get(name, 0.0) + each.value
    return values


def per_step(target: Reading, draft: Reading | None) -> dict[str, float]:
    """Costs of one target step, for all sessions of the batch together."""
    num_steps = target.metrics["step_milliseconds_count"]
    figures = {
        "steps": num_steps,
        "sessions": target.metrics["step_sessions_sum"] / num_steps,
        "tokens": target.metrics["generation_tokens_total"] / num_steps,
        "step_ms": target.metrics["step_milliseconds_sum"] / num_steps,
        "target_model_cpu_us": target.cpu_us["model"] / num_steps,
        "target_other_cpu_us": target.cpu_us["other"] / num_steps,
        "hint_messages": target.metrics["hint_frames_total"] / num_steps,
        "hint_bytes": target.metrics["hint_bytes_total"] / num_steps,
        "commit_messages": target.metrics["commit_frames_total"] / num_steps,
        "commit_bytes": target.metrics["commit_bytes_total"] / num_steps,
    }
    if draft is not None:
        figures |= {
            "draft_model_cpu_us": draft.cpu_us["model"] / num_steps,
            "draft_other_cpu_us": draft.cpu_us["other"] / num_steps,
            "draft_forwards": draft.metrics["draft_step_milliseconds_count"] / num_steps,
            "draft_forward_ms": draft.metrics["draft_step_milliseconds_sum"]
            / max(draft.metrics["draft_step_milliseconds_count"], 1.0),
        }
    return {name: round(value, 3) for name, value in figures.items()}


async def measure(
    pair: WorkerPair, prompts: list[list[int]], params: SamplingParams, num_streams: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Measures both modes, after a warm-up slice of each that lets the worker learn its costs."""
    results = {}
    cycle = itertools.cycle(prompts)
    for is_counted, use_draft in ((False, False), (False, True), (True, False), (True, True)):
        workers = [worker for worker in (pair.target, pair.draft) if worker is not None]
        before = [read(worker) for worker in workers]
        measured = await run_slice(pair, cycle, params, num_streams=num_streams, seconds=seconds, use_draft=use_draft)
        spent = [read(worker).since(earlier) for worker, earlier in zip(workers, before, strict=True)]
        if is_counted:
            figures = per_step(spent[0], spent[1] if use_draft else None)
            results["on" if use_draft else "off"] = figures | {"tokens_per_s": round(measured.tokens_per_s, 1)}
    return results


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.tokens, ignore_eos=True)
    async with pinned_pair(arguments, 64) as (pair, prompts):
        return {
            str(num_streams): await measure(pair, prompts, params, num_streams, arguments.seconds)
            for num_streams in arguments.batch
        }


def main() -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="streams (default 1 8)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a slice (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=150, help="per request (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    report(arguments, asyncio.run(run(arguments)))
