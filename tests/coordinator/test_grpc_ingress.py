"""What Serve's gRPC server does with bytes that are no request: it refuses them by their cause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from coordinator.grpc_ingress import add_GenerationServicer_to_server
from coordinator.ingress import GRPC_HOST_VARIABLE
from coordinator.listeners import MESSAGE_BYTES_MAX, listen_on_one_address
from outrider.free_ports import free_ports
from protos.outrider.v1 import generation_pb2

TIMEOUT_S = 20.0
METHODS = ["Generate", "ListModels"]


@pytest_asyncio.fixture
async def channel(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[grpc.aio.Channel]:
    """To a server of Serve's whose methods answer everything that they get."""
    from ray.serve._private import default_impl, grpc_util
    from ray.serve.config import gRPCOptions

    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    for name in ("gRPCGenericServer", "DEFAULT_GRPC_SERVER_OPTIONS"):
        monkeypatch.setattr(grpc_util, name, getattr(grpc_util, name))
    monkeypatch.setenv(GRPC_HOST_VARIABLE, "127.0.0.1")
    listen_on_one_address()

    def handler(service_method: str, streaming_type: Any) -> Any:
        async def one(request: Any, context: Any) -> bytes:
            return generation_pb2.ListModelsResponse().SerializeToString()

        async def many(request: Any, context: Any) -> AsyncGenerator[bytes]:
            yield generation_pb2.GenerationChunk(text=request.prompt[:10]).SerializeToString()

        return many if streaming_type.name == "UNARY_STREAM" else one

    (port,) = free_ports(1)
    name = f"{add_GenerationServicer_to_server.__module__}.{add_GenerationServicer_to_server.__name__}"
    options = gRPCOptions(port=port, grpc_servicer_functions=[name])
    task, server = await grpc_util.start_grpc_server(handler, options, event_loop=asyncio.get_running_loop())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
            yield opened
    finally:
        await server.stop(None)
        await task


async def ask(channel: grpc.aio.Channel, method: str, raw: bytes) -> list[bytes]:
    call = channel.unary_stream(f"/outrider.v1.Generation/{method}", None, None)
    return [message async for message in call(raw, timeout=TIMEOUT_S)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "raw", [b"\xff", b"\x12\x02\xff\xfe" * 2, b"\x5c" * 1000], ids=["key", "UTF-8", "groups"]
)
async def test_bytes_that_are_no_request_are_the_clients_mistake(
    channel: grpc.aio.Channel, method: str, raw: bytes
) -> None:
    if method == "ListModels" and raw.startswith(b"\x12"):
        pytest.skip("a field that it does not know may hold anything")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(channel, method, raw)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details()


async def test_a_request_is_read_as_ever(channel: grpc.aio.Channel) -> None:
    request = generation_pb2.GenerationRequest(prompt="import").SerializeToString()
    (answer,) = await ask(channel, "Generate", request)
    assert generation_pb2.GenerationChunk.FromString(answer).text == "import"
    assert await ask(channel, "ListModels", b"") == [b""]


async def test_nobody_sends_more_than_a_request_may_need(channel: grpc.aio.Channel) -> None:
    """Messages are received before anybody is asked for a key."""
    longest = generation_pb2.GenerationRequest(prompt="x" * (MESSAGE_BYTES_MAX - 8)).SerializeToString()
    assert len(longest) <= MESSAGE_BYTES_MAX
    assert await ask(channel, "Generate", longest)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(channel, "Generate", longest + b"\x18\x01" * 8)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
