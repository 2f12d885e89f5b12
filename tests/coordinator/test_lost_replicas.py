"""What clients see when replicas of a coordinator under Ray Serve and HAProxy are lost, or leave."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
import pytest_asyncio

from coordinator.ingress import Proxy
from outrider.free_ports import free_ports
from outrider.redis_server import EmbeddedRedis
from outrider.registry import Registry
from outrider.worker_lease import WorkerLease
from outrider.worker_record import WorkerLoad
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeTarget, eventually, record_of, serving
from tests.e2e.chaos.stranger import Ending, Stranger

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0
NUM_REPLICAS = 2


@dataclass
class Running:
    """A coordinator under Ray Serve, and the fake target behind it."""

    process: asyncio.subprocess.Process
    ready: dict[str, Any]
    target: FakeTarget

    def replicas(self) -> list[psutil.Process]:
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any("ServeReplica" in word for word in each.cmdline()):
                    found.append(each)
        return found

    def replica_of(self, request: Any) -> psutil.Process:
        """The one that has asked the target for it, by the port that it asked from."""
        (port,) = {int(request.rpartition(":")[2])}
        for each in self.replicas():
            if port in {connection.laddr.port for connection in each.net_connections("tcp")}:
                return each
        raise AssertionError("no replica has this connection")


class Watched(FakeTarget):
    """Knows who asks."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(script)
        self.peers: list[str] = []

    async def Generate(self, request: Any, context: Any) -> Any:
        self.peers.append(context.peer())
        async for event in FakeTarget.Generate(self, request, context):
            yield event


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    clusters: ClusterFactory, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    target = Watched(clusters.script)
    redis = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    url = redis.start()
    async with AsyncExitStack() as stack:
        stack.callback(redis.stop)
        registry = Registry(url)
        stack.push_async_callback(registry.close)
        address = await stack.enter_async_context(serving(target))
        record = record_of("target", address, clusters.tokenizer.fingerprint)
        await stack.enter_async_context(WorkerLease(registry, record, WorkerLoad))
        temp_dir = Path(tempfile.mkdtemp(prefix="or-", dir="/tmp"))  # short, for Ray's sockets
        stack.callback(shutil.rmtree, temp_dir, ignore_errors=True)
        port, grpc_port = map(str, free_ports(2))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coordinator", "--tokenizer", str(clusters.model_dir), "--proxy", Proxy.HAPROXY,
            "--port", port, "--grpc-port", grpc_port, "--num-replicas", str(NUM_REPLICAS),
            "--ray-temp-dir", str(temp_dir),
            cwd=ROOT, env={**os.environ, "OUTRIDER_REDIS_URL": url}, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
            yield Running(process, json.loads(line), target)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(60):
                    await process.wait()


def stranger_of(running: Running) -> Stranger:
    return Stranger(running.ready["http"], "none", ssl.create_default_context(), model="demo", hung_s=60)


@pytest.fixture
def held(running: Running) -> AsyncIterator[Watched]:
    """The target, which says nothing until it may."""
    target = running.target
    assert isinstance(target, Watched)
    target.peers.clear()
    yield target
    target.may_step = lambda num_tokens: True
    target.step_s = 0.0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_stranger_notices_nothing_where_no_byte_of_the_answer_had_come(
    running: Running, held: Watched, is_streaming: bool
) -> None:
    await eventually(lambda: len(running.replicas()) == NUM_REPLICAS, "all replicas run", 60)
    held.may_step = lambda num_tokens: False
    async with stranger_of(running) as stranger:
        asking = asyncio.create_task(stranger.ask("import", 6, is_streaming))
        await eventually(lambda: len(held.peers) == 1, "the target has been asked", 20)
        running.replica_of(held.peers[0]).kill()
        await eventually(lambda: len(held.peers) == 2, "another replica asks", 30)
        held.may_step = lambda num_tokens: True
        seen = await asking
    assert (seen.ending, seen.statuses) == (Ending.COMPLETE, [200]), seen
    await eventually(lambda: held.num_open == 0, "what the lost one had begun has ended", 20)


async def test_a_stranger_whose_answer_had_begun_knows_that_it_broke_off(
    running: Running, held: Watched
) -> None:
    await eventually(lambda: len(running.replicas()) == NUM_REPLICAS, "all replicas run", 60)
    held.may_step = lambda num_tokens: num_tokens < 3
    async with stranger_of(running) as stranger:
        asking = asyncio.create_task(stranger.ask("import", 60, True))
        await eventually(lambda: len(held.peers) == 1, "the target has been asked", 20)
        await asyncio.sleep(1)
        running.replica_of(held.peers[0]).kill()
        seen = await asking
    assert (seen.ending, seen.is_told, seen.statuses) == (Ending.BROKEN_OFF, False, [200]), seen
    assert seen.num_chars > 0


async def test_a_call_over_grpc_goes_to_another_replica_too(running: Running, held: Watched) -> None:
    await eventually(lambda: len(running.replicas()) == NUM_REPLICAS, "all replicas run", 60)
    held.may_step = lambda num_tokens: False
    async with grpc.aio.insecure_channel(running.ready["grpc"]) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(
            generation_pb2.GenerationRequest(prompt="import"), timeout=60
        )
        await eventually(lambda: len(held.peers) == 1, "the target has been asked", 20)
        running.replica_of(held.peers[0]).kill()
        await eventually(lambda: len(held.peers) == 2, "another replica asks", 30)
        held.may_step = lambda num_tokens: True
        assert [chunk async for chunk in call][-1].HasField("finished")


async def test_with_no_replica_left_a_stranger_waits_for_one(running: Running, held: Watched) -> None:
    """Serve starts new ones; the time to come back that HAProxy names is meant for that."""
    await eventually(lambda: len(running.replicas()) == NUM_REPLICAS, "all replicas run", 60)
    for each in running.replicas():
        each.kill()
    async with stranger_of(running) as stranger:
        found = await asyncio.gather(*(stranger.ask("import", 6, index % 2 == 0) for index in range(4)))
    print([(seen.ending, seen.statuses, seen.detail, seen.longest_wait_s) for seen in found])
    assert {seen.ending for seen in found} == {Ending.COMPLETE}, found
