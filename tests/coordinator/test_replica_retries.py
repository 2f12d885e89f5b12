"""Requests whose replica is lost, behind the HAProxy that Ray Serve configures and our launcher puts right.

The configuration is what Serve's own template makes, and HAProxy is real; the replicas are not.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from coordinator.hosting import ingress
from coordinator.hosting.haproxy_launcher import REQUEST_BYTES_MAX, RETRIES, rewritten
from coordinator.hosting.ingress import ProxyUnusable
from outrider.local.free_ports import free_ports
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.fake_coordinators import FakeCoordinators, Fate, fake_coordinators

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]


@dataclass
class Front:
    """HAProxy's public listeners, and what is behind them."""

    port: int
    grpc_port: int
    fakes: FakeCoordinators


def serves_configuration(
    folder: Path, port: int, grpc_port: int, fakes: FakeCoordinators, *, has_application: bool = True
) -> str:
    """For an application whose replicas these are."""
    from ray.serve._private.common import RequestProtocol
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions, gRPCOptions

    stats_port, metrics_port = free_ports(2, besides=(port, grpc_port))
    config = HAProxyConfig(
        socket_path=str(folder / "s"),
        server_state_base=str(folder),
        server_state_file=str(folder / "servers"),
        maxconn=100,
        nbthread=1,
        stats_port=stats_port,
        metrics_port=metrics_port,
        log_target=str(folder / "log"),
        has_received_routes=True,
        has_received_servers=True,
        timeout_client_s=60,
        timeout_server_s=60,
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=["named.so.that.it.is.on"]),
    )
    backends = {}
    for protocol, listener in ((RequestProtocol.HTTP, "http_port"), (RequestProtocol.GRPC, "grpc_port")):
        servers = [
            ServerConfig(f"replica-{index}", "127.0.0.1", getattr(backend, listener))
            for index, backend in enumerate(fakes.backends)
        ]
        backends[protocol.value] = BackendConfig(
            name=f"{protocol.value}-outrider".lower(),
            path_prefix="/",
            app_name="outrider",
            protocol=protocol,
            servers=servers,
        )
    maker: Any = HAProxyApi(config, backends if has_application else {}, str(folder / "haproxy.cfg"))
    maker._generate_config_file_internal()
    return (folder / "haproxy.cfg").read_text()


@asynccontextmanager
async def fronting(folder: Path, *, has_application: bool = True) -> AsyncIterator[Front]:
    try:
        haproxy = ingress.find_haproxy(Path("/tmp"))
    except ProxyUnusable as error:
        pytest.skip(str(error))
    port, grpc_port = free_ports(2)
    async with fake_coordinators() as fakes:
        given = serves_configuration(folder, port, grpc_port, fakes, has_application=has_application)
        path = folder / "rewritten.cfg"
        path.write_text(rewritten(given, "127.0.0.1", frozenset({port, grpc_port})))
        with (folder / "out").open("wb") as output:
            process = subprocess.Popen(
                [haproxy, "-db", "-f", path], cwd=folder, stdout=output, stderr=output, env=dict(os.environ)
            )
        try:
            async with asyncio.timeout(20), client_of(port) as client:
                while True:
                    assert process.poll() is None, (folder / "out").read_text()
                    try:
                        if (await client.get("/-/healthz")).status_code == 200 or not has_application:
                            break
                    except httpx.TransportError:
                        pass
                    await asyncio.sleep(0.05)
            yield Front(port, grpc_port, fakes)
        finally:
            process.kill()
            process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    async with fronting(tmp_path_factory.mktemp("h")) as front:
        yield front


@pytest.fixture
def front(running: Front) -> Front:
    """As it was in the beginning."""
    running.fakes.fate_of = lambda number: Fate.ANSWERS
    running.fakes.taken.clear()
    return running


def client_of(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False)


def the_first_dies(number: int) -> Fate:
    return Fate.DIES if number == 0 else Fate.ANSWERS


@pytest.mark.parametrize("num_bytes", [100, REQUEST_BYTES_MAX - 4096])
async def test_another_replica_answers_where_nothing_of_the_answer_was_said(front: Front, num_bytes: int) -> None:
    front.fakes.fate_of = the_first_dies
    async with client_of(front.port) as client:
        answer = await client.post("/v1/completions", content=b"x" * num_bytes)
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "2")
    assert set(front.fakes.taken) == {0, 1}


async def test_over_grpc_too(front: Front) -> None:
    front.fakes.fate_of = the_first_dies
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        call = stub.Generate(generation_pb2.GenerationRequest(prompt="x"), timeout=20)
        assert [chunk.text async for chunk in call] == ["2"]
    assert set(front.fakes.taken) == {0, 1}


async def test_an_answer_that_has_begun_is_not_begun_again(front: Front) -> None:
    front.fakes.fate_of = lambda number: Fate.DIES_LATER
    async with client_of(front.port) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", content=b"x")
    assert len(front.fakes.taken) == 1


async def test_a_request_that_brings_replicas_down_meets_three_and_is_refused_in_the_words_of_the_api(
    front: Front,
) -> None:
    front.fakes.fate_of = lambda number: Fate.DIES
    async with client_of(front.port) as client:
        answer = await client.post("/v1/completions", content=b"x")
    assert len(front.fakes.taken) == 1 + RETRIES
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "service_unavailable_error")
    assert int(answer.headers["Retry-After"]) >= 1


async def test_the_client_of_a_request_too_long_to_be_kept_is_told(front: Front) -> None:
    front.fakes.fate_of = the_first_dies
    async with client_of(front.port) as client:
        answer = await client.post("/v1/completions", content=b"x" * (REQUEST_BYTES_MAX + 1))
        assert (answer.status_code, len(front.fakes.taken)) == (502, 1)
        assert (await client.post("/v1/completions", content=b"x" * (1 << 20))).status_code == 200


@pytest.mark.parametrize("told", ["Content-Length: 100000", "Transfer-Encoding: chunked"])
async def test_a_body_that_is_not_kept_is_not_waited_for(front: Front, told: str) -> None:
    """A client without permission is refused before its request's body has arrived."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    try:
        writer.write(f"POST /refused HTTP/1.1\r\nHost: x\r\n{told}\r\n\r\n".encode() + b"5\r\nhello\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    finally:
        writer.close()


async def test_before_its_start_and_after_its_end_clients_are_told_to_come_back(tmp_path: Path) -> None:
    """A 404, which is what Serve has HAProxy say, is final to clients that try again by themselves."""
    async with fronting(tmp_path, has_application=False) as front:
        async with client_of(front.port) as client:
            answer = await client.post("/v1/completions", content=b"x")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListModels(generation_pb2.ListModelsRequest(), timeout=20)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable_error")
    assert int(answer.headers["Retry-After"]) >= 1
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no replica is ready" in (caught.value.details() or "")
