"""Tests of what clients see when replicas of a coordinator under Ray Serve and HAProxy are lost or leave."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
import pytest_asyncio

from coordinator.settings import Proxy
from outrider.local.free_ports import free_ports
from outrider.local.redis_server import EmbeddedRedis
from outrider.registry.registry import Registry
from outrider.registry.worker_lease import WorkerLease
from outrider.registry.worker_record import WorkerLoad
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeTarget, eventually, record_of, serving
from tests.e2e.chaos.stranger import Ending, Seen, Stranger

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0
NUM_REPLICAS = 2


@dataclass
class Running:
    """A coordinator under Ray Serve, and the fake target behind it."""

    process: asyncio.subprocess.Process
    ready: dict[str, Any]
    target: FakeTarget
    folder: Path  # of Ray's files and HAProxy's

    def replicas(self) -> list[psutil.Process]:
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any("ServeReplica" in word for word in each.cmdline()):
                    found.append(each)
        return found

    def replica_of(self, peer: str) -> psutil.Process:
        """The replica that has called the target from this address."""
        port = int(peer.rpartition(":")[2])
        for each in self.replicas():
            if port in {connection.laddr.port for connection in each.net_connections("tcp")}:
                return each
        raise AssertionError("no replica has this connection")

    async def until_whole(self) -> None:
        """Waits until HAProxy has every replica, for HTTP and for gRPC."""
        await eventually(lambda: self._num_up() == 2 * NUM_REPLICAS, "HAProxy has all replicas", 60)

    def _num_up(self) -> int:
        if len(self.replicas()) != NUM_REPLICAS:
            return 0
        answer = ""
        for path in self.folder.glob("*/s"):
            with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(str(path))
                connection.sendall(b"show stat\n")
                with connection.makefile(errors="replace") as told:
                    answer = told.read()
        header, *lines = answer.removeprefix("# ").splitlines() or [""]
        rows = [dict(zip(header.split(","), line.split(","), strict=False)) for line in lines if line]
        return sum(
            row["type"] == "2" and row["bck"] == "0" and row["status"] == "UP" and "fallback" not in row["pxname"]
            for row in rows
        )


class Watched(FakeTarget):
    """Knows who asks."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(script, held_s_max=60.0)
        self.peers: list[str] = []

    async def Generate(self, request: Any, context: Any) -> Any:
        self.peers.append(context.peer())
        async for event in FakeTarget.Generate(self, request, context):
            yield event


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(clusters: ClusterFactory, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
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
            yield Running(process, json.loads(line), target, temp_dir)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(60):
                    await process.wait()


def stranger_of(running: Running) -> Stranger:
    return Stranger(running.ready["http"], "none", ssl.create_default_context(), model="demo", hung_s=60)


@pytest.fixture
def held(running: Running) -> Iterator[Watched]:
    """The target, which says nothing until it may."""
    target = running.target
    assert isinstance(target, Watched)
    target.peers.clear()
    yield target
    target.may_step = lambda num_tokens: True
    target.step_s = 0.0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_stranger_notices_nothing_where_no_byte_of_the_answer_had_come(
    running: Running, held: Watched, is_streaming: bool
) -> None:
    await running.until_whole()
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


async def test_a_stranger_whose_answer_had_begun_knows_that_it_broke_off(running: Running, held: Watched) -> None:
    await running.until_whole()
    held.may_step = lambda num_tokens: num_tokens < 3
    async with stranger_of(running) as stranger:
        seen = Seen(0.0)
        asking = asyncio.create_task(stranger.ask("import", 60, True, into=seen))
        await eventually(lambda: seen.num_chars > 0, "a part of the answer has come", 20)
        running.replica_of(held.peers[0]).kill()
        await asking
    assert (seen.ending, seen.is_told, seen.statuses) == (Ending.BROKEN_OFF, False, [200]), seen


async def test_a_call_over_grpc_goes_to_another_replica_too(running: Running, held: Watched) -> None:
    await running.until_whole()
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
    await running.until_whole()
    for each in running.replicas():
        each.kill()
    async with stranger_of(running) as stranger:
        found = await asyncio.gather(*(stranger.ask("import", 6, index % 2 == 0) for index in range(4)))
    assert {seen.ending for seen in found} == {Ending.COMPLETE}, found
