"""Draft workers that are of no use are noticed, once, and so is that they are of use again."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from coordinator.speculation.acceptance_watch import (
    NUM_DECIDED_FIRST,
    NUM_DECIDED_LATER,
    AcceptanceWatch,
    Finding,
)
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeDraft, record_of

DRAFT = record_of("draft", "127.0.0.1:1", "f")


def observed(watch: AcceptanceWatch, num_steps: int, num_draft_tokens: int, num_accepted: int) -> list[Finding]:
    findings = [watch.observe(DRAFT, "m", num_draft_tokens, num_accepted) for _ in range(num_steps)]
    return [each for each in findings if each is not None]


def test_a_hundred_hints_of_which_none_holds_raise_the_alarm_once() -> None:
    watch = AcceptanceWatch()
    assert observed(watch, NUM_DECIDED_FIRST - 1, 4, 0) == []  # one hint decided a step, three never looked at
    (finding,) = observed(watch, 5 * NUM_DECIDED_FIRST, 4, 0)
    assert finding == Finding(DRAFT, "m", NUM_DECIDED_FIRST, 0, is_alarm=True)
    assert watch.alarms == [(DRAFT.worker_id, "m")]
    assert f"of {NUM_DECIDED_FIRST} hints for m 0 were accepted" in str(finding)
    assert DRAFT.model_name in str(finding)


def test_a_draft_that_is_right_one_time_in_ten_is_left_alone() -> None:
    watch = AcceptanceWatch()
    for _ in range(NUM_DECIDED_LATER):
        assert observed(watch, 9, 4, 0) + observed(watch, 1, 1, 1) == []
    assert watch.alarms == []


def test_one_that_was_of_use_is_judged_by_more_hints() -> None:
    watch = AcceptanceWatch()
    observed(watch, NUM_DECIDED_FIRST, 1, 1)
    assert observed(watch, NUM_DECIDED_LATER - 1, 1, 0) == []
    assert len(observed(watch, 1, 1, 0)) == 1


def test_the_alarm_ends_where_hints_hold_again() -> None:
    watch = AcceptanceWatch()
    observed(watch, NUM_DECIDED_FIRST, 1, 0)
    (finding,) = observed(watch, NUM_DECIDED_FIRST, 1, 1)
    assert not finding.is_alarm
    assert watch.alarms == []


def test_workers_and_models_are_counted_apart_and_those_gone_are_forgotten() -> None:
    watch = AcceptanceWatch()
    restarted = replace(DRAFT, incarnation="other")
    for _ in range(NUM_DECIDED_FIRST - 1):
        for draft, model in ((DRAFT, "m"), (DRAFT, "n"), (restarted, "m")):
            assert watch.observe(draft, model, 1, 0) is None
    assert watch.observe(DRAFT, "m", 1, 0) is not None
    watch.keep([restarted])
    assert watch.alarms == []
    assert watch.observe(restarted, "m", 1, 0) is not None


async def test_a_request_whose_hints_never_hold_is_an_error_in_the_log_and_a_metric(
    clusters: ClusterFactory, caplog: pytest.LogCaptureFixture
) -> None:
    target = clusters.target(step_s=0.001, num_draft_tokens=3, num_accepted=0)
    async with clusters.open([target], [FakeDraft()]) as cluster:
        await cluster.complete(max_tokens=NUM_DECIDED_FIRST + 50, speculation={"always": True})
        health = (await cluster.client.get("/health")).json()
        metrics = generate_latest(cluster.service.environment.metrics.registry).decode()
    (error,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "is of no use" in error.getMessage()
    assert health["useless_drafts"] == [{"worker_id": cluster.service.snapshot().drafts[0].worker_id, "model": "demo"}]
    (line,) = [each for each in metrics.splitlines() if each.startswith("outrider_draft_acceptance_alarm{")]
    assert line.endswith(" 1.0")


async def test_a_request_whose_hints_hold_says_nothing(
    clusters: ClusterFactory, caplog: pytest.LogCaptureFixture
) -> None:
    target = clusters.target(step_s=0.001, tokens_per_step=2, num_draft_tokens=3)
    async with clusters.open([target], [FakeDraft()]) as cluster:
        await cluster.complete(max_tokens=300, speculation={"always": True})
        assert cluster.service.environment.speculation.watch.alarms == []
    assert not [each for each in caplog.records if each.levelno == logging.ERROR]
