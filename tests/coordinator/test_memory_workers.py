"""Memory workers follow sequences of tenants that opted in, and stay while hints are paused. Workers are fakes."""

from __future__ import annotations

import asyncio

import pytest

from outrider.registry.worker_record import MEMORY
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeDraft, eventually
from tests.coordinator.test_sequence_runner import expected, once_attached, text_of


@pytest.mark.parametrize(
    ("tenants", "user", "is_followed"),
    [((), "team", False), (("team",), "team", True), (("team",), "other", False), (("*",), "other", True)],
)
async def test_only_tenants_that_opted_in_are_remembered(
    clusters: ClusterFactory, tenants: tuple[str, ...], user: str, is_followed: bool
) -> None:
    target, memory = clusters.target(), FakeDraft()
    if is_followed:
        target.may_step = once_attached(memory)
    async with clusters.open([target], [memory], settings={"memory_tenants": tenants}, engine=MEMORY) as cluster:
        assert text_of(await cluster.complete(user=user)) == expected(clusters, 12)
    assert len(memory.requests) == is_followed
    if is_followed:
        assert memory.requests[0].owner == target.requests[0].owner != ""


async def test_a_memory_worker_goes_on_remembering_while_hints_are_paused(clusters: ClusterFactory) -> None:
    target, memory = clusters.target(step_s=0.01, num_draft_tokens=5, num_accepted=0), FakeDraft()
    target.may_step = once_attached(memory)
    async with clusters.open([target], [memory], settings={"memory_tenants": ("*",)}, engine=MEMORY) as cluster:
        task = asyncio.create_task(cluster.complete(max_tokens=40))
        await eventually(lambda: bool(target.speculation_calls), "told the target")
        assert (memory.num_open, memory.num_closed) == (1, 0)
        assert text_of(await task) == expected(clusters, 40)
        await eventually(lambda: memory.num_open == 0, "let go at the end")


async def test_one_that_is_lost_while_hints_are_paused_is_not_replaced(clusters: ClusterFactory) -> None:
    memory = FakeDraft(lets_go_after_s=0.3)
    target = clusters.target(step_s=0.001, num_draft_tokens=5, num_accepted=0)
    target.may_step = lambda num_tokens: num_tokens < 20 or memory.num_closed > 0
    async with clusters.open([target], [memory], settings={"memory_tenants": ("*",)}, engine=MEMORY) as cluster:
        assert text_of(await cluster.complete(max_tokens=40)) == expected(clusters, 40)
    assert len(memory.requests) == 1
    assert [call.speculation.enabled for call in target.speculation_calls] == [False]
