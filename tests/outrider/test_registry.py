"""Leases and snapshots on a real Redis, including the times when it is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from outrider import registry as registry_module
from outrider.errors import RegistryUnavailable
from outrider.redis_server import EmbeddedRedis
from outrider.registry import Registry, WorkerDirectory, WorkerLease, WorkerRecord

RECORD = WorkerRecord(
    worker_id="t0",
    pool="target",
    address="127.0.0.1:7000",
    incarnation="a",
    model_name="demo",
    tokenizer_fingerprint="0123456789abcdef",
    vocab_size=4096,
    max_model_len=1024,
    max_num_seqs=8,
    dtype="bfloat16",
    num_model_parameters=14_000_000,
)


def no_load() -> tuple[int, int]:
    return 0, 0


async def eventually(condition: Callable[[], Any], what: str, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    yield server.start()
    server.stop()


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushall()
    registry = Registry(redis_url)
    yield registry
    await registry.close()


@pytest.fixture
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "LEASE_S", 0.3)
    monkeypatch.setattr(registry_module, "HEARTBEAT_S", 0.05)


class TestWorkerRecord:
    def test_a_stored_record_reads_back(self) -> None:
        assert WorkerRecord.from_fields(RECORD.to_fields()) == RECORD

    @pytest.mark.parametrize(
        "changes",
        [
            {"worker_id": ""},
            {"worker_id": "x" * 65},
            {"pool": "other"},
            {"state": "asleep"},
            {"address": "nowhere"},
            {"max_num_seqs": 0},
        ],
    )
    def test_values_out_of_bounds_are_refused(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(changes))):
            replace(RECORD, **changes)


class TestRegistry:
    async def test_an_unreachable_redis_is_named_without_its_password(self) -> None:
        registry = Registry("redis://user:secret@127.0.0.1:1/0")
        with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:1") as caught:
            await registry.ping()
        assert "secret" not in caught.value.message
        assert "OUTRIDER_REDIS_URL" in caught.value.message
        await registry.close()

    async def test_a_call_on_a_redis_that_hangs_fails_within_bounds(self) -> None:
        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(64):
                pass
            writer.close()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        registry = Registry(f"redis://127.0.0.1:{port}/0")
        started_s = time.monotonic()
        with pytest.raises(RegistryUnavailable):
            await registry.ping()
        assert time.monotonic() - started_s < 4
        await registry.close()
        server.close()

    async def test_a_record_that_cannot_be_read_is_left_out(
        self, registry: Registry, redis_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        await registry.write(RECORD, is_claim=True)
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.hset("{or:target}:w:odd", mapping={"worker_id": "odd"})
            await client.sadd("{or:target}:ids", "odd")
        with caplog.at_level(logging.WARNING):
            assert await registry.read("target") == (RECORD,)
        assert "odd" in caplog.text

    async def test_pools_do_not_mix(self, registry: Registry) -> None:
        draft = replace(RECORD, pool="draft", worker_id="d0")
        await registry.write(RECORD, is_claim=True)
        await registry.write(draft, is_claim=True)
        assert await registry.read("target") == (RECORD,)
        assert await registry.read("draft") == (draft,)


class TestWorkerLease:
    async def test_a_worker_is_listed_while_its_lease_is_held(self, registry: Registry) -> None:
        async with WorkerLease(registry, RECORD, no_load) as lease:
            assert lease.is_published
            assert await registry.read("target") == (RECORD,)
        assert await registry.read("target") == ()

    @pytest.mark.usefixtures("quick_heartbeats")
    async def test_heartbeats_outlast_the_lease_and_carry_the_load(self, registry: Registry) -> None:
        load = (0, 0)
        async with WorkerLease(registry, RECORD, lambda: load):
            load = (3, 2)
            await asyncio.sleep(0.6)
            (seen,) = await registry.read("target")
        assert (seen.num_running, seen.num_waiting) == (3, 2)

    @pytest.mark.usefixtures("quick_heartbeats")
    async def test_a_worker_that_vanished_drops_out_when_its_lease_ends(self, registry: Registry) -> None:
        await registry.write(RECORD, is_claim=True)
        assert await registry.read("target") == (RECORD,)
        await asyncio.sleep(0.4)
        assert await registry.read("target") == ()

    async def test_draining_is_announced_at_once(self, registry: Registry) -> None:
        async with (
            WorkerLease(registry, RECORD, no_load) as lease,
            WorkerDirectory(registry, 0.02) as directory,
        ):
            lease.set_state("draining")
            await eventually(
                lambda: directory.snapshot.targets == (replace(RECORD, state="draining"),), "draining", 1.0
            )
            assert lease.is_published

    @pytest.mark.usefixtures("quick_heartbeats")
    async def test_a_restarted_worker_takes_its_id_over_for_good(self, registry: Registry) -> None:
        async with WorkerLease(registry, RECORD, no_load) as old:
            newer = replace(RECORD, incarnation="b", address="127.0.0.1:7001")
            async with WorkerLease(registry, newer, no_load):
                await eventually(lambda: old.is_superseded, "the old one noticed")
                assert await registry.read("target") == (newer,)
        assert await registry.read("target") == ()

    async def test_leaving_does_not_remove_another_incarnation(self, registry: Registry) -> None:
        newer = replace(RECORD, incarnation="b")
        async with WorkerLease(registry, RECORD, no_load):
            await registry.write(newer, is_claim=True)
        assert await registry.read("target") == (newer,)


@pytest.mark.usefixtures("quick_heartbeats")
async def test_redis_going_away_and_coming_back_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "LEASE_S", 5.0)
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    port, password = int(url.rpartition(":")[2].partition("/")[0]), url.split(":")[2].partition("@")[0]
    registry = Registry(url)
    async with WorkerLease(registry, RECORD, no_load), WorkerDirectory(registry, 0.05) as directory:
        assert not directory.snapshot.degraded
        await asyncio.to_thread(server.stop)
        await eventually(lambda: directory.snapshot.degraded, "the directory noticed")
        assert directory.snapshot.targets == (RECORD,), "the last snapshot stays"
        monkeypatch.setattr("outrider.redis_server._free_port", lambda: port)
        monkeypatch.setattr("outrider.redis_server.secrets.token_hex", lambda size: password)
        again = EmbeddedRedis(tmp_path)
        await asyncio.to_thread(again.start)
        await eventually(lambda: not directory.snapshot.degraded, "the directory noticed the return")
        assert directory.snapshot.targets == (RECORD,), "known from before, though the new Redis is empty"
        await asyncio.sleep(0.3)  # a few backoffs
        assert await registry.read("target") == (RECORD,), "the worker announced itself again"
    await registry.close()
    again.stop()


async def test_a_worker_starts_without_redis_and_announces_itself_later(tmp_path: Path) -> None:
    registry = Registry("redis://127.0.0.1:1/0")
    started_s = time.monotonic()
    async with WorkerLease(registry, RECORD, no_load) as lease:
        assert not lease.is_published
    assert time.monotonic() - started_s < 3
    await registry.close()
