"""Processes that run one batch are killed over and over: each line still ends exactly once."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from coordinator.batches.batch import BatchState, LineCounts
from outrider.registry.registry import Registry
from tests.coordinator.batches.desks import created, desk_over, lines, results, state_of

ROOT = Path(__file__).parents[3]
LEASE_S = 1.0


def start(redis_url: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    arguments = (redis_url, str(folder), str(LEASE_S), str(log))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.coordinator.batches.runner_process", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_lines", "num_kills"),
    [
        pytest.param(100, 4, marks=pytest.mark.thorough),
        pytest.param(1000, 50, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
async def test_each_line_ends_once_however_many_processes_are_killed(
    redis_url: str, registry: Registry, tmp_path: Path, num_lines: int, num_kills: int
) -> None:
    chance = random.Random(7)
    folder, log = tmp_path / "files", tmp_path / "log"
    log.touch()
    desk = desk_over(registry, folder)
    batch = await created(desk, lines(num_lines))
    processes = [start(redis_url, folder, log) for _ in range(3)]
    num_killed = 0
    try:
        async with asyncio.timeout(800):
            while not (found := await state_of(desk, batch)).is_over or await desk.journal.active():
                # As the batch goes on, so that the kills come at all its times: the check, the lines, the end.
                due = num_kills * (found.counts.num_completed + 1) / num_lines
                if num_killed < num_kills and num_killed <= due:
                    victim = chance.randrange(len(processes))
                    await asyncio.to_thread(processes[victim].stdout.readline)  # type: ignore[union-attr]
                    await asyncio.sleep(chance.uniform(0.0, 0.4))
                    processes[victim].kill()
                    processes[victim].communicate()
                    processes[victim] = start(redis_url, folder, log)
                    num_killed += 1
                await asyncio.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert found.state is BatchState.COMPLETED
    ended = Counter(each["custom_id"] for each in await results(desk, found.output_file_id))
    assert ended == Counter(f"r{number}" for number in range(num_lines))
    assert found.counts == LineCounts(num_completed=num_lines, num_input_tokens=2 * num_lines)
    runs = Counter(log.read_text().split())
    print(f"{num_killed} kills; {runs.total()} runs of {num_lines} lines, at most {max(runs.values())} of one")
    assert num_killed == num_kills
