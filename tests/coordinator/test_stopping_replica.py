"""A replica that stops: requests that do not finish in its time end with an error that their clients see."""

from __future__ import annotations

import asyncio
import json

import grpc
import httpx
import pytest

from coordinator.api.grpc import grpc_api
from coordinator.request.environment import OpenRequests
from outrider.errors import OutriderError, Unavailable
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import eventually
from tests.coordinator.test_http_api import listening


def stop(cluster: Cluster) -> None:
    cluster.service.environment.open_requests.end_all()


class TestOpenRequests:
    def test_only_open_requests_are_ended(self) -> None:
        requests, ended = OpenRequests(), list[tuple[str, OutriderError]]()
        with requests.entered(lambda error: ended.append(("over", error))):
            pass
        with requests.entered(lambda error: ended.append(("open", error))):
            requests.end_all()
        assert [name for name, _ in ended] == ["open"]
        assert isinstance(ended[0][1], Unavailable)

    def test_no_request_begins_afterwards(self) -> None:
        requests = OpenRequests()
        requests.end_all()
        with pytest.raises(Unavailable, match="stops"), requests.entered(lambda _: None):
            raise AssertionError("the block is not entered")


class TestAnswers:
    async def test_a_stream_ends_with_an_error_after_all_that_was_shown(self, clusters: ClusterFactory) -> None:
        target = clusters.target(may_step=lambda num_tokens: num_tokens < 3)
        body = {"prompt": "import", "temperature": 0, "max_tokens": 12, "stream": True}
        async with (
            clusters.open([target]) as cluster,
            listening(cluster) as url,
            httpx.AsyncClient(base_url=url, timeout=10) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            shown, error = "", None
            async for line in answer.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                error = event.get("error")
                shown += "".join(choice["text"] for choice in event.get("choices", ()))
                if shown == clusters.tokenizer.decode(clusters.script[:3]):
                    stop(cluster)
            await eventually(lambda: target.num_open == 0, "the target is free")
        assert shown == clusters.tokenizer.decode(clusters.script[:3])
        assert error is not None
        assert error["code"] == "unavailable"
        assert "resume" in error["message"]

    async def test_a_whole_answer_is_a_refusal_that_says_when_to_come_back(self, clusters: ClusterFactory) -> None:
        target = clusters.target(may_step=lambda num_tokens: num_tokens < 3)
        async with clusters.open([target]) as cluster:
            asking = asyncio.create_task(cluster.complete())
            await eventually(lambda: target.num_open == 1, "the target has it")
            stop(cluster)
            answer = await asyncio.wait_for(asking, 10)
            refused = await cluster.complete()
        assert answer.status_code == refused.status_code == 503
        assert float(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "unavailable"

    async def test_grpc_clients_get_unavailable(self, clusters: ClusterFactory) -> None:
        target = clusters.target(may_step=lambda num_tokens: num_tokens < 3)
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=12)
        asked = generation_pb2.GenerationRequest(prompt="import", sampling=sampling)
        async with clusters.open([target]) as cluster:

            async def ask() -> None:
                async for _ in grpc_api.generate(cluster.service, asked):
                    pass

            asking = asyncio.create_task(ask())
            await eventually(lambda: target.num_open == 1, "the target has it")
            stop(cluster)
            with pytest.raises(Unavailable) as caught:
                await asyncio.wait_for(asking, 10)
        assert grpc.StatusCode[caught.value.grpc_code] is grpc.StatusCode.UNAVAILABLE
