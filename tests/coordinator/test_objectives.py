"""`slo` at both edges: it reaches the target, is told and counted as met or missed, and decides who waits."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from coordinator.api.grpc import grpc_api
from coordinator.observability.statistics import RequestTimes, outcome_of
from coordinator.placement.fair_queue import URGENT, FairQueue, Ticket
from coordinator.settings import CoordinatorSettings
from outrider.errors import InvalidRequest
from outrider.objective import NO_OBJECTIVE, PATIENCE_S, Objective
from outrider.settings import SettingError
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.conftest import Cluster, ClusterFactory

CHAT = "/v1/chat/completions"
EASY = {"ttft_ms": 3_000_000, "tpot_ms": 3_000_000}
HARD = {"ttft_ms": 0.001, "tpot_ms": 0.001}


def counted(cluster: Cluster) -> dict[tuple[str, str], float]:
    """Requests by objective and result; only those that there are."""
    counter = cluster.service.environment.metrics.slo_requests
    return {
        (sample.labels["objective"], sample.labels["result"]): sample.value
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.value
    }


async def stream(cluster: Cluster, **fields: Any) -> list[generation_pb2.GenerationChunk]:
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=4)
    request = generation_pb2.GenerationRequest(prompt="import", sampling=sampling, **fields)
    return [chunk async for chunk in grpc_api.generate(cluster.service, request)]


class TestEdges:
    async def test_an_objective_is_sent_to_the_target_told_and_counted(self, clusters: ClusterFactory) -> None:
        target = clusters.target(step_s=0.002)
        async with clusters.open([target]) as cluster:
            met = (await cluster.complete(slo=EASY)).json()["metrics"]["slo"]
            missed = (await cluster.complete(slo=HARD)).json()["metrics"]["slo"]
            half = (await cluster.complete(slo={"tpot_ms": 3_000_000})).json()["metrics"]["slo"]
            assert "slo" not in (await cluster.complete()).json()["metrics"]
            counts = counted(cluster)
        assert met == {**EASY, "ttft_met": True, "tpot_met": True, "met": True}
        assert missed == {**HARD, "ttft_met": False, "tpot_met": False, "met": False}
        assert half == {"tpot_ms": 3_000_000, "tpot_met": True, "met": True}
        assert counts == {
            ("ttft", "met"): 1, ("tpot", "met"): 2, ("all", "met"): 2,
            ("ttft", "missed"): 1, ("tpot", "missed"): 1, ("all", "missed"): 1,
        }  # fmt: skip
        easy, hard, _, none = [request.slo for request in target.requests]
        assert easy.tpot_ms == 3_000_000
        assert 2_900_000 < easy.ttft_ms < 3_000_000  # what is left of it
        assert hard.ttft_ms == 0  # it is late already
        assert hard.tpot_ms == pytest.approx(0.001)
        assert none == common_pb2.Objective()

    async def test_a_chat_a_stream_and_other_apis_have_it(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        messages = [{"role": "user", "content": "hi"}]
        body = {"messages": messages, "max_tokens": 5, "slo": EASY}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with clusters.open([target]) as cluster:
            events = (await cluster.client.post(CHAT, json=body | options)).text.split("\n\n")
            await cluster.client.post("/v1/messages", json=body)
            await cluster.client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 5, "slo": EASY})
        assert json.loads(events[-3].removeprefix("data: "))["metrics"]["slo"]["met"] is True
        assert [request.slo.tpot_ms for request in target.requests] == [3_000_000] * 3

    async def test_grpc_has_the_same(self, clusters: ClusterFactory) -> None:
        target = clusters.target(step_s=0.002)
        async with clusters.open([target]) as cluster:
            chunks = [(await stream(cluster, slo=common_pb2.Objective(**slo)))[-1].finished for slo in (EASY, HARD, {})]
            counts = counted(cluster)
        assert [each.slo_met for each in chunks[:2]] == [True, False]
        assert not chunks[2].HasField("slo_met")
        assert (counts["all", "met"], counts["all", "missed"]) == (1, 1)

    @pytest.mark.parametrize(
        ("slo", "parameter"),
        [
            ({"tpot_ms": 0}, "slo.tpot_ms"),
            ({"tpot_ms": -4}, "slo.tpot_ms"),
            ({"ttft_ms": 3_600_001}, "slo.ttft_ms"),
            ({"ttft_ms": "5"}, "slo.ttft_ms"),
            ({"itl_ms": 5}, "slo.itl_ms"),
            (5, "slo"),
        ],
    )
    async def test_what_cannot_be_meant_is_refused_by_its_name(
        self, clusters: ClusterFactory, slo: Any, parameter: str
    ) -> None:
        target = clusters.target()
        async with clusters.open([target]) as cluster:
            for path in ("/v1/completions", CHAT):
                given = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
                answer = await cluster.client.post(path, json={**given, "slo": slo})
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == parameter
        assert not target.requests

    @pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms"])
    @pytest.mark.parametrize("value", [-1.0, math.nan, 3_600_001.0])
    async def test_so_it_is_over_grpc(self, clusters: ClusterFactory, name: str, value: float) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            with pytest.raises(InvalidRequest) as caught:
                await stream(cluster, slo=common_pb2.Objective(**{name: value}))
        assert caught.value.parameter == f"slo.{name}"

    async def test_every_sequence_has_to_meet_it(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            await cluster.complete(n=3, slo=EASY)
            assert counted(cluster)["all", "met"] == 1
        objective = Objective(ttft_ms=100.0)
        quick, slow = RequestTimes(0.0, 0.05), RequestTimes(0.0, 0.2)
        assert outcome_of(objective, [(quick, 5), (slow, 5)]) == {"ttft": False}

    async def test_a_request_that_fails_misses_it(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(is_full=True)], settings={"queue_wait_max_s": 0.1}) as cluster:
            assert (await cluster.complete(slo=EASY)).status_code == 429
            assert (await cluster.complete()).status_code == 429
            assert counted(cluster) == {(kind, "missed"): 1 for kind in ("ttft", "tpot", "all")}

    async def test_a_replay_says_how_long_it_has_been_decoding(self, clusters: ClusterFactory) -> None:
        mortal, heir = clusters.target(dies_at=6, step_s=0.005), clusters.target()
        async with clusters.open([mortal, heir]) as cluster:
            for _ in range(8):  # until it is chosen
                await cluster.complete(slo=EASY)
                if mortal.num_died:
                    break
        assert mortal.num_died
        assert [request.decoding_ms for request in mortal.requests] == [0.0]
        assert heir.requests[-1].decoding_ms >= 20.0


class TestTenants:
    def settings(self, *objectives: tuple[str, Objective]) -> CoordinatorSettings:
        return CoordinatorSettings(tokenizer_dir="x", redis_url="unused", tenant_objectives=objectives)

    def test_the_default_of_all_fills_what_a_tenants_own_leaves_out(self) -> None:
        settings = self.settings(("gold", Objective(tpot_ms=20.0)), ("*", Objective(500.0, 100.0)))
        assert settings.objective_of("gold") == Objective(500.0, 20.0)
        assert settings.objective_of("other") == Objective(500.0, 100.0)
        assert self.settings().objective_of("gold") == NO_OBJECTIVE

    async def test_a_request_that_carries_none_has_its_tenants(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        settings = {"tenant_objectives": (("gold", Objective(tpot_ms=2_000_000.0)),)}
        async with clusters.open([target], settings=settings) as cluster:
            for body in ({"user": "gold"}, {"user": "gold", "slo": {"tpot_ms": 1_000_000}}, {}):
                await cluster.complete(**body)
        assert [request.slo.tpot_ms for request in target.requests] == [2_000_000, 1_000_000, 0]


class TestQueue:
    def queue(self, *tickets: Ticket) -> FairQueue:
        queue = FairQueue()
        for ticket in tickets:
            queue.push(ticket)
        return queue

    def test_of_one_tenant_the_first_due_goes_first(self) -> None:
        plain, late, due = Ticket(tenant="a"), Ticket(tenant="a", due_s=3.0), Ticket(tenant="a", due_s=2.0)
        assert self.queue(plain, late, due).in_order(now_s=1.0) == [due, late, plain]
        assert self.queue(plain, late, due).in_order(now_s=2.5) == [late, plain, due]
        assert self.queue(plain, late, due).in_order() == [plain, late, due]

    def test_no_tenant_goes_before_another_for_it(self) -> None:
        first, second = Ticket(tenant="a"), Ticket(tenant="b", due_s=1.0)
        assert self.queue(first, second).in_order(now_s=0.0) == [first, second]

    def test_nor_before_a_lower_priority(self) -> None:
        first, second = Ticket(0), Ticket(1, due_s=1.0)
        assert self.queue(first, second).in_order(now_s=0.0) == [first, second]

    def test_one_that_has_begun_is_due_no_more(self) -> None:
        first, second = Ticket(URGENT), Ticket(URGENT, due_s=1.0)
        assert self.queue(first, second).in_order(now_s=0.0) == [first, second]

    def test_patience_ends(self) -> None:
        first, second = Ticket(since_s=0.0), Ticket(since_s=4.0, due_s=PATIENCE_S + 1.0)
        assert self.queue(first, second).in_order(now_s=4.5) == [first, second]


def test_an_objective_that_is_none_is_refused_by_its_flag() -> None:
    from command_line.start.deployment import Deployment

    with pytest.raises(SettingError, match=r"--tenant-slo: 'gold=5' is not NAME=ttft:MS,tpot:MS"):
        Deployment("target", None, tenant_objectives=("gold=5",))  # type: ignore[arg-type]
