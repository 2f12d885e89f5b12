"""Which worker a certificate is of, on real TLS: nobody draws requests under names that are not theirs."""

from __future__ import annotations

import asyncio
import datetime
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from coordinator.intake.generation_request import GenerationInput
from coordinator.request.environment import Outside
from coordinator.service.generation_service import GenerationService
from coordinator.settings import CoordinatorSettings
from coordinator.workers import worker_identity
from coordinator.workers.worker_identity import WorkerIdentities, judge
from outrider.errors import Unavailable
from outrider.registry.worker_record import Snapshot, WorkerRecord
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role, TlsFiles, worker_name
from protos.outrider.v1 import target_pb2_grpc
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeTarget, eventually, record_of

DAY = datetime.timedelta(days=1)
TARGET = Role.TARGET.value


class Fleet:
    """Targets with certificates, and the coordinator's own."""

    def __init__(self, folder: Path, clusters: ClusterFactory) -> None:
        self.folder, self.clusters = folder, clusters
        self.authority = CertificateAuthority.make()
        self.authority.issue(folder / "coordinator", Role.COORDINATOR, valid_for=DAY)
        self.files = TlsFiles(folder / "coordinator")

    def certificate(self, *worker_ids: str, role: Role = Role.TARGET) -> Path:
        folder = self.folder / "-".join((role.name, *worker_ids))
        self.authority.issue(folder, role, worker_ids=worker_ids, valid_for=DAY)
        return folder

    @asynccontextmanager
    async def target(
        self, *worker_ids: str, role: Role = Role.TARGET, port: int = 0
    ) -> AsyncIterator[tuple[FakeTarget, str]]:
        """One whose certificate names these ids, and its address."""
        worker, server = self.clusters.target(), grpc.aio.server()
        target_pb2_grpc.add_TargetServicer_to_server(worker, server)
        files = TlsFiles(self.certificate(*worker_ids, role=role))
        port = server.add_secure_port(f"127.0.0.1:{port}", files.server_credentials())
        await server.start()
        try:
            yield worker, f"127.0.0.1:{port}"
        finally:
            await server.stop(None)

    def record(self, worker_id: str, address: str, **changes: Any) -> WorkerRecord:
        return record_of("target", address, self.clusters.tokenizer.fingerprint, worker_id=worker_id, **changes)

    @asynccontextmanager
    async def service(self, *targets: WorkerRecord, **settings: Any) -> AsyncIterator[GenerationService]:
        made = CoordinatorSettings(
            tokenizer_dir=str(self.clusters.model_dir),
            redis_url="unused",
            tls_dir=str(self.folder / "coordinator"),
            **settings,
        )
        outside = replace(Outside.real(made), chance=random.Random(1))
        async with GenerationService(made, lambda: Snapshot(targets), outside) as service:
            yield service


@pytest.fixture
def fleet(tmp_path: Path, clusters: ClusterFactory) -> Fleet:
    return Fleet(tmp_path, clusters)


def reasons(service: GenerationService) -> dict[str, str]:
    return {each.worker_id: each.reason for each in service.catalog.exclusions()}


async def generate(service: GenerationService, text: str) -> None:
    spec = await service.prepare(GenerationInput(request_id=text, text=text, max_tokens=2))
    async for _ in service.generate(spec, service.environment.now_s()):
        pass


@pytest.mark.parametrize(
    ("names", "requires_ids", "complaint"),
    [
        ({TARGET}, False, None),
        ({TARGET}, True, "names no worker id"),
        ({TARGET, f"*.{TARGET}"}, False, None),
        ({TARGET, f"*.{TARGET}"}, True, "names no worker id"),
        ({TARGET, worker_name(Role.TARGET, "t0")}, True, None),
        ({TARGET, worker_name(Role.TARGET, "t1"), worker_name(Role.TARGET, "t0")}, True, None),
        ({TARGET, worker_name(Role.TARGET, "t1")}, False, f"of t1.{TARGET}, and of no worker t0"),
        ({worker_name(Role.TARGET, "t0")}, False, f"and not {TARGET}"),
        ({Role.DRAFT.value}, False, f"and not {TARGET}"),
        (set(), False, "names nobody"),
    ],
)
def test_a_certificate_is_of_the_workers_that_it_names(
    names: set[str], requires_ids: bool, complaint: str | None
) -> None:
    record = record_of("target", "h:1", "f", worker_id="t0")
    reason = judge(record, frozenset(names), requires_ids=requires_ids)
    assert reason is None if complaint is None else complaint in str(reason)


def test_ids_that_are_no_dns_labels_have_names_that_are_not_each_others() -> None:
    ids = ["t0", "T0", "t0.a", "t 0", "t/0", "-t0", "t0-", "x" * 64, "ü", "*", ""]
    ids += [worker_name(Role.TARGET, "T0").partition(".")[0]]
    names = [worker_name(Role.TARGET, each) for each in ids]
    assert len(set(names)) == len(names)
    for name in names:
        label, _, rest = name.partition(".")
        assert rest == TARGET
        assert 1 <= len(label) <= 63
        assert label == label.lower()


async def test_a_target_that_was_taken_over_draws_no_requests_under_other_ids(fleet: Fleet) -> None:
    async with fleet.target("honest") as (honest, its_address), fleet.target("evil") as (evil, address):
        names = [f"more-{number}" for number in range(20)]
        forged = [fleet.record(name, address) for name in names]
        # Records that take an id from its owner come with the attacker's address as well.
        records = [fleet.record("honest", its_address), fleet.record("evil", address), *forged]
        async with fleet.service(*records) as service:
            assert set(reasons(service)) == set(names)
            assert all(f"of evil.{TARGET}" in reason for reason in reasons(service).values())
            for number in range(24):
                await generate(service, f"import {number}")
        served = Counter(honest=len(honest.requests), evil=len(evil.requests))
        assert served.total() == 24
        assert served["honest"] >= 4, "two targets, the better of both by load, and by chance among equals"


async def test_an_id_is_not_taken_over_by_a_record_with_another_address(fleet: Fleet) -> None:
    async with fleet.target("evil") as (evil, address):
        async with fleet.service(fleet.record("honest", address)) as service:
            with pytest.raises(Unavailable, match="of no worker honest"):
                await generate(service, "import")
        assert evil.requests == []


async def test_a_certificate_that_names_nobody_is_for_any_worker_unless_ids_are_required(
    fleet: Fleet,
) -> None:
    async with fleet.target() as (target, address), fleet.target("t1") as (_, other):
        records = fleet.record("t0", address), fleet.record("t1", other)
        async with fleet.service(records[0]) as service:
            await generate(service, "import")
        assert len(target.requests) == 1
        async with fleet.service(*records, require_worker_ids=True) as service:
            assert list(reasons(service)) == ["t0"]
            assert "--require-worker-ids" in reasons(service)["t0"]
            await generate(service, "import")
        assert len(target.requests) == 1


async def test_one_address_is_one_worker(fleet: Fleet) -> None:
    async with fleet.target() as (_, address):
        records = [fleet.record(f"t{number}", address) for number in range(3)]
        async with fleet.service(*records) as service:
            assert len(reasons(service)) == 2
            assert all("its address is that of" in reason for reason in reasons(service).values())


async def test_a_worker_is_used_once_it_has_shown_its_certificate(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_identity, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(worker_identity, "RETRY_S", (0.0, 0.0))
    async with fleet.target("t0") as (_, address):
        silent = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        place = "{}:{}".format(*silent.sockets[0].getsockname())
        seen: list[WorkerRecord] = [fleet.record("t0", place)]
        async with WorkerIdentities(fleet.files, lambda: 0.0).watch(lambda: Snapshot(tuple(seen))) as identities:
            assert "cannot be seen" in str(identities.reason_against(seen[0]))
            assert (
                identities.reason_against(replace(seen[0], worker_id="t9")) == "its certificate has not been seen yet"
            )
            seen[:] = [fleet.record("t0", address)]
            assert identities.reason_against(seen[0]) is not None
            await eventually(lambda: identities.reason_against(seen[0]) is None, "it was looked at", 20.0)
            assert identities.name_at(address, Role.TARGET) == f"t0.{TARGET}"
        silent.close()


async def test_a_draft_worker_is_no_target(fleet: Fleet) -> None:
    async with (
        fleet.target(role=Role.DRAFT) as (_, address),
        fleet.service(fleet.record("t0", address)) as service,
    ):
        assert TARGET in reasons(service)["t0"]


@pytest.mark.thorough
async def test_whoever_shows_another_certificate_later_is_not_talked_to(fleet: Fleet) -> None:
    async with AsyncExitStack() as stack:
        async with fleet.target("t0") as (_, address):
            # A quarantine that no wait outlasts: one refusal shows it.
            limits = {"quarantine_s": 60.0, "queue_wait_max_s": 2.0, "target_wait_max_s": 2.0}
            service = await stack.enter_async_context(fleet.service(fleet.record("t0", address), **limits))
            assert reasons(service) == {}
        port = int(address.rpartition(":")[2])
        evil, _ = await stack.enter_async_context(fleet.target("evil", port=port))
        with pytest.raises(Unavailable):
            await generate(service, "import")
        assert evil.requests == []


async def test_records_without_end_take_no_more_than_a_few_handshakes_at_a_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looks: Counter[str] = Counter()
    now_s = [0.0]

    async def look(self: WorkerIdentities, worker: WorkerRecord) -> tuple[None, str]:
        num_looks[worker.worker_id] += 1
        return None, "no"

    monkeypatch.setattr(WorkerIdentities, "_names_at", look)
    records = tuple(fleet.record(f"t{number}", f"h:{number + 1}") for number in range(300))
    identities = WorkerIdentities(fleet.files, lambda: now_s[0]).watch(lambda: Snapshot(records))
    await identities.look()
    assert 0 < num_looks.total() <= 64
    for _ in range(100):
        await identities.look()
    assert num_looks.total() == 300, "each has been looked at, and none again before its time"
    for _ in range(100):
        now_s[0] += 8.0
        await identities.look()
    assert max(num_looks.values()) <= 800 / 32 + 10


def test_without_certificates_everybody_is_who_they_say(fleet: Fleet) -> None:
    identities = WorkerIdentities(None, lambda: 0.0)
    assert identities.reason_against(fleet.record("t0", "h:1")) is None
    assert identities.name_at("h:1", Role.TARGET) == TARGET


def test_ids_cannot_be_required_without_certificates() -> None:
    with pytest.raises(ValueError, match="require_worker_ids needs tls_dir"):
        CoordinatorSettings(tokenizer_dir=".", redis_url="unused", require_worker_ids=True)
