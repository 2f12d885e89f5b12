"""Thousands of hostile runs, each as reproducible as the first."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from coordinator.api.grpc import grpc_api
from coordinator.recovery.resumption import ResumePoint
from coordinator.request.sequence import SequenceMachine
from draft_worker.session import DraftSession
from outrider.hints.hint_tree import Hint, HintTree
from outrider.registry.worker_record import WorkerRecord
from protos.outrider.v1 import generation_pb2
from target_worker.scheduling.scheduler import Scheduler
from target_worker.scheduling.session import Session
from tests.simulation.__main__ import explain, run_in_parallel
from tests.simulation.additions import draw
from tests.simulation.features import Feature
from tests.simulation.minimize import minimize
from tests.simulation.planted_bugs import PLANTED
from tests.simulation.registry import PoolModel
from tests.simulation.world import run

NUM_SEEDS = int(os.environ.get("OUTRIDER_SIMULATION_SEEDS", "1000"))
NUM_SEEDS_TO_FIND = 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_run_loses_repeats_or_changes_a_token_or_keeps_what_it_took() -> None:
    *_, summary = run_in_parallel(0, NUM_SEEDS, os.cpu_count() or 1)
    assert summary.num_runs == NUM_SEEDS
    assert not summary.failed, explain(draw(min(summary.failed)))
    assert summary.num_answered > 2 * NUM_SEEDS, "few requests are refused for good"
    assert summary.num_reconnects > NUM_SEEDS / 50, "coordinators do die"
    assert summary.num_preempting > NUM_SEEDS / 40, "KV does run out"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the system's log messages, since faults are part of the runs."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def digest(seeds: range) -> str:
    whole = hashlib.sha256()
    for seed in seeds:
        outcome = run(draw(seed))
        whole.update(repr((outcome.trace, outcome.num_messages, outcome.virtual_s)).encode())
    return whole.hexdigest()


@pytest.mark.thorough
def test_a_seed_does_the_same_in_every_process() -> None:
    program = "from tests.simulation.test_simulation import digest; print(digest(range(40)))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(seen) == 1


def let_anybody_write(holder: WorkerRecord | None, holders_us: int, record: WorkerRecord, joined_at_us: int) -> bool:
    return False


def believe_stale_hints(self: HintTree, committed: list[int], hint: Hint) -> bool:
    """As `_add_one`, for a tree that takes a hint's word for what was committed."""
    is_on_path = hint.parent_id in self._path
    depth = self._path[hint.parent_id] + 1 if is_on_path else 0
    if 0 < depth <= len(committed) - self._base_len and hint.node_id not in self._path:
        committed = [
            *committed[: self._base_len + depth - 1],
            hint.token_id,
            *committed[self._base_len + depth :],
        ]
    return ADD_ONE(self, committed, hint)


def keep_the_session(self: Scheduler, session_id: str) -> list[object]:
    return []


def forget_the_last_token(self: SequenceMachine) -> list[int]:
    return COMMITTED(self)[:-1] if self.output.token_ids else COMMITTED(self)


def skip_one_too_many(request: generation_pb2.GenerationRequest) -> tuple[ResumePoint, ...]:
    return tuple(replace(point, num_tokens=point.num_tokens + 1) for point in READ_POSITION(request))


def forget_what_it_said(self: Session) -> None:
    PREEMPT(self)
    del self.token_ids[self.num_prompt_tokens :]


def keep_the_blocks(self: Session) -> None:
    self.num_preemptions += 1


def begin_with_what_is_not_there(self: DraftSession) -> int:
    """As `begin`, for a draft worker that believes that it has what its target has."""
    self.kv.extend(len(self.token_ids) - 1)
    self.num_prefix = self.kv.length
    return self.num_prefix


PREEMPT = Session.preempt
READ_POSITION = grpc_api._read_position
ADD_ONE, COMMITTED = HintTree._add_one, SequenceMachine.committed


@pytest.mark.parametrize(
    ("owner", "name", "planted", "problem"),
    [
        (PoolModel, "is_later", staticmethod(let_anybody_write), "an earlier life"),
        (HintTree, "_add_one", believe_stale_hints, "I3"),
        (Scheduler, "_cancel", keep_the_session, "I8"),
        (SequenceMachine, "committed", forget_the_last_token, "tokens"),
        (grpc_api, "_read_position", skip_one_too_many, "tokens"),
        (Session, "preempt", forget_what_it_said, "I1"),
        (Session, "preempt", keep_the_blocks, "I8"),
        (DraftSession, "begin", begin_with_what_is_not_there, "another path's KV"),
    ],
    ids=[
        "no incarnation check",
        "no check for stale hints",
        "a lease is not released",
        "a wrong replay offset",
        "a wrong resume offset",
        "a preempted session forgets its text",
        "a preempted session keeps its blocks",
        "a draft worker reads KV that was never computed",
    ],
)
def test_a_planted_bug_is_found(owner: object, name: str, planted: object, problem: str) -> None:
    with patch.object(owner, name, planted):
        found = next((seed for seed in range(NUM_SEEDS_TO_FIND) if run(draw(seed)).problems), None)
        assert found is not None
        scenario = draw(found)
        small = minimize(scenario, lambda smaller: bool(run(smaller).problems))
        told = explain(scenario)
    assert problem in told
    assert len(small.faults) <= 2
    assert not run(scenario).problems, "it was the planted bug"


def seeds_with(feature: Feature) -> Iterable[int]:
    """Seeds of runs that have the feature."""
    return (seed for seed in range(NUM_SEEDS_TO_FIND) if feature in draw(seed, frozenset({feature})).features)


def first_problem(feature: Feature) -> str:
    """The first problem of the first run that has one, with this feature alone; empty if there is none."""
    for seed in seeds_with(feature):
        problems = run(draw(seed, frozenset({feature}))).problems
        if problems:
            return problems[0]
    return ""


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_in_runs_that_have_its_feature(bug: str) -> None:
    feature, owner, name, planted, problem = PLANTED[bug]
    with patch.object(owner, name, planted):
        found = first_problem(feature)
    assert any(sign in found for sign in problem.split("|")), found


def test_features_are_drawn_each_for_itself() -> None:
    """Enabling one changes no other, and no run that does not have it."""
    every = frozenset(Feature)
    some = every - {Feature.SHARES, Feature.POISON}
    for seed in range(100):
        assert draw(seed, every).features & some == draw(seed, some).features
    assert frozenset().union(*(draw(seed, every).features for seed in range(300))) == every
