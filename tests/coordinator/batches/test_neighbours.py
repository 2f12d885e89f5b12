"""A batch costs others little: ordinary requests, other tenants' batches, the event loop and the storage."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.access.api_keys import ANYBODY, Caller, Scope
from coordinator.api.http.application import create_app
from coordinator.api.http.line_calls import ENDPOINTS, LineCalls
from coordinator.batches import batch_lines, batch_results, batch_runner, line_journal
from coordinator.batches.batch import Batch, BatchState
from coordinator.batches.batch_desk import BatchDesk
from coordinator.batches.batch_lines import LINE_BYTES_MAX, LineResult, read_line, result_line
from coordinator.batches.batch_runner import BatchRunner
from coordinator.batches.file_store import FolderStore
from coordinator.batches.files import Files
from coordinator.batches.line_journal import LineJournal
from outrider.errors import InvalidRequest, Unavailable
from outrider.registry.registry import Registry
from tests.coordinator.batches.desks import ENDPOINT, EchoLines, created, desk_over, line, lines, names_in, until
from tests.coordinator.batches.test_batch_calls import chat, create, ended
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import eventually

MANY, ONE = Caller("many", frozenset(Scope)), Caller("one", frozenset(Scope))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_results, "WAIT_S", 0.05)
    monkeypatch.setattr(batch_results, "LOOK_S", 0.02)


@pytest.fixture
def desk(registry: Registry, tmp_path: Path) -> BatchDesk:
    return desk_over(registry, tmp_path, lease_s=0.5)


def over(batch: Batch) -> bool:
    return batch.is_over


async def stored_names(registry: Registry) -> list[str]:
    """Names of content that is announced in Redis."""
    script = registry.register_script("return redis.call('ZRANGE', KEYS[1], 0, -1)")
    return list(await registry.ask(script(keys=["or:files:stored"], args=[])))


class TestOrdinaryRequests:
    @asynccontextmanager
    async def serving(
        self, clusters: ClusterFactory, registry: Registry, folder: Path, *, num_slots: int, **settings: Any
    ) -> AsyncIterator[Cluster]:
        target = clusters.target(step_s=0.02)
        async with clusters.open([target], settings=settings, max_num_seqs=num_slots) as cluster:
            desk = BatchDesk(Files(registry, FolderStore(folder), 1 << 30), LineJournal(registry), tuple(ENDPOINTS))
            transport = httpx.ASGITransport(create_app(cluster.service, desk))
            async with (
                httpx.AsyncClient(transport=transport, base_url="http://coordinator", timeout=30) as client,
                BatchRunner(desk, LineCalls(cluster.service), poll_s=0.05),
            ):
                cluster.client = client
                yield cluster

    async def test_are_served_beside_lines_of_many_sequences(
        self, clusters: ClusterFactory, registry: Registry, tmp_path: Path
    ) -> None:
        """32 of 64 slots are free, and so is the replica's room for requests."""
        async with self.serving(clusters, registry, tmp_path, num_slots=64, requests_max=64) as cluster:
            content = b"".join(chat(f"r{number}", n=8, max_tokens=900) for number in range(40))
            batches = [await create(cluster, content) for _ in range(3)]
            target = cluster.targets[0]
            await eventually(lambda: target.num_open >= 32, "lines run")
            answers = await asyncio.gather(*(cluster.complete(max_tokens=4) for _ in range(30)))
            assert [answer.status_code for answer in answers] == [200] * 30
            assert target.num_open <= 32, "all batches together have one room"
            for batch in batches:
                await cluster.client.post(f"/v1/batches/{batch['id']}/cancel")
            for batch in batches:
                await ended(cluster, batch)

    async def test_are_served_beside_lines_of_many_prompts(
        self, clusters: ClusterFactory, registry: Registry, tmp_path: Path
    ) -> None:
        async with self.serving(clusters, registry, tmp_path, num_slots=32, requests_max=32) as cluster:
            body = {"prompt": ["a"] * 8, "n": 2, "max_tokens": 900, "temperature": 0}
            content = b"".join(line(f"r{number}", body=body) + b"\n" for number in range(20))
            batch = await create(cluster, content, ENDPOINT)
            await eventually(lambda: cluster.targets[0].num_open >= 16, "a line runs")
            answers = await asyncio.gather(*(cluster.complete(max_tokens=4) for _ in range(16)))
            assert [answer.status_code for answer in answers] == [200] * 16
            assert cluster.targets[0].num_open <= 16
            await cluster.client.post(f"/v1/batches/{batch['id']}/cancel")
            await ended(cluster, batch)


class TestOtherTenants:
    async def test_run_beside_one_with_as_many_batches_as_it_may_have(self, desk: BatchDesk) -> None:
        num = line_journal.OPEN_MAX
        service = EchoLines(room=4, fail={"r0": [Unavailable("no target", 0.05)] * 99_999})
        for _ in range(num):
            await created(desk, lines(1), MANY)
        other = await created(desk, line("other") + b"\n", ONE)
        assert other.batch_id in (await desk.journal.active())[:2]
        async with BatchRunner(desk, service, poll_s=0.05):
            done = await until(desk, other, over)
        assert (done.state, done.counts.num_completed) == (BatchState.COMPLETED, 1)

    async def test_are_in_turn_also_when_some_have_ended(self, desk: BatchDesk) -> None:
        made: dict[str, list[str]] = {"many": [], "one": []}
        for caller, num in ((MANY, 3), (ONE, 2)):
            for _ in range(num):
                made[str(caller.tenant)].append((await created(desk, lines(1), caller)).batch_id)
                await asyncio.sleep(0.002)  # times are in ms
        many, one = made["many"], made["one"]
        assert await desk.journal.active() == [many[0], one[0], many[1], one[1], many[2]]
        await desk.journal.retire(many[0], "many")
        assert await desk.journal.active() == [many[1], one[0], many[2], one[1]]

    async def test_have_their_part_of_the_room(self, desk: BatchDesk) -> None:
        service = EchoLines(room=4)
        service.gate.clear()
        for _ in range(6):
            await created(desk, lines(9), MANY)
        async with BatchRunner(desk, service, poll_s=0.05) as runner:
            await eventually(lambda: service.num_running == 4, "one tenant has the room while it is alone")
            await created(desk, b"".join(line(f"other {number}") + b"\n" for number in range(9)), ONE)
            waiting = runner._room._waiting
            await eventually(lambda: sum(turn.batch.tenant == "one" for turn in waiting) == 2, "it waits for its half")
            service.gate.set()
            await eventually(lambda: len(service.runs) >= 6, "lines end, and others begin")
        assert sorted(service.runs[4:6]) == ["other 0", "other 1"]
        assert service.most == 4


class TestSequences:
    async def test_of_all_batches_fit_the_room(self, desk: BatchDesk) -> None:
        service = EchoLines(room=10, delay_s=0.005)
        content = b"".join(line(f"r{n}", body={"prompt": f"r{n}", "n": 1 + n % 8}) + b"\n" for n in range(40))
        batches = [await created(desk, content) for _ in range(3)]
        service.gate.clear()
        async with BatchRunner(desk, service, poll_s=0.05):
            # In whatever order they come, nothing passes the next one, which needs eight at most.
            await eventually(lambda: service.num_running > 10 - 8, "no more room is left than a line may need", 30)
            service.gate.set()
            for batch in batches:
                assert (await until(desk, batch, over)).counts.num_completed == 40
        assert service.most <= 10

    async def test_of_a_line_beyond_the_room_run_alone(self, desk: BatchDesk) -> None:
        service = EchoLines(room=4, delay_s=0.005)
        content = lines(20) + line("large", body={"prompt": "large", "n": 64}) + b"\n" + line("last")
        batch = await created(desk, content)
        async with BatchRunner(desk, service, poll_s=0.05):
            assert (await until(desk, batch, over)).counts.num_completed == 22
        assert service.most == 64


class TestTheEventLoop:
    def test_is_not_given_a_line_that_takes_long_to_parse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(json, "loads", lambda text: pytest.fail(f"{len(text)} characters are parsed"))
        for small in (b"[],", b"1,", b'"a":1,'):
            with pytest.raises(InvalidRequest, match="too much JSON"):
                read_line(b'{"custom_id": [' + small * ((LINE_BYTES_MAX - 100) // len(small)) + b"1]}")

    async def test_reads_no_line_itself(self, desk: BatchDesk, monkeypatch: pytest.MonkeyPatch) -> None:
        threads: set[int] = set()

        def seen(raw: bytes) -> batch_lines.BatchLine:
            threads.add(threading.get_ident())
            return read_line(raw)

        monkeypatch.setattr(batch_runner, "read_line", seen)
        batch = await created(desk, lines(3))
        async with BatchRunner(desk, EchoLines(), poll_s=0.05):
            await until(desk, batch, over)
        assert threads
        assert threading.get_ident() not in threads

    async def test_errors_of_a_check_are_short(self, desk: BatchDesk) -> None:
        content = b"".join(line("a", **{"x" * 100_000: 1}) + b"\n" for _ in range(20))
        batch = await created(desk, content)
        async with BatchRunner(desk, EchoLines(), poll_s=0.05):
            done = await until(desk, batch, over)
        assert len(done.errors) == 20
        assert len(json.dumps(done.errors)) < 20_000


class TestTheStorage:
    @pytest.mark.parametrize("ends", ["cancelled", "time is up"])
    async def test_has_nothing_of_a_batch_that_ended_while_it_was_checked(
        self, desk: BatchDesk, registry: Registry, tmp_path: Path, ends: str
    ) -> None:
        may_go_on, has_begun = threading.Event(), threading.Event()

        class Slow(EchoLines):
            def check_body(self, batch: Batch, url: str, body: bytes) -> None:
                has_begun.set()
                assert may_go_on.wait(30)

        batch = await created(desk, lines(3))
        async with BatchRunner(desk, Slow(), poll_s=0.05) as runner:
            await eventually(has_begun.is_set, "the file is being checked")
            if ends == "cancelled":
                ((_, checking),) = runner._batch_tasks._tasks.values()
                await desk.cancel(ANYBODY, batch.batch_id)
                await eventually(lambda: checking.cancelling() > 0, "its check has been cancelled", 30)
            else:  # as another process would say that takes this one for dead
                await desk.journal.move(batch.batch_id, BatchState.FAILED)
            may_go_on.set()
            await until(desk, batch, over)
            await eventually(lambda: len(names_in(tmp_path)) == 1, "only its file is left")
            for _ in range(500):
                if len(await stored_names(registry)) == 1:
                    break
                await asyncio.sleep(0.02)
        (name,) = await stored_names(registry)
        assert name.startswith("files/")

    async def test_keeps_a_bounded_number_of_batches_that_are_over(
        self, desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(line_journal, "KEPT_MAX", 3)
        running = await created(desk, lines(1), MANY)
        ids = []
        for _ in range(5):
            ended_one = await created(desk, lines(1), MANY)
            await desk.journal.move(ended_one.batch_id, BatchState.FAILED)
            await desk.journal.retire(ended_one.batch_id, "many")
            ids.append(ended_one.batch_id)
            await asyncio.sleep(0.002)
        kept = [batch.batch_id for batch in await desk.page(MANY, "", 10)]
        assert kept == [ids[4], ids[3], running.batch_id], "the oldest is not over, and stays"
        assert await desk.journal.get(ids[0]) is None


class TestClocks:
    @pytest.mark.parametrize("hours", [25, -25])
    async def test_of_a_replicas_host_end_no_batch(
        self, desk: BatchDesk, monkeypatch: pytest.MonkeyPatch, hours: int
    ) -> None:
        batch, clock = await created(desk, lines(20)), time.time
        monkeypatch.setattr(time, "time", lambda: clock() + 3600 * hours)
        created_there = await created(desk, lines(3))
        assert abs(created_there.created_at - batch.created_at) < 3600
        async with BatchRunner(desk, EchoLines(), poll_s=0.05):
            done = await until(desk, batch, over)
        assert (done.state, done.counts.num_completed) == (BatchState.COMPLETED, 20)
        file = await desk.files.get(None, str(done.output_file_id))
        assert abs(file.created_at - batch.created_at) < 3600


class TestHalvesOfCharacters:
    @pytest.mark.parametrize(
        ("raw", "parameter"),
        [
            (line("a\ud800"), "custom_id"),
            (line("a", body={"prompt": "\udfff"}), "body"),
            (line("a", url="\ud83d"), "url"),
            (line("a", **{"\ud83d": 1}), None),
        ],
    )
    def test_are_refused_by_the_field(self, raw: bytes, parameter: str | None) -> None:
        with pytest.raises(InvalidRequest, match="unpaired surrogate") as refused:
            read_line(raw)
        assert refused.value.parameter == parameter
        refused.value.message.encode()

    def test_that_are_a_whole_one_together_are_taken(self) -> None:
        assert read_line(line("\U0001f600")).custom_id == "\U0001f600"

    def test_come_back_as_they_were(self) -> None:
        """An earlier version may have checked the batch."""
        ids = ["\ud800", "\udc00"]
        found = [json.loads(result_line("batch_1", 0, each, LineResult(200, "r", {}))) for each in ids]
        assert [each["custom_id"] for each in found] == ids

    async def test_leave_the_list_of_batches_whole(
        self, clusters: ClusterFactory, registry: Registry, tmp_path: Path
    ) -> None:
        serving = TestOrdinaryRequests().serving(clusters, registry, tmp_path, num_slots=8)
        async with serving as cluster:
            raw = chat("a")[:-2] + b', "\\ud83d": 1}\n'
            batch = await ended(cluster, await create(cluster, raw))
            assert batch["status"] == "failed"
            assert (await cluster.client.get("/v1/batches")).status_code == 200
