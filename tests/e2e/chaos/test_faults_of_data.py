"""Tests of the effects of data faults on a real Redis, and of how the product's own readers handle them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis.asyncio

from command_line.checkout import DEMO_TARGET
from coordinator.recovery.journal import Journal
from coordinator.recovery.journal_entry import JournalEntry
from coordinator.workers.worker_directory import WorkerDirectory
from outrider.engine.loading.checkpoint_fingerprint import checkpoint_fingerprint
from outrider.registry.registry import Registry
from outrider.registry.worker_lease import WorkerLease
from outrider.registry.worker_record import Pool, WorkerLoad, WorkerRecord
from tests.coordinator.fakes import record_of
from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.fault import Fault
from tests.e2e.chaos.faults_of_data import JournalCorrupted, OtherTarget, WorkerRecordsCorrupted
from tests.e2e.chaos.ledger import Injection
from tests.e2e.chaos.verdict import Answer, Right

RECORD = record_of("target", "127.0.0.1:7000", "0123456789abcdef", worker_id="target-0")
ENTRY = JournalEntry("completions", b'{"prompt": "x"}', "0" * 12, seed=7, max_tokens=500)


class FakeReplica:
    """Notes that it was killed."""

    def __init__(self) -> None:
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


class FakeFleet:
    """The parts of a fleet that these faults use."""

    def __init__(self, redis_url: str, records: list[WorkerRecord]) -> None:
        self.redis = SimpleNamespace(url=redis_url)
        self.workers = {
            each.worker_id: SimpleNamespace(
                name=each.worker_id, role=each.pool, link=SimpleNamespace(address=each.address)
            )
            for each in records
        }
        self.replica = FakeReplica()

    def of_role(self, role: str) -> list[Any]:
        return [worker for worker in self.workers.values() if worker.role == role]

    def replicas(self) -> list[FakeReplica]:
        return [self.replica]


async def run(kind: type[Fault], fleet: FakeFleet, seed: int) -> str:
    """Runs a fault and returns its description of what it has done."""
    injection = Injection(1, kind.name, 0.0)
    await kind(cast(Any, fleet), cast(Any, None), Random(seed), injection).run(None)
    return injection.detail


@asynccontextmanager
async def announced(registry: Registry, records: list[WorkerRecord]) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for record in records:
            lease = WorkerLease(registry, record, WorkerLoad, heartbeat_s=0.3)
            await stack.enter_async_context(lease)
        yield


async def test_damaged_records_cost_a_directory_no_worker(
    registry: Registry, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is missing for longer than heartbeats take, and nobody is believed to be elsewhere but by a record in good
    order, which coordinators check otherwise."""
    monkeypatch.setattr(WorkerRecordsCorrupted, "seconds", (4.0, 4.0))
    ids: list[tuple[Pool, str]] = [
        *[("target", f"target-{index}") for index in range(3)],
        *[("draft", f"draft-{index}") for index in range(2)],
    ]
    records = [
        replace(RECORD, pool=pool, worker_id=name, incarnation=name, address=f"127.0.0.1:{7000 + index}")
        for index, (pool, name) in enumerate(ids)
    ]
    addresses = {each.address for each in records}
    fleet, seen = FakeFleet(redis_url, records), set()
    async with announced(registry, records), WorkerDirectory(registry, refresh_s=0.05) as directory:
        await asyncio.sleep(0.5)
        fault = asyncio.create_task(run(WorkerRecordsCorrupted, fleet, 3))
        while not fault.done():
            snapshot = directory.snapshot
            assert len(snapshot.targets) + len(snapshot.drafts) >= 4
            for each in (*snapshot.targets, *snapshot.drafts):
                (right,) = [record for record in records if record.worker_id == each.worker_id]
                assert replace(each, address=right.address) == right
                assert each.address in addresses
                seen.add(each.address == right.address)
            await asyncio.sleep(0.01)
        assert not (await fault).startswith("0 fields")
        async with asyncio.timeout(10):
            while [*directory.snapshot.targets, *directory.snapshot.drafts] != sorted(  # noqa: ASYNC110
                records, key=lambda each: (each.pool != "target", each.worker_id)
            ):
                await asyncio.sleep(0.05)
    assert True in seen


async def test_a_damaged_journal_is_no_other_stream(
    registry: Registry, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JournalCorrupted, "seconds", (2.0, 2.0))
    fleet, num_read = FakeFleet(redis_url, [RECORD]), 0
    async with Journal(registry, 0.05) as journal:
        streams = [journal.begin(f"r{index}", ENTRY, deadline_s=60) for index in range(10)]
        fault = asyncio.create_task(run(JournalCorrupted, fleet, 5))
        shown = 0
        while not fault.done():
            for stream in streams:
                assert stream is not None
                stream.add(0, [shown], "a" * 12)
            shown += 1
            await asyncio.sleep(0.01)
        for index in range(10):
            entry = await journal.load(f"r{index}")
            if entry is not None:
                num_read += 1
                assert replace(entry, weights_digest=None, token_ids=()) == ENTRY
                for token_ids in entry.token_ids:
                    assert list(token_ids) == list(range(len(token_ids)))
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            ends = [await client.pttl(f"or:journal:r{index}") for index in range(10)]
    assert fleet.replica.is_killed
    assert all(end > 0 for end in ends), "what was damaged still goes by itself"
    assert num_read < 10, "nothing was damaged, so this shows nothing"


class FleetWithNewcomers(FakeFleet):
    """Takes and gives up one more worker; a sleeping process stands for it."""

    def __init__(self) -> None:
        super().__init__("redis://unused", [RECORD])
        self.told: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    async def add_worker(self, role: str, name: str, model: Path, **flags: object) -> SimpleNamespace:
        assert checkpoint_fingerprint(model) != checkpoint_fingerprint(DEMO_TARGET)
        assert model.name == DEMO_TARGET.name, "which is the name that clients ask for"
        self.told.append(f"add {name}")
        self._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return SimpleNamespace(name=name, pid=self._process.pid)

    def send(self, worker: Any, number: signal.Signals) -> None:
        self.told.append(f"{number.name} {worker.name}")
        if self._process is not None and worker.name != "target-0":
            self._process.send_signal(number)
            threading.Thread(target=self._process.wait).start()  # as whoever started it does

    async def retire(self, name: str) -> None:
        self.told.append(f"retire {name}")


@pytest.mark.skipif(not DEMO_TARGET.is_dir(), reason="the demo pair is not in this checkout")
async def test_answers_of_other_weights_are_right_for_as_long_as_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("a", "x", 3)
    rights = {"a": (Right((7, 8, 9), "xyz", "length", None),)}
    monkeypatch.setattr(OtherTarget, "rights", rights)
    monkeypatch.setattr(OtherTarget, "seconds", (0.1, 0.1))
    fleet = FleetWithNewcomers()
    load = SimpleNamespace(other_rights=lambda case, answer: None)
    fault = OtherTarget(cast(Any, fleet), cast(Any, load), Random(1), Injection(1, "other", 0.0))
    before = Answer(time.monotonic(), ended_s=time.monotonic())
    await fault.run(cast(Any, fleet.workers["target-0"]))
    after = Answer(time.monotonic(), ended_s=time.monotonic())
    met = Answer(before.asked_s, ended_s=after.ended_s)
    assert fleet.told == [
        *("add target-other", "SIGKILL target-0", "SIGTERM target-other", "retire target-other"),
    ]
    assert [load.other_rights(case, each) for each in (before, met, after)] == [None, rights["a"], None]
