"""A step's threads have cores of their own, and everything else stays off those of a draft worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from outrider.engine.threads import SPIN_COUNT, bind_threads, cores_of

NEEDS_TWO_CORES = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores, and Linux"
)
RUN_A_STEP = """
import json, os, sys, threading
from outrider.engine.threads import bind_threads, keep_off

own, shared = map(int, sys.argv[1:])
os.sched_setaffinity(0, {own, shared})
bind_threads([own, shared])
import torch
is_over = threading.Event()
other = threading.Thread(target=is_over.wait)
other.start()
keep_off([shared])

def run() -> None:
    torch.set_num_threads(2)
    torch.randn(4000, 4000).sum()
    affinities = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
    print(json.dumps([sorted(os.sched_getaffinity(other.native_id)), affinities]))

model = threading.Thread(target=run)
model.start()
model.join()
is_over.set()
"""


def test_cores_are_read_in_their_order() -> None:
    assert cores_of("3,1") == [3, 1]
    assert cores_of(None) == []


def test_what_the_environment_says_about_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
    for name in names:
        monkeypatch.setenv(name, "theirs")
    bind_threads([4, 5])
    assert {os.environ[name] for name in names} == {"theirs"}
    for name in names:
        monkeypatch.delenv(name)
    bind_threads([4, 5])
    assert (os.environ["GOMP_SPINCOUNT"], os.environ["GOMP_CPU_AFFINITY"]) == (str(SPIN_COUNT), "4 5")
    for name in ("GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY"):  # they were not set by the fixture
        monkeypatch.delenv(name)


@NEEDS_TWO_CORES
def test_a_thread_of_a_step_alone_runs_on_the_draft_workers_core() -> None:
    own, shared = sorted(os.sched_getaffinity(0))[:2]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    words = [sys.executable, "-c", RUN_A_STEP, str(own), str(shared)]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=True)
    of_another, of_all = json.loads(run.stdout)
    assert of_another == [own]
    assert of_all.count([shared]) == 1
    assert all(each in ([own], [shared]) for each in of_all)
