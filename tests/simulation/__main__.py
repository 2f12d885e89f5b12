"""`python -m tests.simulation`: runs seeds, as many as asked for, and makes the first failing one small."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.additions import draw
from tests.simulation.minimize import minimize
from tests.simulation.scenario import Scenario
from tests.simulation.seed_log import SeedLog, blocks_left, commit_here
from tests.simulation.world import Outcome, run

_SEEDS_PER_TASK = 50
_SEEDS_PER_LOGGED_BLOCK = 500
_RUNS_PER_COLLECTION = 50


@dataclass
class Summary:
    """Totals of many runs."""

    num_runs: int = 0
    num_answered: int = 0
    num_tokens: int = 0
    num_refusals: int = 0
    num_reconnects: int = 0
    num_preemptions: int = 0
    num_anew: int = 0
    num_given_up: int = 0
    num_preempting: int = 0  # runs in which there were some
    num_messages: int = 0
    virtual_s: float = 0.0
    failed: dict[int, str] = field(default_factory=dict)  # seed: its first problem

    def add(self, seed: int, outcome: Outcome) -> None:
        self.num_runs += 1
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(outcome, name))
        self.num_preempting += outcome.num_preemptions > 0
        if outcome.problems:
            self.failed[seed] = outcome.problems[0]

    def merge(self, other: Summary) -> None:
        self.num_runs += other.num_runs
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.num_preempting += other.num_preempting
        self.failed |= other.failed

    def counts(self) -> dict[str, float]:
        """The counts by name."""
        return {name: getattr(self, name) for name in ("num_runs", *_COUNTS)}


_COUNTS = (
    "num_answered",
    "num_tokens",
    "num_refusals",
    "num_reconnects",
    "num_preemptions",
    "num_anew",
    "num_given_up",
    "num_messages",
    "virtual_s",
)


def run_seeds(seeds: range) -> Summary:
    """Runs the seeds in this process."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # what the system says of its troubles is its own business
    gc.freeze()
    gc.disable()  # runs are full of cycles; one collection for many of them is cheaper
    summary = Summary()
    for num_run, seed in enumerate(seeds, start=1):
        summary.add(seed, run(draw(seed)))
        if num_run % _RUNS_PER_COLLECTION == 0:
            gc.collect()
    gc.collect()
    gc.enable()
    gc.unfreeze()
    logging.disable(before)
    return summary


def run_blocks(blocks: Sequence[range], num_processes: int) -> Iterator[tuple[range, Summary]]:
    """Yields each block with what it gave, in their order."""
    if num_processes == 1:
        yield from ((block, run_seeds(block)) for block in blocks)
        return
    with ProcessPoolExecutor(num_processes) as pool:
        yield from zip(blocks, pool.map(run_seeds, blocks), strict=True)


def run_in_parallel(first: int, count: int, num_processes: int) -> Iterator[Summary]:
    """Yields the totals so far after each block of seeds."""
    summary = Summary()
    blocks = [*blocks_left(range(first, first + count), (), _SEEDS_PER_TASK)]
    for _, part in run_blocks(blocks, num_processes):
        summary.merge(part)
        yield summary


def run_logged(first: int, count: int, num_processes: int, log: SeedLog) -> Iterator[Summary]:
    """Yields the totals so far after each block of seeds that the log lacks; each block is logged when it ends."""
    summary = Summary()
    blocks = [*blocks_left(range(first, first + count), log.runs(), _SEEDS_PER_LOGGED_BLOCK)]
    for block, part in run_blocks(blocks, num_processes):
        log.append(block, part.counts(), part.failed)
        summary.merge(part)
        yield summary


def explain(scenario: Scenario) -> str:
    """A small scenario that fails in the same way, and all that happens in it."""
    kind = _kind(run(scenario).problems[0])

    def fails(smaller: Scenario) -> bool:
        return any(_kind(problem) == kind for problem in run(smaller).problems)

    small = minimize(scenario, fails)
    outcome = run(small)
    lines = [
        f"seed {scenario.seed}: {len(small.faults)} of {len(scenario.faults)} faults and {len(small.requests)} of "
        f"{len(scenario.requests)} requests are enough, with {small.num_targets} targets, {small.num_drafts} drafts "
        f"and {small.num_coordinators} coordinators:",
        *(f"  {line}" for line in outcome.trace),
    ]
    return "\n".join(lines)


def _kind(problem: str) -> str:
    """The kind of a problem: the start of its description without numbers, which name the processes concerned."""
    return "".join(letter for letter in problem if not letter.isdigit())[:24]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default %(default)s)")
    parser.add_argument("--seed", type=int, help="replay this one, and tell everything that happens")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="at once (default: one for each core)"
    )
    parser.add_argument(
        "--log",
        type=Path,
        help="append every block of seeds that was run to this file, and leave out those it has",
    )
    given = parser.parse_args(arguments)
    if given.seeds < 1 or given.processes < 1:
        parser.error("--seeds and --processes take a positive number")
    if given.log is not None and not given.log.parent.is_dir():
        parser.error(f"there is no folder {given.log.parent} for the log")
    if given.seed is not None:
        logging.disable(logging.ERROR)
        outcome = run(draw(given.seed))
        print(*outcome.trace, sep="\n")
        if outcome.problems:
            print(explain(draw(given.seed)))
        return 1 if outcome.problems else 0
    started_s = time.monotonic()
    summary = Summary()
    which = given.first, given.seeds, given.processes
    log = None if given.log is None else SeedLog(given.log, commit_here())
    for summary in run_in_parallel(*which) if log is None else run_logged(*which, log):
        elapsed_s = time.monotonic() - started_s
        print(
            f"\r{summary.num_runs} runs, {len(summary.failed)} failed; {summary.num_runs / elapsed_s:.0f} a second",
            end="",
            file=sys.stderr,
            flush=True,
        )
    elapsed_s = time.monotonic() - started_s
    print(file=sys.stderr)
    print(
        f"{summary.num_runs} runs in {elapsed_s:.0f} s: {summary.num_answered} requests answered with "
        f"{summary.num_tokens} tokens, {summary.num_refusals} refusals, {summary.num_reconnects} reconnects, "
        f"{summary.num_preemptions} preemptions in {summary.num_preempting} runs, "
        f"{summary.num_anew} begun anew, {summary.num_given_up} given up with what they had, "
        f"{summary.num_messages} messages in {summary.virtual_s / 3600:.1f} h of virtual time; "
        f"{len(summary.failed)} failed"
    )
    for seed, problem in sorted(summary.failed.items())[:20]:
        print(f"  seed {seed}: {problem}")
    if summary.failed:
        logging.disable(logging.ERROR)
        print(explain(draw(min(summary.failed))))
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
