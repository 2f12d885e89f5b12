"""Processes that are stopped stand still, all of them, and go on afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.e2e.chaos.pauses import run_part_time, stopped
from tests.e2e.system import eventually

FAMILY = "import subprocess, sys; print('up', flush=True); subprocess.run([sys.executable, '-c', 'while True: pass'])"


@pytest.fixture
def family() -> Iterator[Callable[[], list[psutil.Process]]]:
    """A process that waits for its child, which works."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True) as parent:
        process = psutil.Process(parent.pid)
        try:
            eventually(process.children, bool, "the child is there")
            yield lambda: [process, *process.children(recursive=True)]
        finally:
            for each in [*process.children(recursive=True), process]:
                each.kill()


def statuses(processes: list[psutil.Process]) -> set[str]:
    return {process.status() for process in processes}


def test_a_family_stands_still_and_goes_on(family: Callable[[], list[psutil.Process]]) -> None:
    with stopped(family) as num_processes:
        assert num_processes == 2
        eventually(lambda: statuses(family()), lambda found: found == {psutil.STATUS_STOPPED}, "they are stopped")
    eventually(lambda: statuses(family()), lambda found: psutil.STATUS_STOPPED not in found, "they have gone on")


def test_what_ended_while_it_was_stopped_is_left_out(family: Callable[[], list[psutil.Process]]) -> None:
    with stopped(family):
        family()[-1].kill()
    eventually(lambda: statuses(family()), lambda found: psutil.STATUS_STOPPED not in found, "the rest goes on")


async def test_one_that_runs_part_time_does_a_part_of_its_work(
    family: Callable[[], list[psutil.Process]],
) -> None:
    works = family()[-1]
    before_s = works.cpu_times().user
    await run_part_time(works, 0.1, 1.0)
    assert works.cpu_times().user - before_s < 0.5
    eventually(works.status, lambda found: found != psutil.STATUS_STOPPED, "it runs on")
