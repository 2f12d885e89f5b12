"""Certificates change under a Redis behind TLS, a gRPC server and those who call both: nobody is shut out."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from coordinator.workers.channels import WorkerChannels
from outrider.errors import RegistryUnavailable
from outrider.registry.registry import Registry
from outrider.security.tls import Dialer, TlsFiles
from protos.outrider.v1 import common_pb2, target_pb2_grpc
from tests.e2e.chaos import faults_of_certificates
from tests.e2e.chaos.certificates import OPERATOR, Certificates
from tests.e2e.chaos.fault import Fault
from tests.e2e.chaos.faults_of_certificates import (
    AuthorityChanges,
    CertificatesRenewed,
    RedisCertificateRunsOut,
)
from tests.e2e.chaos.ledger import Injection
from tests.e2e.chaos.redis_front import RedisBehindTls

pytestmark = pytest.mark.thorough
TARGET = "target-0"
EVERY_S = 0.05


class Target(target_pb2_grpc.TargetServicer):
    """Says who it is."""

    async def GetInfo(self, request: common_pb2.GetInfoRequest, context: object) -> common_pb2.WorkerInfo:
        return common_pb2.WorkerInfo(incarnation="a")


@dataclass
class Parts:
    """A fleet of one target, and what its coordinator meets."""

    certificates: Certificates
    redis: RedisBehindTls
    num_calls: int = 0
    refused_s: list[float] = field(default_factory=list)  # calls of the target that failed, by when
    away_s: list[float] = field(default_factory=list)  # of Redis
    surprises: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers = {TARGET: None}
        self.public_authority = self.certificates.authority
        self.balancer = SimpleNamespace(reload=lambda: None)
        self.balancer_lock = asyncio.Lock()


@asynccontextmanager
async def parts() -> AsyncIterator[Parts]:
    folder = Path(tempfile.mkdtemp(prefix="crt-", dir="/tmp"))  # sockets' names are bounded
    certificates = Certificates(folder / "certificates")
    for name in ("coordinator", OPERATOR, TARGET):
        certificates.issue(name)
    both = Parts(certificates, RedisBehindTls(folder, certificates))
    await both.redis.start()
    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServicer_to_server(Target(), server)
    credentials = TlsFiles(certificates.folder(TARGET)).server_credentials()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    channels = WorkerChannels(Dialer(TlsFiles(certificates.folder("coordinator"))))
    registry = Registry(both.redis.url_for("coordinator"))

    async def call_target() -> None:
        address = f"127.0.0.1:{port}"
        while True:
            both.num_calls += 1
            if not await channels.has_incarnation(address, "a", 2.0):
                both.refused_s.append(time.monotonic())
            await channels.forget_all_but([address], time.monotonic(), 3.0)
            await asyncio.sleep(EVERY_S)

    async def call_redis() -> None:
        while True:
            try:
                await registry.ping()
            except RegistryUnavailable:
                both.away_s.append(time.monotonic())
            await asyncio.sleep(EVERY_S)

    calling = [asyncio.create_task(call_target()), asyncio.create_task(call_redis())]
    try:
        yield both
    finally:
        for task in calling:
            task.cancel()
        await asyncio.gather(*calling, return_exceptions=True)
        await channels.close()
        await registry.close()
        await server.stop(None)
        await both.redis.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def run(kind: type[Fault], fleet: Parts, seed: int = 1) -> None:
    await kind(cast(Any, fleet), cast(Any, None), Random(seed), Injection(1, kind.name, 0.0)).run(None)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", [AuthorityChanges, CertificatesRenewed], ids=["authority", "in time"])
async def test_whoever_replaces_certificates_in_time_shuts_nobody_out(kind: type[Fault]) -> None:
    async with parts() as fleet:
        await run(kind, fleet)
        await asyncio.sleep(1.0)
        assert fleet.num_calls > 100
        assert not fleet.refused_s
        assert len(fleet.away_s) < 40, "while its front is started anew, and no longer"
        before = len(fleet.away_s)
        await asyncio.sleep(1.0)
        assert len(fleet.away_s) == before
        begins_at = fleet.certificates.authority.certificate.not_valid_before_utc
        assert datetime.now(UTC) - begins_at > timedelta(hours=1.5), "a clock may be an hour late"


@pytest.mark.timeout(180)
async def test_a_certificate_that_has_run_out_shuts_everybody_out_until_there_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults_of_certificates, "SEEN_S", 1.0)
    async with parts() as fleet:
        await asyncio.sleep(0.5)
        assert not fleet.away_s
        await run(RedisCertificateRunsOut, fleet)
        assert len(fleet.away_s) > 5
        async with asyncio.timeout(20):
            while not fleet.away_s or time.monotonic() - fleet.away_s[-1] < 1.0:  # noqa: ASYNC110
                await asyncio.sleep(EVERY_S)
        assert not fleet.refused_s, "the target's is another"
