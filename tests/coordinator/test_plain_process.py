"""`python -m coordinator --hosting plain` as processes of their own: how they end, and what they write."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.access.api_keys import Scope, entry, new_key
from outrider.local.redis_server import EmbeddedRedis
from outrider.registry.registry import Registry
from outrider.registry.worker_lease import WorkerLease
from outrider.registry.worker_record import WorkerLoad
from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeTarget, eventually, record_of, serving
from tests.coordinator.without_ray import WITHOUT_RAY

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 30.0
LONG: dict[str, Any] = {"prompt": "import", "temperature": 0, "max_tokens": 40, "stream": True, "ignore_eos": True}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@dataclass
class World:
    """A fake target and a Redis that knows it."""

    url: str
    target: FakeTarget
    model_dir: Path

    @asynccontextmanager
    async def coordinator(self, log: Path, *flags: str) -> AsyncIterator[Plain]:
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *WITHOUT_RAY, "--hosting", "plain", "--port", "0", "--grpc-port", "0",
                "--tokenizer", str(self.model_dir), *flags,
                cwd=ROOT, env={**os.environ, "OUTRIDER_REDIS_URL": self.url}, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(WITHIN_S):
                ready = json.loads(await process.stdout.readline())
            async with httpx.AsyncClient(base_url=ready["http"], timeout=WITHIN_S, trust_env=False) as client:
                yield Plain(process, ready, client, log)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@dataclass
class Plain:
    process: asyncio.subprocess.Process
    ready: dict[str, Any]
    client: httpx.AsyncClient
    log: Path

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def until_unready(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            while (await self.client.get("/-/healthz")).text != "DRAINING":
                pass

    async def ended(self) -> int:
        async with asyncio.timeout(WITHIN_S):
            return await self.process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(clusters: ClusterFactory, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    target = clusters.target(held_s_max=60.0)
    redis = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    url = redis.start()
    async with AsyncExitStack() as stack:
        stack.callback(redis.stop)
        registry = Registry(url)
        stack.push_async_callback(registry.close)
        address = await stack.enter_async_context(serving(target))
        record = record_of("target", address, clusters.tokenizer.fingerprint)
        await stack.enter_async_context(WorkerLease(registry, record, WorkerLoad))
        yield World(url, target, clusters.model_dir)


@pytest.fixture
def target(world: World) -> Iterator[FakeTarget]:
    """The target; it says what it is asked for unless a test holds it up."""
    yield world.target
    world.target.may_step = lambda num_tokens: True


@asynccontextmanager
async def stream_of(plain: Plain) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a long stream that has begun."""
    async with plain.client.stream("POST", "/v1/completions", json=LONG) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        await anext(lines)
        yield lines


def long_call(channel: grpc.aio.Channel) -> Any:
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=40)
    request = generation_pb2.GenerationRequest(prompt="import", sampling=sampling)
    return generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=WITHIN_S)


async def status_of(channel: grpc.aio.Channel) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
    return int(answer.status)


async def is_closed(url: str) -> bool:
    host, _, port = url.rpartition("/")[2].rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def test_it_is_unready_first_then_listens_no_more_and_finishes_what_runs(
    world: World, target: FakeTarget, tmp_path: Path
) -> None:
    may_go_on = asyncio.Event()
    target.may_step = lambda num_tokens: num_tokens < 3 or may_go_on.is_set()
    async with (
        world.coordinator(tmp_path / "log", "--drain-notice-s", "5", "--drain-grace-s", "60") as plain,
        grpc.aio.insecure_channel(plain.ready["grpc"]) as channel,
        stream_of(plain) as lines,
    ):
        call = aiter(long_call(channel))
        assert (await anext(call)).text
        assert await status_of(channel) == health_pb2.HealthCheckResponse.SERVING
        plain.terminate()
        await plain.until_unready()
        async with asyncio.timeout(WITHIN_S):
            while await status_of(channel) != health_pb2.HealthCheckResponse.NOT_SERVING:
                pass  # what was known is so for a second
        late = await plain.client.post("/v1/completions", json={"prompt": "import", "max_tokens": 2})
        assert late.status_code == 200, "load balancers have not noticed yet"
        async with asyncio.timeout(WITHIN_S):
            while not (await is_closed(plain.ready["http"]) and await is_closed(plain.ready["grpc"])):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert plain.process.returncode is None
        may_go_on.set()
        said = [line async for line in lines if line]
        assert said[-1] == "data: [DONE]"
        assert not [line for line in said if '"error"' in line]
        assert [chunk async for chunk in call][-1].finished.num_output_tokens == 40
        assert await plain.ended() == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


async def test_a_second_signal_ends_requests_with_an_error_at_once(
    world: World, target: FakeTarget, tmp_path: Path
) -> None:
    target.may_step = lambda num_tokens: num_tokens < 3
    async with (
        world.coordinator(tmp_path / "log", "--drain-notice-s", "600", "--drain-grace-s", "600") as plain,
        grpc.aio.insecure_channel(plain.ready["grpc"]) as channel,
        stream_of(plain) as lines,
    ):
        call = aiter(long_call(channel))
        assert (await anext(call)).text
        plain.terminate()
        await plain.until_unready()
        begun_s = time.monotonic()
        plain.terminate()
        (told,) = [line async for line in lines if '"error"' in line]
        assert "resume its stream" in told
        with pytest.raises(grpc.aio.AioRpcError, match="resume its stream") as caught:
            [chunk async for chunk in call]
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await plain.ended() == 0
        assert time.monotonic() - begun_s < 15
    await eventually(lambda: target.num_open == 0, "the target is free")


async def test_who_keeps_a_request_back_is_not_waited_for(world: World, tmp_path: Path) -> None:
    """Half of a body is no request that could be ended with an error."""
    async with world.coordinator(tmp_path / "log", "--drain-notice-s", "0", "--drain-grace-s", "1") as plain:
        host, _, port = plain.ready["http"].rpartition("/")[2].rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        await plain.client.get("/livez")  # it has read the other one's head by then
        plain.terminate()
        assert await plain.ended() == 0
        writer.close()


async def test_logs_metrics_and_keys_are_those_of_any_coordinator(
    world: World, target: FakeTarget, tmp_path: Path
) -> None:
    key, path, metrics_key = new_key(), tmp_path / "keys.toml", new_key()
    path.write_text(
        entry(key, "search", frozenset({Scope.GENERATE}), None, "")
        + entry(metrics_key, "watch", frozenset({Scope.METRICS}), None, "")
    )
    flags = ("--api-keys", str(path), "--log-format", "json", "--log-requests")
    own_port = ("--metrics-port", "19100", "--insecure")
    async with world.coordinator(tmp_path / "log", *flags, *own_port) as plain:
        body = {"prompt": "import", "max_tokens": 2}
        assert (await plain.client.get("/-/healthz")).text == "success"
        assert (await plain.client.post("/v1/completions", json=body)).status_code == 401
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "mine"}
        answer = await plain.client.post("/v1/completions", json=body, headers=headers)
        assert (answer.status_code, answer.headers.get_list("x-request-id")) == (200, ["mine"])
        through = await plain.client.get("/metrics", headers={"Authorization": f"Bearer {metrics_key}"})
        own = await plain.client.get(f"http://127.0.0.1:{plain.ready['metrics_port']}/metrics")
        for found in (through, own):
            assert 'outrider_request_success_total{engine="coordinator"' in found.text
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line for line in lines if line.get("request_id") == "mine"], lines


async def test_without_keys_it_is_for_this_machine(world: World, target: FakeTarget, tmp_path: Path) -> None:
    async with world.coordinator(tmp_path / "log") as plain:
        for headers, status in (
            ({}, 200),
            ({"Host": "elsewhere.example"}, 403),
            ({"Origin": "https://elsewhere.example"}, 403),
        ):
            assert (await plain.client.get("/v1/models", headers=headers)).status_code == status
