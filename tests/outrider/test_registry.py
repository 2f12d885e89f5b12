"""Leases and snapshots on a real Redis, including the times when it is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import redis.asyncio

from benchmarks.shared.delaying_proxy import proxy
from coordinator.workers.worker_directory import WorkerDirectory
from outrider.errors import RegistryUnavailable
from outrider.local.redis_server import EmbeddedRedis
from outrider.registry import worker_record
from outrider.registry.registry import PoolView, Registry, RegistryCalls, check_redis
from outrider.registry.worker_lease import WorkerLease
from outrider.registry.worker_record import Pool, WorkerLoad, WorkerRecord

RECORD = WorkerRecord(
    worker_id="t0",
    pool="target",
    address="127.0.0.1:7000",
    incarnation="a",
    started_at_ms=1000,
    model_name="demo",
    tokenizer_fingerprint="0123456789abcdef",
    vocab_size=4096,
    max_model_len=1024,
    max_num_seqs=8,
    dtype="bfloat16",
    num_model_parameters=14_000_000,
    weights_fingerprint="89abcdef89abcdef89abcdef89abcdef",
    numerics="bfloat16 ranks=1 cpu/avx512-bf16",
    num_speculative_tokens=8,
)


async def eventually(condition: Callable[[], Any], what: str, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.01)


@pytest.fixture
async def quick_registry(registry: Registry, redis_url: str) -> AsyncIterator[Registry]:
    """A registry whose leases end after 0.3 s, for heartbeats of 0.05 s."""
    registry = Registry(redis_url, lease_s=0.3)
    yield registry
    await registry.close()


async def workers(registry: Registry, pool: Pool = "target") -> tuple[WorkerRecord, ...]:
    return (await registry.read(pool)).workers


class TestWorkerRecord:
    def test_a_stored_record_reads_back(self) -> None:
        assert WorkerRecord.from_fields(RECORD.to_fields()) == RECORD

    def test_a_record_of_the_release_before_is_of_unknown_weights_and_numerics(self) -> None:
        stored = RECORD.to_fields()
        for name in ("weights_fingerprint", "numerics", "num_speculative_tokens", "num_background", "check"):
            del stored[name]
        assert WorkerRecord.from_fields(stored) == replace(
            RECORD, weights_fingerprint="", numerics="", num_speculative_tokens=0
        )

    @pytest.mark.parametrize(
        ("name", "absent"),
        [("num_speculative_tokens", 0), ("num_background", 0), ("engine", ""), ("head_fingerprint", "")],
    )
    def test_a_record_without_a_field_that_came_later_has_a_checksum_of_the_rest(self, name: str, absent: Any) -> None:
        stored = RECORD.to_fields()
        del stored[name], stored["check"]
        checked = stored | {"check": worker_record._checksum(stored)}
        known: dict[str, Any] = {name: absent}
        assert WorkerRecord.from_fields(checked) == replace(RECORD, **known)
        lost = RECORD.to_fields()
        del lost[name]
        with pytest.raises(ValueError, match="damaged"):
            WorkerRecord.from_fields(lost)

    def test_a_record_without_any_other_field_is_refused(self) -> None:
        may_lack = {
            "weights_fingerprint",
            "numerics",
            "num_speculative_tokens",
            "num_background",
            "engine",
            "head_fingerprint",
            "check",
        }
        for name in RECORD.to_fields().keys() - may_lack:
            stored = RECORD.to_fields()
            del stored[name]
            with pytest.raises(ValueError, match=name):
                WorkerRecord.from_fields(stored)

    def test_a_record_that_was_damaged_is_refused_though_every_field_reads_well(self) -> None:
        for name, value in (("model_name", "demp"), ("max_num_seqs", "80"), ("zone", "a"), ("numerics", "")):
            with pytest.raises(ValueError, match="damaged"):
                WorkerRecord.from_fields(RECORD.to_fields() | {name: value})

    def test_a_record_that_lost_its_checksum_is_damaged(self) -> None:
        """Found: it was taken for one of the release before, and a target was called "targe" for a moment."""
        stored = RECORD.to_fields() | {"model_name": "dem"}
        del stored["check"]
        with pytest.raises(ValueError, match="damaged"):
            WorkerRecord.from_fields(stored)

    def test_a_record_of_a_later_release_is_read_as_far_as_it_is_known(self) -> None:
        stored = RECORD.to_fields() | {"colour": "blue"}
        stored["check"] = worker_record._checksum(stored)
        assert WorkerRecord.from_fields(stored | {"joined_at_us": "7"}) == RECORD
        with pytest.raises(ValueError, match="damaged"):
            WorkerRecord.from_fields(stored | {"colour": "red"})

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

    @pytest.mark.thorough
    async def test_a_process_that_starts_waits_for_a_slow_redis(self, redis_url: str) -> None:
        """One that takes 550 ms each way is too slow for a running process, which has something to go by."""
        address = redis_url.rpartition("@")[2].partition("/")[0]
        async with proxy(address, lambda: 0.55) as slow:  # each way
            url = redis_url.replace(address, slow)
            registry = Registry(url)
            with pytest.raises(RegistryUnavailable):
                await registry.ping()
            await registry.close()
            await check_redis(url)

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
        await registry.write(RECORD)
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.hset("{or:target}:w:odd", mapping={"worker_id": "odd"})
            await client.zadd("{or:target}:leases", {"odd": 1e15})
        with caplog.at_level(logging.WARNING):
            assert await workers(registry) == (RECORD,)
        assert "odd" in caplog.text

    async def test_a_record_with_bytes_that_are_no_text_spoils_no_other(
        self, registry: Registry, redis_url: str
    ) -> None:
        await registry.write(RECORD)
        await registry.write(replace(RECORD, worker_id="t1"))
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.hset("{or:target}:w:t1", mapping={"vocab_size": b"\xff\xfe1"})
        assert await workers(registry) == (RECORD,)

    async def test_a_record_under_the_id_of_another_worker_is_left_out(
        self, registry: Registry, redis_url: str
    ) -> None:
        await registry.write(RECORD)
        await registry.write(replace(RECORD, worker_id="t1", address="127.0.0.1:7001", incarnation="b"))
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.hset("{or:target}:w:t1", mapping={"worker_id": "t0"})
        assert await workers(registry) == (RECORD,)

    async def test_a_record_of_the_other_pool_is_left_out(self, registry: Registry, redis_url: str) -> None:
        await registry.write(RECORD)
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.hset("{or:target}:w:t0", mapping={"pool": "draft"})
        assert await workers(registry) == ()

    async def test_pools_do_not_mix(self, registry: Registry) -> None:
        draft = replace(RECORD, pool="draft", worker_id="d0")
        await registry.write(RECORD)
        await registry.write(draft)
        assert await workers(registry) == (RECORD,)
        assert await workers(registry, "draft") == (draft,)


class TestWorkerLease:
    async def test_a_worker_is_listed_while_its_lease_is_held(self, registry: Registry) -> None:
        async with WorkerLease(registry, RECORD, WorkerLoad) as lease:
            assert lease.is_published
            assert await workers(registry) == (RECORD,)
        assert await workers(registry) == ()

    async def test_heartbeats_outlast_the_lease_and_carry_the_load(self, quick_registry: Registry) -> None:
        load = WorkerLoad()
        async with WorkerLease(quick_registry, RECORD, lambda: load, heartbeat_s=0.05):
            load = WorkerLoad(3, 2, 250, "a:1=300")
            await asyncio.sleep(0.6)
            (seen,) = await workers(quick_registry)
        assert (seen.num_running, seen.num_waiting, seen.wait_ms, seen.round_trips) == (3, 2, 250, "a:1=300")

    async def test_a_worker_that_vanished_drops_out_when_its_lease_ends(self, quick_registry: Registry) -> None:
        await quick_registry.write(RECORD)
        before = await quick_registry.read("target")
        assert before.workers == (RECORD,)
        await asyncio.sleep(0.4)
        assert await workers(quick_registry) == ()
        assert await quick_registry.next_event("target", before.last_event, 0.5), "it is told that it expired"

    async def test_draining_is_announced_at_once(self, registry: Registry) -> None:
        async with (
            WorkerLease(registry, RECORD, WorkerLoad) as lease,
            WorkerDirectory(registry, 0.02) as directory,
        ):
            lease.set_state("draining")
            await eventually(
                lambda: directory.snapshot.targets == (replace(RECORD, state="draining"),), "draining", 1.0
            )
            assert lease.is_published

    async def test_a_restarted_worker_has_its_id_for_as_long_as_it_lives(self, registry: Registry) -> None:
        async with WorkerLease(registry, RECORD, WorkerLoad, heartbeat_s=0.05) as old:
            newer = replace(RECORD, incarnation="b", address="127.0.0.1:7001")
            async with WorkerLease(registry, newer, WorkerLoad):
                await eventually(lambda: old.is_superseded, "the old one noticed")
                assert await workers(registry) == (newer,)
            await eventually(lambda: not old.is_superseded, "it is back")
            assert await workers(registry) == (RECORD,)
        assert await workers(registry) == ()

    async def test_leaving_does_not_remove_another_incarnation(self, registry: Registry) -> None:
        newer = replace(RECORD, incarnation="b")
        async with WorkerLease(registry, RECORD, WorkerLoad):
            await registry.write(newer, await registry.join("target"))
        assert await workers(registry) == (newer,)

    @pytest.mark.parametrize("ahead_ms", [10**12, -(10**12)])
    async def test_a_replacement_has_the_id_whatever_the_clocks_of_both_show(
        self, registry: Registry, ahead_ms: int
    ) -> None:
        frozen = replace(RECORD, started_at_ms=max(1000, 1000 + ahead_ms))
        newer = replace(RECORD, started_at_ms=max(1000, 1000 - ahead_ms), incarnation="b", address="127.0.0.1:7001")
        async with (
            WorkerLease(registry, frozen, WorkerLoad, heartbeat_s=0.05) as old,
            WorkerLease(registry, newer, WorkerLoad, heartbeat_s=0.05) as new,
        ):
            await eventually(lambda: old.is_superseded, "the old one gave way")
            assert new.is_published
            assert await workers(registry) == (newer,)

    @pytest.mark.parametrize("returns_first", ["old", "new"])
    async def test_a_redis_that_lost_everything_does_not_change_who_joined_last(
        self, registry: Registry, redis_url: str, returns_first: str
    ) -> None:
        newer = replace(RECORD, incarnation="b", started_at_ms=0)
        joined = {"old": await registry.join("target"), "new": await registry.join("target")}
        records = {"old": RECORD, "new": newer}
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.flushall()
        order = ["old", "new"] if returns_first == "old" else ["new", "old"]
        for name in (*order, *order):
            assert await registry.write(records[name], joined[name]) is (name == "new" or returns_first == "old")
            returns_first = "new"  # by now it is back as well
        assert await workers(registry) == (newer,)
        last = replace(RECORD, incarnation="c", started_at_ms=0)
        assert await registry.write(last, await registry.join("target"))
        assert not await registry.write(newer, joined["new"])

    async def test_whoever_joins_comes_after_all_others_though_the_clock_of_redis_goes_back(
        self, registry: Registry, redis_url: str
    ) -> None:
        ahead_us = await registry.join("target") + 10**12  # given out before Redis moved to another host
        assert await registry.write(RECORD, ahead_us)
        newer = replace(RECORD, incarnation="b")
        assert await registry.write(newer, await registry.join("target"))
        assert not await registry.write(RECORD, ahead_us)

    async def test_a_first_heartbeat_that_arrives_late_takes_the_id_from_nobody(self, registry: Registry) -> None:
        joined_us = await registry.join("target")
        newer = replace(RECORD, incarnation="b")
        async with WorkerLease(registry, newer, WorkerLoad):
            assert not await registry.write(RECORD, joined_us)
            assert not await registry.write(RECORD)
            assert await workers(registry) == (newer,)


class TestReservations:
    async def test_the_first_worker_with_room_is_taken(self, registry: Registry) -> None:
        reserve = registry.reserve
        assert [await reserve("target", ["a", "b"], [1, 2], f"s{i}") for i in range(4)] == [0, 1, 1, None]
        await registry.release("target", "a", "s0")
        assert await reserve("target", ["a", "b"], [1, 2], "s4") == 0

    async def test_asking_twice_takes_one_place(self, registry: Registry) -> None:
        assert [await registry.reserve("draft", ["a"], [2], "s0") for _ in range(3)] == [0, 0, 0]
        assert await registry.reserve("draft", ["a"], [2], "s1") == 0

    async def test_a_caller_that_dies_leaks_nothing(self, redis_url: str, registry: Registry) -> None:
        dying = Registry(redis_url, reservation_s=0.5)
        await registry.ping()  # the first call of all has to connect
        assert await dying.reserve("target", ["a"], [1], "s0") == 0
        assert await registry.reserve("target", ["a"], [1], "s1") is None
        await asyncio.sleep(0.55)
        assert await registry.reserve("target", ["a"], [1], "s1") == 0
        await dying.close()

    async def test_renewing_brings_back_what_an_empty_redis_forgot(self, registry: Registry, redis_url: str) -> None:
        await registry.reserve("target", ["a"], [1], "s0")
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.flushall()
        await registry.renew("target", "a", ["s0"])
        assert await registry.reserve("target", ["a"], [1], "s1") is None

    async def test_everybody_sees_how_many_there_are(self, registry: Registry) -> None:
        await registry.write(RECORD)
        await registry.reserve("target", [RECORD.incarnation], [8], "s0")
        await registry.reserve("target", [RECORD.incarnation], [8], "s1")
        async with WorkerDirectory(registry) as directory:
            assert directory.snapshot.num_reserved == {RECORD.incarnation: 2}

    async def test_a_worker_that_leaves_takes_its_own_with_it(self, registry: Registry, redis_url: str) -> None:
        async with WorkerLease(registry, RECORD, WorkerLoad):
            await registry.reserve("target", [RECORD.incarnation], [8], "s0")
        async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
            assert sorted(await client.keys("*")) == ["{or:target}:events", "{or:target}:joins"]


async def test_a_change_of_members_is_seen_at_once(registry: Registry) -> None:
    async with WorkerDirectory(registry, refresh_s=0.9) as directory:
        for number, incarnation in enumerate("abc"):
            started_s = time.monotonic()
            newer = replace(RECORD, incarnation=incarnation)
            await registry.write(newer, number)
            await eventually(lambda newer=newer: directory.snapshot.targets == (newer,), "seen", 0.6)  # type: ignore[misc]
            assert time.monotonic() - started_s < 0.6, "not by the next look"
        await registry.remove(newer)
        await eventually(lambda: directory.snapshot.targets == (), "gone", 0.6)


async def test_a_redis_that_forgets_everything_in_between_is_survived(registry: Registry, redis_url: str) -> None:
    quick = Registry(redis_url, lease_s=0.6)
    await registry.write(RECORD)
    async with (
        redis.asyncio.Redis.from_url(redis_url) as client,
        WorkerDirectory(quick, refresh_s=0.02, lease_s=0.6) as directory,
    ):
        await client.flushall()  # as a restart between two looks
        until_s = time.monotonic() + 0.3
        while time.monotonic() < until_s:
            assert directory.snapshot.targets == (RECORD,)
            await asyncio.sleep(0.02)
        await eventually(lambda: directory.snapshot.targets == (), "it did not come back within a lease")
    await quick.close()


async def test_a_worker_whose_record_was_damaged_stays_as_it_was_until_its_lease_ends(
    registry: Registry, redis_url: str
) -> None:
    quick = Registry(redis_url, lease_s=1.0)
    await quick.write(RECORD)
    async with (
        redis.asyncio.Redis.from_url(redis_url) as client,
        WorkerDirectory(quick, refresh_s=0.02, lease_s=0.1) as directory,
    ):
        await client.hset("{or:target}:w:t0", mapping={"model_name": b"\xffother"})
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            assert directory.snapshot.targets == (RECORD,)
            await asyncio.sleep(0.02)
        await eventually(lambda: directory.snapshot.targets == (), "its lease ended")
    await quick.close()


async def test_another_run_of_a_worker_is_not_taken_for_the_one_before_it(registry: Registry, redis_url: str) -> None:
    await registry.write(RECORD)
    async with (
        redis.asyncio.Redis.from_url(redis_url) as client,
        WorkerDirectory(registry, refresh_s=0.02, lease_s=0.1) as directory,
    ):
        await client.hset("{or:target}:w:t0", mapping={"incarnation": "b"})  # of a release we cannot read
        await eventually(lambda: directory.snapshot.targets == (), "the earlier run is not there")


async def test_leases_that_all_end_at_once_are_given_another_one(registry: Registry, redis_url: str) -> None:
    """As when Redis' clock jumps: nobody has left."""
    quick = Registry(redis_url, lease_s=0.3)
    others = [replace(RECORD, worker_id=f"t{number}", incarnation=f"{number}") for number in range(3)]
    for record in others:
        await quick.write(record)
    async with WorkerDirectory(quick, refresh_s=0.02, lease_s=2.0) as directory:
        await asyncio.sleep(0.5)
        assert await workers(quick) == ()
        assert set(directory.snapshot.targets) == set(others)
        async with WorkerLease(quick, others[1], WorkerLoad, heartbeat_s=0.05):
            await eventually(lambda: directory.snapshot.targets == (others[1],), "two did not come back")
        await eventually(lambda: directory.snapshot.targets == (), "it left", 1.0)
    await quick.close()


@pytest.mark.thorough
@pytest.mark.parametrize("jump_s", [60.0, -60.0])
async def test_who_was_known_when_the_clock_jumped_stays_for_a_lease(
    registry: Registry, redis_url: str, jump_s: float
) -> None:
    """Some have announced themselves again before we look; the others are as good as they."""
    others = [replace(RECORD, worker_id=f"t{number}", incarnation=f"{number}") for number in range(3)]
    for record in others:
        await registry.write(record)
    skewed = SkewedRegistry(registry)
    async with WorkerDirectory(cast(RegistryCalls, skewed), refresh_s=0.02, lease_s=2.0) as directory:
        skewed.ahead_s = jump_s
        for record in others[1:]:
            await registry.remove(record)
        until_s = time.monotonic() + 0.3
        while time.monotonic() < until_s:
            assert set(directory.snapshot.targets) == set(others)
            await asyncio.sleep(0.02)
        await eventually(lambda: directory.snapshot.targets == (others[0],), "two did not come back")
        await registry.remove(others[0])
        await eventually(lambda: directory.snapshot.targets == (), "it left", 1.0)


class FaultyRegistry:
    """A registry whose next call of a method raises what nobody foresaw."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.fails_in = ""

    def __getattr__(self, name: str) -> Any:
        if name != self.fails_in:
            return getattr(self.registry, name)
        self.fails_in = ""

        async def fail(*_: object) -> None:
            raise AttributeError("a defect of a library")

        return fail


@pytest.mark.parametrize("method", ["read", "next_event"])
async def test_a_directory_goes_on_after_an_error_that_nobody_foresaw(
    registry: Registry, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyRegistry(registry)
    async with WorkerDirectory(cast(RegistryCalls, faulty), refresh_s=0.02) as directory:
        faulty.fails_in = method
        await eventually(lambda: not faulty.fails_in, "it was called")
        await registry.write(RECORD)
        await eventually(lambda: directory.snapshot.targets == (RECORD,), "the worker is seen")
        await eventually(lambda: not directory.snapshot.degraded, "both pools are read again")
    assert "failed; restarting in" in caplog.text


async def test_a_lease_is_kept_after_an_error_that_nobody_foresaw(
    quick_registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyRegistry(quick_registry)
    lease = WorkerLease(cast(RegistryCalls, faulty), RECORD, WorkerLoad, heartbeat_s=0.05)
    async with lease:
        faulty.fails_in = "write"
        await eventually(lambda: not faulty.fails_in, "a heartbeat failed")
        await quick_registry.remove(RECORD)
        end_s = time.monotonic() + 5.0
        while await workers(quick_registry) != (RECORD,):
            assert time.monotonic() < end_s, "it was never announced again"
            await asyncio.sleep(0.01)
    assert "failed; restarting in" in caplog.text


async def test_the_last_worker_to_go_is_named_with_the_reason(quick_registry: Registry) -> None:
    async with WorkerDirectory(quick_registry, refresh_s=0.02, lease_s=0.1) as directory:
        assert directory.last_departure("target") == ""
        await quick_registry.write(RECORD)
        await eventually(lambda: directory.snapshot.targets == (RECORD,), "it is seen")
        await eventually(lambda: not directory.snapshot.targets, "its lease ran out")
        assert directory.last_departure("target").startswith("t0: its lease ran out ")
        await quick_registry.write(RECORD)
        await eventually(lambda: directory.snapshot.targets == (RECORD,), "it is back")
        assert directory.last_departure("target") == ""
        await quick_registry.remove(RECORD)
        await eventually(lambda: directory.last_departure("target").startswith("t0: it left "), "it left")


class SilentRegistry:
    """A registry that does not answer the first so many times it is read."""

    def __init__(self, registry: Registry, num_times: float) -> None:
        self.registry = registry
        self.num_times = num_times

    async def read(self, pool: Pool) -> PoolView:
        if self.num_times > 0:
            self.num_times -= 1
            raise RegistryUnavailable("it does not answer")
        return await self.registry.read(pool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.registry, name)


async def test_a_directory_opens_once_it_knows_who_is_there(registry: Registry) -> None:
    """Requests come to a replica that has opened: where it knew nobody, it would refuse what others would serve."""
    await registry.write(RECORD)
    silent, patient = SilentRegistry(registry, float("inf")), SilentRegistry(registry, 3)
    first = cast(RegistryCalls, patient)
    async with WorkerDirectory(cast(RegistryCalls, silent), 0.02, first_registry=first) as directory:
        assert directory.snapshot.targets == (RECORD,)
        await eventually(lambda: directory.snapshot.degraded, "it serves from what it knows")
        assert directory.snapshot.targets == (RECORD,)
        silent.num_times = 0
        await eventually(lambda: not directory.snapshot.degraded, "the registry answers again")


async def test_a_directory_does_not_wait_for_ever(registry: Registry) -> None:
    """Whoever asks is told why there is nobody."""
    silent = SilentRegistry(registry, float("inf"))
    await registry.write(RECORD)
    async with WorkerDirectory(cast(RegistryCalls, silent), 0.02, first_look_s=0.1) as directory:
        assert directory.snapshot.degraded
        assert not directory.snapshot.targets
        silent.num_times = 0
        await eventually(lambda: directory.snapshot.targets == (RECORD,), "it is seen")


class SkewedRegistry:
    """A registry whose clock can be set."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.ahead_s = 0.0

    async def read(self, pool: Pool) -> PoolView:
        view = await self.registry.read(pool)
        return replace(view, clock_ms=view.clock_ms + round(1e3 * self.ahead_s))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.registry, name)


async def test_redis_going_away_and_coming_back_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    port, password = int(url.rpartition(":")[2].partition("/")[0]), url.split(":")[2].partition("@")[0]
    registry = Registry(url)
    lease = WorkerLease(registry, RECORD, WorkerLoad, heartbeat_s=0.05)
    async with lease, WorkerDirectory(registry, 0.05) as directory:
        assert not directory.snapshot.degraded
        await asyncio.to_thread(server.stop)
        await eventually(lambda: directory.snapshot.degraded, "the directory noticed")
        assert directory.snapshot.targets == (RECORD,), "the last snapshot stays"
        monkeypatch.setattr("outrider.local.redis_server.free_ports", lambda count: [port])
        monkeypatch.setattr("outrider.local.redis_server.secrets.token_hex", lambda size: password)
        again = EmbeddedRedis(tmp_path)
        await asyncio.to_thread(again.start)
        await eventually(lambda: not directory.snapshot.degraded, "the directory noticed the return")
        assert directory.snapshot.targets == (RECORD,), "known from before, though the new Redis is empty"
        while await workers(registry) != (RECORD,):  # noqa: ASYNC110 - until it has announced itself again
            await asyncio.sleep(0.02)
    await registry.close()
    again.stop()


async def test_a_worker_starts_without_redis_and_announces_itself_later(tmp_path: Path) -> None:
    registry = Registry("redis://127.0.0.1:1/0")
    started_s = time.monotonic()
    async with WorkerLease(registry, RECORD, WorkerLoad) as lease:
        assert not lease.is_published
    assert time.monotonic() - started_s < 3
    await registry.close()
