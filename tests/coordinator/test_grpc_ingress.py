"""Tests of Ray Serve's gRPC server with bytes that are not a request: it refuses them and names the cause."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from coordinator.api.grpc.grpc_ingress import MESSAGE_BYTES_MAX, add_GenerationServicer_to_server
from protos.outrider.v1 import generation_pb2
from tests.coordinator import serve_grpc
from tests.coordinator.serve_grpc import serving

METHODS = ["Generate", "ListModels"]


@pytest_asyncio.fixture
async def channel(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a gRPC server of Ray Serve whose methods answer every request that they receive."""

    def handler(service_method: str, streaming_type: Any) -> Any:
        async def one(request: Any, context: Any) -> bytes:
            return generation_pb2.ListModelsResponse().SerializeToString()

        async def many(request: Any, context: Any) -> AsyncGenerator[bytes]:
            yield generation_pb2.GenerationChunk(text=request.prompt[:10]).SerializeToString()

        return many if streaming_type.name == "UNARY_STREAM" else one

    async with (
        serving(monkeypatch, handler, add_GenerationServicer_to_server) as address,
        grpc.aio.insecure_channel(address) as opened,
    ):
        yield opened


async def ask(channel: grpc.aio.Channel, method: str, raw: bytes) -> list[bytes]:
    return await serve_grpc.ask(channel, f"/outrider.v1.Generation/{method}", raw)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("raw", [b"\xff", b"\x12\x02\xff\xfe" * 2, b"\x5c" * 1000], ids=["key", "UTF-8", "groups"])
async def test_bytes_that_are_no_request_are_the_clients_mistake(
    channel: grpc.aio.Channel, method: str, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    if method == "ListModels" and raw.startswith(b"\x12"):
        pytest.skip("a field that it does not know may hold anything")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(channel, method, raw)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details()
    assert not caplog.records


async def test_a_request_is_read_as_ever(channel: grpc.aio.Channel) -> None:
    request = generation_pb2.GenerationRequest(prompt="import").SerializeToString()
    (answer,) = await ask(channel, "Generate", request)
    assert generation_pb2.GenerationChunk.FromString(answer).text == "import"
    assert await ask(channel, "ListModels", b"") == [b""]


async def test_a_proxy_asks_a_replica_for_the_caller_before_it_reads_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def handler(service_method: str, streaming_type: Any) -> Any:
        async def one(request: Any, context: Any) -> bytes:
            asked.append((service_method, dict(context.invocation_metadata()).get("authorization")))
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            context.set_details("who are you?")
            return b""

        return one

    async with (
        serving(monkeypatch, handler, add_GenerationServicer_to_server) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        for raw in (b"\xff" * 9, bytes(2 * MESSAGE_BYTES_MAX)):
            generate = channel.unary_stream("/outrider.v1.Generation/Generate", None, None)
            call = generate(raw, metadata=(("authorization", "Bearer x"),), timeout=20)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert refused.value.details() == "who are you?"
        # It is a question among ourselves.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(channel, "Authenticate", b"")
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert asked == [("/outrider.v1.Generation/Authenticate", "Bearer x")] * 2


async def test_nothing_is_expanded(channel: grpc.aio.Channel) -> None:
    for path in ("outrider.v1.Generation/Generate", "ray.serve.RayServeAPIService/Healthz"):
        call = channel.unary_stream(f"/{path}", None, None)(b"x" * 99, compression=grpc.Compression.Gzip, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_nobody_sends_more_than_a_request_may_need(channel: grpc.aio.Channel) -> None:
    longest = generation_pb2.GenerationRequest(prompt="x" * (MESSAGE_BYTES_MAX - 8)).SerializeToString()
    assert len(longest) <= MESSAGE_BYTES_MAX
    assert await ask(channel, "Generate", longest)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(channel, "Generate", longest + b"\x18\x01" * 8)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
