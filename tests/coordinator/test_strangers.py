"""Tests of how the `openai` package handles our refusals and errors with its defaults, which include two retries."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coordinator.api.answer.openai_response import ResponseWriter
from outrider.errors import AnotherLife, Conflict, DeadlineExceeded, OutriderError, Poisonous, Unavailable
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import eventually
from tests.coordinator.test_http_api import listening
from tests.e2e.chaos.stranger import Ending, Stranger


@asynccontextmanager
async def stranger_of(cluster: Cluster) -> AsyncIterator[Stranger]:
    async with (
        listening(cluster) as url,
        Stranger(url, "none", ssl.create_default_context(), model="demo", hung_s=30) as stranger,
    ):
        yield stranger


def kinds_of_errors() -> list[type[OutriderError]]:
    found, new = [], [OutriderError]
    while new:
        found += new
        new = [each for kind in new for each in kind.__subclasses__()]
    return found


def test_only_what_would_end_in_the_same_way_is_not_to_be_tried_again() -> None:
    """Errors that clients must not retry have statuses with which OpenAI's clients would retry."""
    final = {kind for kind in kinds_of_errors() if kind.is_final}
    assert final == {Conflict, Poisonous, DeadlineExceeded}
    assert all(kind.http_status in (408, 409, 429) or kind.http_status >= 500 for kind in final)
    assert not Unavailable.is_final
    assert not AnotherLife.is_final


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_refusal_is_met_by_a_second_try_that_succeeds(clusters: ClusterFactory, is_streaming: bool) -> None:
    """The time in Retry-After is right: a client that waits for it gets an answer."""
    target = clusters.target(step_s=0.02)
    async with (
        clusters.open([target], settings={"queue_wait_max_s": 0.1}, max_num_seqs=1) as cluster,
        stranger_of(cluster) as stranger,
    ):
        first = asyncio.create_task(cluster.complete(max_tokens=20))
        await eventually(lambda: target.num_open == 1, "the only slot is held")
        seen = await stranger.ask("import", 5, is_streaming)
        await first
    assert seen.ending is Ending.COMPLETE, seen
    assert seen.statuses == [429, 200]


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_request_that_brings_targets_down_is_sent_once(clusters: ClusterFactory, is_streaming: bool) -> None:
    targets = [clusters.target(dies_at=0) for _ in range(4)]
    async with (
        clusters.open(targets, settings={"quarantine_s": 0.01}) as cluster,
        stranger_of(cluster) as stranger,
    ):
        seen = await stranger.ask("import", 5, is_streaming)
    assert (seen.ending, seen.status, seen.code) == (Ending.REFUSED, 503, "poisonous_request"), seen
    assert seen.num_tries == 1, "two minutes would be waited for nothing"


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_request_whose_time_is_up_is_sent_once(clusters: ClusterFactory, is_streaming: bool) -> None:
    settings = {"deadline_default_s": 0.3}
    async with (
        clusters.open([clusters.target(is_hung=True)], settings=settings) as cluster,
        stranger_of(cluster) as stranger,
    ):
        seen = await stranger.ask("import", 5, is_streaming)
    assert (seen.ending, seen.status, seen.num_tries) == (Ending.REFUSED, 504, 1), seen


async def test_what_is_of_another_run_says_that_it_is_not_to_be_tried_again(
    clusters: ClusterFactory,
) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        headers = {"Last-Event-ID": f"{'0' * 12}-{'0' * 12}:3", "X-Request-Id": "r1"}
        body = {"prompt": "import", "temperature": 0, "max_tokens": 12, "stream": True}
        answer = await cluster.client.post("/v1/completions", json=body, headers=headers)
    assert (answer.status_code, answer.headers.get("x-should-retry")) == (409, "false"), answer.text


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
async def test_a_stream_whose_targets_are_lost_ends_with_the_cause(clusters: ClusterFactory, is_chat: bool) -> None:
    async with (
        clusters.open([clusters.target(dies_at=5)], settings={"target_wait_max_s": 0.2}) as cluster,
        stranger_of(cluster) as stranger,
    ):
        seen = await stranger.ask("import", 12, True, is_chat=is_chat)
    assert (seen.ending, seen.is_told, seen.code) == (Ending.BROKEN_OFF, True, "unavailable"), seen
    assert "a target worker was lost while it had this request" in seen.detail
    assert seen.num_chars > 0


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
async def test_a_bug_of_ours_in_the_middle_of_a_stream_is_told_and_counted(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch, is_chat: bool
) -> None:
    made = itertools.count()
    event = ResponseWriter.event

    def fail_at_the_fourth(writer: ResponseWriter, item: Any) -> str | None:
        if next(made) == 3:
            raise RuntimeError("a bug")
        return event(writer, item)

    monkeypatch.setattr(ResponseWriter, "event", fail_at_the_fourth)
    async with clusters.open([clusters.target(step_s=0.01)]) as cluster, stranger_of(cluster) as stranger:
        seen = await stranger.ask("import", 12, True, is_chat=is_chat)
        await eventually(lambda: cluster.num_open == 0, "the target is free")
    assert (seen.ending, seen.is_told, seen.num_tries) == (Ending.BROKEN_OFF, True, 1), seen
    assert "internal error" in seen.detail
    assert "a bug" not in seen.detail
