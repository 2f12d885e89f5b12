"""A coordinator that accepts tokens, and its clients over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from coordinator.access.api_keys import Scope, entry, new_key
from coordinator.api.grpc.grpc_calls import GrpcCalls
from coordinator.api.grpc.grpc_ingress import Pace, add_GenerationServicer_to_server
from coordinator.hosting.app import Coordinator
from coordinator.service.generation_service import GenerationService
from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import FakeTarget
from tests.coordinator.identity_providers import LocalProvider, bearer
from tests.coordinator.serve_grpc import TIMEOUT_S, serving
from tests.coordinator.test_resumption import Memory


@asynccontextmanager
async def opened(
    clusters: ClusterFactory, provider: LocalProvider, keys: Path | None = None, **settings: Any
) -> AsyncIterator[Cluster]:
    """A coordinator that accepts the provider's tokens, and keys of the file if there is one."""
    given = provider.settings | settings | ({} if keys is None else {"api_keys_file": str(keys)})
    target = FakeTarget(clusters.script)
    async with clusters.open([target], settings=given, registry=Memory()) as cluster:  # type: ignore[arg-type]
        yield cluster


async def ask(cluster: Cluster, credential: str | None, request_id: str = "", **body: Any) -> httpx.Response:
    headers = {} if credential is None else bearer(credential)
    headers |= {"X-Request-Id": request_id} if request_id else {}
    body = {"prompt": "import", "temperature": 0, "max_tokens": 8} | body
    return await cluster.client.post("/v1/completions", json=body, headers=headers)


def sample(cluster: Cluster, name: str, **labels: str) -> float | None:
    return cluster.service.environment.metrics.registry.get_sample_value(name, labels)


class Replica:
    """The servicer of a `Coordinator` over a service that is open already."""

    def __init__(self, service: GenerationService) -> None:
        self._calls = GrpcCalls(service)

    Generate: Any = Coordinator.Generate
    ListModels: Any = Coordinator.ListModels
    Authenticate: Any = Coordinator.Authenticate
    _failing: Any = Coordinator._failing


@asynccontextmanager
async def stub_of(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[generation_pb2_grpc.GenerationStub]:
    """A client of Serve's gRPC server in front of the replica's own servicer."""
    replica: Any = Replica(cluster.service)

    def handler(service_method: str, streaming_type: Any) -> Any:
        method: Any = getattr(replica, service_method.rpartition("/")[2], None)  # Serve has services of its own

        async def one(request: Any, context: Any) -> bytes:
            return bytes((await method(request, context)).SerializeToString())

        async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
            async for chunk in method(request, context):
                yield chunk.SerializeToString()

        return many if streaming_type.name == "UNARY_STREAM" else one

    monkeypatch.setattr("coordinator.api.grpc.grpc_ingress._pace_of_replica", Pace)
    async with (
        serving(monkeypatch, handler, add_GenerationServicer_to_server) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield generation_pb2_grpc.GenerationStub(channel)


async def generate(stub: Any, credential: str | None, **fields: Any) -> list[generation_pb2.GenerationChunk]:
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=8)
    given: dict[str, Any] = {"prompt": "import", "sampling": sampling} | fields
    request = generation_pb2.GenerationRequest(**given)
    metadata = () if credential is None else (("authorization", f"Bearer {credential}"),)
    return [chunk async for chunk in stub.Generate(request, metadata=metadata, timeout=TIMEOUT_S)]


async def code_of(stub: Any, credential: str | None, **fields: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, credential, **fields)
    return caught.value.code()


def keys_file(folder: Path, text: str) -> tuple[Path, str]:
    """A file with one key, of the tenant `search`."""
    key, path = new_key(), folder / "keys.toml"
    path.write_text(text + entry(key, "search", frozenset({Scope.GENERATE}), None, ""))
    return path, key
