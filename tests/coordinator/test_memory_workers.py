"""Memory workers follow sequences of tenants that opted in, beside draft workers. Workers are fakes."""

from __future__ import annotations

import asyncio

import pytest

from outrider.registry.worker_record import MEMORY
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeDraft, FakeTarget, eventually
from tests.coordinator.test_sequence_runner import expected, once_attached, released, text_of

EVERYBODY = {"memory_tenants": ("*",)}


def memory_worker(**options: float) -> FakeDraft:
    return FakeDraft(engine=MEMORY, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["", "vllm"])
@pytest.mark.parametrize(
    ("tenants", "user", "is_followed"),
    [((), "team", False), (("team",), "team", True), (("team",), "other", False), (("*",), "other", True)],
)
async def test_only_tenants_that_opted_in_are_remembered(
    clusters: ClusterFactory, tenants: tuple[str, ...], user: str, is_followed: bool, engine: str
) -> None:
    target, memory = clusters.target(engine=engine), memory_worker()
    if is_followed:
        target.may_step = once_attached(memory)
    async with clusters.open([target], [memory], settings={"memory_tenants": tenants}) as cluster:
        assert text_of(await cluster.complete(user=user)) == expected(clusters, 12)
    assert len(memory.requests) == is_followed
    if is_followed:
        assert memory.requests[0].owner == target.requests[0].owner != ""


class TestBesideADraftWorker:
    async def test_a_sequence_has_one_of_each(self, clusters: ClusterFactory) -> None:
        target, drafts = clusters.target(), [FakeDraft(), FakeDraft(), memory_worker(), memory_worker()]
        target.may_step = lambda _: sum(len(each.requests) for each in drafts) == 2
        async with clusters.open([target], drafts, settings=EVERYBODY) as cluster:
            assert text_of(await cluster.complete()) == expected(clusters, 12)
            await released(cluster)
        assert sum(len(each.requests) for each in drafts[:2]) == 1
        assert sum(len(each.requests) for each in drafts[2:]) == 1
        assert {request.attachment for each in drafts for request in each.requests} == {1}

    async def test_low_acceptance_frees_the_draft_worker_alone(self, clusters: ClusterFactory) -> None:
        target = clusters.target(step_s=0.01, num_draft_tokens=5, num_accepted=0)
        draft, memory = FakeDraft(), memory_worker()
        target.may_step = lambda _: bool(draft.requests and memory.requests)
        async with clusters.open([target], [draft, memory], settings=EVERYBODY) as cluster:
            task = asyncio.create_task(cluster.complete(max_tokens=40))
            await eventually(lambda: draft.num_closed > 0 and bool(target.speculation_calls), "paused the draft")
            assert (memory.num_open, memory.num_closed) == (1, 0)
            assert text_of(await task) == expected(clusters, 40)
            await eventually(lambda: memory.num_open == 0, "let go at the end")

    async def test_the_loss_of_a_draft_worker_leaves_the_memory(self, clusters: ClusterFactory) -> None:
        draft, memory = FakeDraft(lets_go_after_s=0.1), memory_worker()
        target = clusters.target()
        target.may_step = lambda num_tokens: bool(memory.requests) and (num_tokens < 5 or draft.num_closed > 0)
        async with clusters.open([target], [draft, memory], settings=EVERYBODY) as cluster:
            assert text_of(await cluster.complete()) == expected(clusters, 12)
            assert len(memory.requests) == 1

    async def test_the_loss_of_a_memory_worker_leaves_the_draft_and_another_takes_over(
        self, clusters: ClusterFactory
    ) -> None:
        draft, mortals = FakeDraft(), [memory_worker(lets_go_after_s=0.1), memory_worker(lets_go_after_s=0.1)]
        target = clusters.target()
        target.may_step = lambda num_tokens: (
            bool(draft.requests) and (num_tokens < 5 or sum(each.num_closed for each in mortals) == 2)
        )
        async with clusters.open([target], [draft, *mortals], settings=EVERYBODY) as cluster:
            assert text_of(await cluster.complete()) == expected(clusters, 12)
            await released(cluster)
        assert len(draft.requests) == 1
        assert sorted(request.attachment for each in mortals for request in each.requests) == [1, 2]
        assert target.speculation_calls == [], "nobody paused for it"

    async def test_a_full_memory_worker_refuses_and_the_draft_stays(self, clusters: ClusterFactory) -> None:
        target, draft, memory = clusters.target(), FakeDraft(), memory_worker(is_full=True)
        target.may_step = lambda _: bool(draft.requests and memory.requests)
        async with clusters.open([target], [draft, memory], settings=EVERYBODY) as cluster:
            assert text_of(await cluster.complete()) == expected(clusters, 12)
        assert (len(draft.requests), len(memory.requests)) == (1, 1)

    async def test_a_request_without_speculation_is_not_remembered(self, clusters: ClusterFactory) -> None:
        memory = memory_worker()
        async with clusters.open([clusters.target()], [memory], settings=EVERYBODY) as cluster:
            answer = await cluster.complete(speculation={"enabled": False})
            assert text_of(answer) == expected(clusters, 12)
        assert not memory.requests

    async def test_each_of_several_targets_of_one_sequence_gets_it_anew(self, clusters: ClusterFactory) -> None:
        memory, targets = memory_worker(), [clusters.target(), clusters.target()]

        def may_step(_: int) -> bool:
            for target in targets:
                if not target.requests:
                    target.dies_at = None  # the other one does
            followed = {request.target_address for request in memory.requests}
            return len(followed) == sum(bool(target.requests) for target in targets)

        for target in targets:
            target.may_step, target.dies_at = may_step, 4
        async with clusters.open(targets, [memory], settings=EVERYBODY) as cluster:
            assert text_of(await cluster.complete()) == expected(clusters, 12)
        assert [request.attachment for request in memory.requests] == [1, 1]
        assert len(memory.requests[1].token_ids) > len(memory.requests[0].token_ids)


class TestOtherEngines:
    """They have one hint tree for each request: a memory worker comes in the place of a draft worker."""

    def target(self, clusters: ClusterFactory, **options: float) -> FakeTarget:
        return clusters.target(engine="vllm", **options)

    async def test_a_sequence_has_a_draft_worker_alone(self, clusters: ClusterFactory) -> None:
        target, draft, memory = self.target(clusters), FakeDraft(), memory_worker()
        target.may_step = once_attached(draft)
        async with clusters.open([target], [draft, memory], settings=EVERYBODY) as cluster:
            assert text_of(await cluster.complete()) == expected(clusters, 12)
        assert not memory.requests

    async def test_a_memory_worker_goes_on_remembering_while_hints_are_paused(self, clusters: ClusterFactory) -> None:
        target, memory = self.target(clusters, step_s=0.01, num_draft_tokens=5, num_accepted=0), memory_worker()
        target.may_step = once_attached(memory)
        async with clusters.open([target], [memory], settings=EVERYBODY) as cluster:
            task = asyncio.create_task(cluster.complete(max_tokens=40))
            await eventually(lambda: bool(target.speculation_calls), "told the target")
            assert (memory.num_open, memory.num_closed) == (1, 0)
            assert text_of(await task) == expected(clusters, 40)
            await eventually(lambda: memory.num_open == 0, "let go at the end")

    async def test_one_that_is_lost_while_hints_are_paused_is_not_replaced(self, clusters: ClusterFactory) -> None:
        memory = memory_worker(lets_go_after_s=0.3)
        target = self.target(clusters, step_s=0.001, num_draft_tokens=5, num_accepted=0)
        target.may_step = lambda num_tokens: num_tokens < 20 or memory.num_closed > 0
        async with clusters.open([target], [memory], settings=EVERYBODY) as cluster:
            assert text_of(await cluster.complete(max_tokens=40)) == expected(clusters, 40)
        assert len(memory.requests) == 1
        assert [call.speculation.enabled for call in target.speculation_calls] == [False]
