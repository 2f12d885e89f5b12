"""The bound on requests that a process without Ray takes in at once: one for both APIs, refused in each one's words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.access.api_keys import Scope, entry, new_key
from coordinator.api.grpc import grpc_calls
from coordinator.api.grpc.grpc_calls import GrpcCalls
from coordinator.api.grpc.grpc_ingress import MESSAGE_BYTES_MAX
from coordinator.api.grpc.grpc_server import make_server
from coordinator.api.http.application import create_app
from coordinator.intake import request_limit
from coordinator.intake.request_limit import RequestLimit
from outrider.errors import Overloaded
from outrider.security.call_admission import UNREAD_BYTES_MAX
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import eventually
from tests.coordinator.serve_grpc import ask
from tests.raw_calls import framed, raw_connection

BODY: dict[str, Any] = {"prompt": "import", "temperature": 0, "max_tokens": 12}


def client_of(cluster: Cluster, limit: RequestLimit) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(cluster.service, limit=limit))
    return httpx.AsyncClient(transport=transport, base_url="http://coordinator", timeout=30)


@asynccontextmanager
async def server_of(cluster: Cluster, limit: RequestLimit, connections_max: int = 99) -> AsyncIterator[str]:
    calls = GrpcCalls(cluster.service)
    server = make_server(calls, limit, lambda: False, has_reflection=False, connections_max=connections_max)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def channel_to(cluster: Cluster, limit: RequestLimit) -> AsyncIterator[grpc.aio.Channel]:
    async with server_of(cluster, limit) as address, grpc.aio.insecure_channel(address) as channel:
        yield channel


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.details()
    return caught.value.code()


class TestRequestLimit:
    def test_what_has_left_leaves_room_also_where_it_failed(self) -> None:
        limit = RequestLimit(1)
        with pytest.raises(ValueError, match="mine"), limit.entered():
            raise ValueError("mine")
        with limit.entered(), pytest.raises(Overloaded, match="as many requests"), limit.entered():
            raise AssertionError("the block is not entered")
        with limit.entered():
            pass


class TestBothApis:
    async def test_one_request_too_many_is_refused_before_its_body_is_read(self, clusters: ClusterFactory) -> None:
        limit, may_go = RequestLimit(1), asyncio.Event()
        target = clusters.target(may_step=lambda num_tokens: may_go.is_set())
        async with (
            clusters.open([target]) as cluster,
            client_of(cluster, limit) as client,
            channel_to(cluster, limit) as channel,
        ):
            stub = generation_pb2_grpc.GenerationStub(channel)
            first = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await eventually(lambda: target.num_open == 1, "the first one is at the target")
            refused = await client.post("/v1/completions", content=b"not JSON")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.headers["X-Request-Id"]
            anthropic = await client.post("/v1/messages", content=b"not JSON")
            assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")
            assert [(await client.get(path)).status_code for path in ("/health", "/livez")] == [200, 200]
            asked = generation_pb2.GenerationRequest(prompt="import")
            assert await code_of(stub.Generate(asked, timeout=10).read()) is grpc.StatusCode.RESOURCE_EXHAUSTED
            models = stub.ListModels(generation_pb2.ListModelsRequest(), timeout=10)
            assert await code_of(models) is grpc.StatusCode.RESOURCE_EXHAUSTED
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert (await health).status == health_pb2.HealthCheckResponse.SERVING
            may_go.set()
            assert (await first).status_code == 200
            assert [chunk async for chunk in stub.Generate(asked, timeout=10)][-1].HasField("finished")
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200


class TestGrpcServer:
    async def test_a_key_is_asked_for_and_reflection_is_not_there(
        self, clusters: ClusterFactory, tmp_path: Path
    ) -> None:
        key, path = new_key(), tmp_path / "keys.toml"
        path.write_text(entry(key, "search", frozenset({Scope.GENERATE}), None, ""))
        asked = generation_pb2.GenerationRequest(prompt="import")
        async with (
            clusters.open([clusters.target()], settings={"api_keys_file": str(path)}) as cluster,
            channel_to(cluster, RequestLimit(9)) as channel,
        ):
            stub = generation_pb2_grpc.GenerationStub(channel)
            assert await code_of(stub.Generate(asked, timeout=10).read()) is grpc.StatusCode.UNAUTHENTICATED
            models = stub.ListModels(generation_pb2.ListModelsRequest(), timeout=10)
            assert await code_of(models) is grpc.StatusCode.UNAUTHENTICATED
            call = stub.Generate(asked, timeout=10, metadata=[("authorization", f"Bearer {key}")])
            assert [chunk async for chunk in call][-1].HasField("finished")
            reflection = ask(channel, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", b"")
            assert await code_of(reflection) is grpc.StatusCode.UNIMPLEMENTED
        assert cluster.service.environment.metrics.request_failure.labels("UNAUTHENTICATED")._value.get() == 2

    @pytest.mark.parametrize("method", ["Generate", "ListModels"])
    async def test_nothing_that_a_stranger_sends_is_read(
        self, clusters: ClusterFactory, tmp_path: Path, method: str
    ) -> None:
        """Neither a message that is none, nor one that is too long, nor one that expands to a thousand times as much:
        what it is told is about its key."""
        path = tmp_path / "keys.toml"
        path.write_text(entry(new_key(), "search", frozenset({Scope.GENERATE}), None, ""))
        async with (
            clusters.open([clusters.target()], settings={"api_keys_file": str(path)}) as cluster,
            channel_to(cluster, RequestLimit(9)) as channel,
        ):
            for raw in (b"\xff" * 9, bytes(2 * MESSAGE_BYTES_MAX)):
                refused = ask(channel, f"/outrider.v1.Generation/{method}", raw)
                assert await code_of(refused) is grpc.StatusCode.UNAUTHENTICATED

    async def test_what_waits_for_its_key_to_be_checked_is_bounded(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with clusters.open([clusters.target()]) as cluster, server_of(cluster, RequestLimit(9)) as address:

            async def wait(*_: object) -> None:
                await asyncio.Event().wait()

            monkeypatch.setattr(cluster.service, "authenticate", wait)
            async with raw_connection(address) as connection:
                for _ in range(8):
                    call = await connection.begin("/outrider.v1.Generation/Generate")
                    message = framed(bytes(MESSAGE_BYTES_MAX - 1))
                    assert await connection.send(call, message, is_end=False) <= UNREAD_BYTES_MAX

    async def test_nothing_is_expanded(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster, channel_to(cluster, RequestLimit(9)) as channel:
            for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
                stub: Any = generation_pb2_grpc.GenerationStub(channel)
                call = stub.Generate(generation_pb2.GenerationRequest(prompt="x" * 4096), compression=compression)
                assert await code_of(call.read()) is grpc.StatusCode.UNIMPLEMENTED

    async def test_a_request_whose_message_does_not_come_counts(self, clusters: ClusterFactory) -> None:
        """So many messages at most are partly there."""
        limit = RequestLimit(2)
        async with clusters.open([clusters.target()]) as cluster, server_of(cluster, limit) as address:
            async with raw_connection(address) as connection:
                for _ in range(2):
                    call = await connection.begin("/outrider.v1.Generation/Generate")
                    await connection.send(call, framed(b"abc")[:-1], is_end=False)
                await eventually(lambda: limit.num == 2, "they count")
                third = await connection.begin("/outrider.v1.Generation/Generate")
                assert (await connection.status(third))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            await eventually(lambda: limit.num == 0, "they have left")

    async def test_messages_that_are_late_are_bounded_in_bytes(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(request_limit, "BODY_BYTES_MAX", MESSAGE_BYTES_MAX)
        monkeypatch.setattr(grpc_calls, "LATE_S", 0.05)
        limit = RequestLimit(9)
        async with clusters.open([clusters.target()]) as cluster, server_of(cluster, limit) as address:
            async with raw_connection(address) as connection:
                first = await connection.begin("/outrider.v1.Generation/Generate")
                await connection.send(first, framed(b"abc")[:-1], is_end=False)
                await eventually(lambda: limit._body_bytes.num == MESSAGE_BYTES_MAX, "it is late")
                second = await connection.begin("/outrider.v1.Generation/Generate")
                await connection.send(second, framed(b"abc")[:-1], is_end=False)
                code, message = await connection.status(second)
                assert (code, "bytes of bodies" in message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], True)
            await eventually(lambda: limit.num == limit._body_bytes.num == 0, "they have left")

    async def test_there_are_only_so_many_connections(self, clusters: ClusterFactory) -> None:
        async with (
            clusters.open([clusters.target()]) as cluster,
            server_of(cluster, RequestLimit(9), connections_max=2) as address,
            raw_connection(address) as first,
        ):
            async with raw_connection(address) as second:
                for connection in (first, second):
                    call = await connection.begin("/outrider.v1.Generation/Nothing")
                    assert (await connection.status(call))[0] == grpc.StatusCode.UNIMPLEMENTED.value[0]
                with pytest.raises(ConnectionError):
                    async with raw_connection(address) as third:
                        await third.status(await third.begin("/outrider.v1.Generation/Nothing"))

            async def is_answered() -> bool:
                with suppress(ConnectionError):
                    async with raw_connection(address) as fourth:
                        await fourth.status(await fourth.begin("/outrider.v1.Generation/Nothing"))
                        return True
                return False

            async with asyncio.timeout(30):
                while not await is_answered():
                    pass  # the second one has left, and its place is free soon

    async def test_a_message_is_bounded(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster, channel_to(cluster, RequestLimit(9)) as channel:
            raw = generation_pb2.GenerationRequest(prompt="x" * MESSAGE_BYTES_MAX).SerializeToString()
            refused = ask(channel, "/outrider.v1.Generation/Generate", raw)
            assert await code_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def test_a_defect_of_ours_is_logged_and_shows_nothing_of_itself(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with clusters.open([clusters.target()]) as cluster, channel_to(cluster, RequestLimit(9)) as channel:

            def fail(*_: object) -> None:
                raise ValueError("of our own")

            monkeypatch.setattr(cluster.service, "authenticate", fail)
            call = generation_pb2_grpc.GenerationStub(channel).Generate(generation_pb2.GenerationRequest(), timeout=10)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.INTERNAL,
            "internal error; the log has it",
        )
        assert "of our own" in caplog.text
