"""Requests that wait for a place, through the HTTP and gRPC edges of a replica."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import httpx
import pytest

from coordinator.api.grpc import grpc_api
from outrider.errors import InvalidRequest
from protos.outrider.v1 import generation_pb2
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import eventually

ONE_PLACE: dict[str, Any] = {"max_num_seqs": 1, "max_num_waiting": 0}
Asked = asyncio.Task[httpx.Response]


async def until_queued(cluster: Cluster, num: int) -> None:
    gauge = cluster.service.environment.metrics.num_requests_queued.labels("demo", "coordinator")
    await eventually(lambda: gauge._value.get() == num, f"{num} texts wait")


async def occupied(cluster: Cluster, **body: Any) -> Asked:
    """A request that takes the only place."""
    first = asyncio.create_task(cluster.complete(**body))
    await eventually(lambda: cluster.targets[0].num_open == 1, "the first one runs")
    return first


async def test_requests_wait_for_a_place_and_all_get_their_text(clusters: ClusterFactory) -> None:
    target = clusters.target(step_s=0.002)
    async with clusters.open([target], **ONE_PLACE) as cluster:
        answers = await asyncio.gather(*(cluster.complete() for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        waited = cluster.service.environment.metrics.request_queue_time.labels("demo", "coordinator")
        assert waited._sum.get() > 8 * 7 / 2 * 12 * 0.002


async def test_priorities_and_tenants_decide_the_order(clusters: ClusterFactory) -> None:
    target = clusters.target(step_s=0.002)
    settings = {"tenant_weights": (("gold", 3.0),)}
    async with clusters.open([target], settings=settings, **ONE_PLACE) as cluster:
        first = await occupied(cluster, max_tokens=200)
        bodies: list[dict[str, Any]] = [{"user": "gold"}, {"user": "lead"}] * 12 + [
            {"priority": 1},
            {"priority": -1},
        ]
        tasks: list[Asked] = []
        order: list[int] = []

        def note(number: int, _: object) -> None:
            order.append(number)

        for number, body in enumerate(bodies):
            task = asyncio.create_task(cluster.complete(**body))
            task.add_done_callback(partial(note, number))
            tasks.append(task)
            await until_queued(cluster, number + 1)
        await asyncio.gather(first, *tasks)
        assert order[0] == len(bodies) - 1
        assert order[-1] == len(bodies) - 2
        share = Counter(bodies[number]["user"] for number in order[1:13])
        assert share["gold"] == pytest.approx(9, abs=1)
        assert [request.priority for request in target.requests][1] == -1


async def test_a_wait_beyond_the_bound_ends_with_429_and_a_time_to_come_back(
    clusters: ClusterFactory,
) -> None:
    target = clusters.target(step_s=0.02)
    async with clusters.open([target], settings={"queue_wait_max_s": 0.2}, **ONE_PLACE) as cluster:
        first = await occupied(cluster, max_tokens=100)
        refused = await cluster.complete()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "none had a slot within 0.2 s" in refused.json()["error"]["message"]
        first.cancel()


async def test_what_cannot_be_done_by_its_deadline_is_refused_before_it_begins(
    clusters: ClusterFactory,
) -> None:
    target = clusters.target(step_s=0.01)
    async with clusters.open([target], **ONE_PLACE) as cluster:
        await cluster.complete(max_tokens=60)  # so long a place is held
        first = await occupied(cluster, max_tokens=100)
        refused = await cluster.complete(deadline_ms=100)
        assert refused.status_code == 429
        assert "its deadline allows" in refused.json()["error"]["message"]
        assert len(target.requests) == 2
        first.cancel()


async def test_workers_are_told_how_much_time_is_left(clusters: ClusterFactory) -> None:
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        assert (await cluster.complete(deadline_ms=5000)).status_code == 200
        assert 4000 < target.requests[0].deadline_ms <= 5000


async def test_a_full_replica_turns_away_those_that_go_last(clusters: ClusterFactory) -> None:
    target = clusters.target(step_s=0.005)
    async with clusters.open([target], settings={"requests_max": 3}, **ONE_PLACE) as cluster:
        first = await occupied(cluster, max_tokens=100)
        greedy = [asyncio.create_task(cluster.complete(user="greedy")) for _ in range(2)]
        await until_queued(cluster, 2)
        assert (await cluster.complete(user="greedy")).status_code == 429
        modest = asyncio.create_task(cluster.complete(user="modest"))
        (shed,), _ = await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED, timeout=5)
        assert shed.result().status_code == 429
        assert "others come first" in shed.result().json()["error"]["message"]
        answers = await asyncio.gather(first, modest, *(task for task in greedy if task is not shed))
        assert {answer.status_code for answer in answers} == {200}


async def test_every_sequence_of_a_request_counts_towards_what_a_replica_serves(
    clusters: ClusterFactory,
) -> None:
    target = clusters.target(step_s=0.005)
    async with clusters.open([target], settings={"requests_max": 4}, max_num_seqs=8) as cluster:
        first = asyncio.create_task(cluster.complete(n=3, max_tokens=100))
        await eventually(lambda: target.num_open == 3, "three sequences run")
        refused = await cluster.complete(n=2)
        assert refused.status_code == 429
        assert "its most of 4 sequences" in refused.json()["error"]["message"]
        assert (await cluster.complete()).status_code == 200
        assert (await first).status_code == 200
        assert (await cluster.complete(n=6)).status_code == 200  # more than there may be: alone
        assert cluster.service.num_active == 0


async def test_a_tenant_that_fills_a_replica_with_requests_of_many_sequences_gives_way(
    clusters: ClusterFactory,
) -> None:
    target = clusters.target(step_s=0.005)
    async with clusters.open([target], settings={"requests_max": 5}, **ONE_PLACE) as cluster:
        first = await occupied(cluster, max_tokens=100)
        greedy = [asyncio.create_task(cluster.complete(user="greedy", n=2)) for _ in range(2)]
        await until_queued(cluster, 4)
        modest = asyncio.create_task(cluster.complete(user="modest"))
        (shed,), _ = await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED, timeout=5)
        assert shed.result().status_code == 429
        answers = await asyncio.gather(first, modest, *(task for task in greedy if task is not shed))
        assert {answer.status_code for answer in answers} == {200}


async def test_who_hangs_up_while_waiting_leaves_nothing(clusters: ClusterFactory) -> None:
    target = clusters.target(step_s=0.002)
    async with clusters.open([target], **ONE_PLACE) as cluster:
        first = await occupied(cluster, max_tokens=50)
        waiting = [asyncio.create_task(cluster.complete()) for _ in range(20)]
        await until_queued(cluster, 20)
        for task in waiting:
            task.cancel()
        await until_queued(cluster, 0)
        assert (await first).status_code == 200
        assert (await cluster.complete()).status_code == 200
        assert len(target.requests) == 2


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"priority": 1001}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": 10**9}, "deadline_ms"),
        ({"user": "x" * 257}, "user"),
    ],
)
async def test_values_out_of_bounds_are_refused_by_name(
    clusters: ClusterFactory, body: dict[str, Any], parameter: str
) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        answer = await cluster.complete(**body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == parameter


async def test_priority_and_tenant_over_grpc(clusters: ClusterFactory) -> None:
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        request = generation_pb2.GenerationRequest(prompt="import", priority=7, tenant="t", deadline_ms=9000)
        async for _ in grpc_api.generate(cluster.service, request):
            pass
        assert target.requests[0].priority == 7
        for name, value in (("priority", -1001), ("tenant", "x" * 257)):
            request = generation_pb2.GenerationRequest(prompt="import")
            setattr(request, name, value)
            with pytest.raises(InvalidRequest, match=name):
                await anext(grpc_api.generate(cluster.service, request))
