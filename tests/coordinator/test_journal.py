"""The journal of streams, on a real Redis and while there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from coordinator.journal import LIFE_AFTER_END_S, PAYLOAD_BYTES_MAX, Journal, JournalEntry
from outrider.errors import RegistryUnavailable
from outrider.registry import Registry
from tests.coordinator.fakes import eventually

ENTRY = JournalEntry("chat", b'{"prompt": "\xc3\xa9"}', seed=7)


async def loaded(journal: Journal, request_id: str, num_tokens: int) -> JournalEntry:
    """The entry once all its texts together have so many tokens."""
    async with asyncio.timeout(5):
        while True:
            entry = await journal.load(request_id)
            if entry is not None and sum(map(len, entry.token_ids)) >= num_tokens:
                return entry
            await asyncio.sleep(0.01)


async def test_another_replica_reads_what_one_has_shown(registry: Registry) -> None:
    async with Journal(registry, 0.01) as writing, Journal(registry, 0.01) as reading:
        stream = writing.begin("r1", ENTRY, deadline_s=10)
        assert stream is not None
        stream.add(1, [9])
        for token_id in range(20):
            stream.add(0, [token_id, 100])
            await asyncio.sleep(0.002)
        entry = await loaded(reading, "r1", 41)
        assert (entry.kind, entry.payload, entry.seed) == ("chat", ENTRY.payload, 7)
        assert list(entry.token_ids[0]) == [each for i in range(20) for each in (i, 100)]
        assert list(entry.token_ids[1]) == [9]
        assert await reading.load("other") is None


async def test_an_entry_outlives_its_stream_for_a_while_only(registry: Registry, redis_url: str) -> None:
    async with Journal(registry, 0.01) as journal:
        stream = journal.begin("r1", ENTRY, deadline_s=1000)
        assert stream is not None
        await loaded(journal, "r1", 0)
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            assert 1000 < await client.ttl("or:journal:r1") <= 1060
            stream.end()
            async with asyncio.timeout(5):
                while journal.num_streams:  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.01)
            assert 0 < await client.ttl("or:journal:r1") <= 60


async def test_a_stream_that_goes_on_here_writes_over_what_is_there(registry: Registry) -> None:
    async with Journal(registry, 0.01) as journal:
        for chunks in ([[1, 2], [3], [4]], [[1, 2, 3], [4, 5]]):
            stream = journal.begin("r1", ENTRY, deadline_s=10)
            assert stream is not None
            for chunk in chunks:
                stream.add(0, chunk)
                await asyncio.sleep(0.03)
        assert list((await loaded(journal, "r1", 5)).token_ids[0]) == [1, 2, 3, 4, 5]


async def test_what_is_too_long_is_not_kept(registry: Registry) -> None:
    async with Journal(registry) as journal:
        assert journal.begin("r1", JournalEntry("chat", b"x" * (PAYLOAD_BYTES_MAX + 1)), 10) is None


async def test_what_another_release_wrote_is_ignored(registry: Registry) -> None:
    async with Journal(registry) as journal:
        for fields in (
            {"kind": "telnet", "payload": ""},
            {"payload": ""},
            {"kind": "chat", "payload": "", "0:x": "1"},
        ):
            await registry.write_journal("r1", fields, 10)
            assert await journal.load("r1") is None


class Absent:
    """A registry whose Redis is away for as long as it is told."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.is_away = True

    def __getattr__(self, name: str) -> Any:
        if self.is_away:
            raise RegistryUnavailable("away")
        return getattr(self._registry, name)


async def test_while_redis_is_away_news_wait_and_are_written_later(registry: Registry) -> None:
    absent = Absent(registry)
    async with Journal(absent, 0.01) as journal:
        stream = journal.begin("r1", ENTRY, deadline_s=10)
        assert stream is not None
        stream.add(0, [1, 2])
        await asyncio.sleep(0.05)
        stream.add(0, [3])
        assert journal.is_degraded
        with pytest.raises(RegistryUnavailable):
            await journal.load("r1")
        absent.is_away = False
        assert list((await loaded(journal, "r1", 3)).token_ids[0]) == [1, 2, 3]
        await eventually(lambda: not journal.is_degraded, "it is well again")


async def test_streams_that_end_while_redis_is_away_do_not_pile_up(registry: Registry) -> None:
    async with Journal(Absent(registry)) as journal:
        for number in range(20):
            stream = journal.begin(f"r{number}", ENTRY, deadline_s=10)
            assert stream is not None
            stream.end()
        await journal._flush()
        assert journal.num_streams == 0


async def test_the_end_of_a_stream_leaves_alone_the_one_that_took_its_place(registry: Registry) -> None:
    async with Journal(registry, 0.01) as journal:
        other, before = (journal.begin(name, ENTRY, deadline_s=10) for name in ("other", "r1"))
        assert other is not None
        assert before is not None
        before.end()
        flushing = asyncio.create_task(journal._flush())
        await asyncio.sleep(0)  # the other one is being written
        after = journal.begin("r1", ENTRY, deadline_s=10)
        assert after is not None
        await flushing
        after.add(0, [1, 2, 3])
        assert list((await loaded(journal, "r1", 3)).token_ids[0]) == [1, 2, 3]


async def test_requests_beyond_a_replicas_share_of_redis_are_not_kept_until_others_are_gone(
    registry: Registry,
) -> None:
    now_s = 0.0
    size = len(ENTRY.payload)
    async with Journal(registry, 0.01, now_s=lambda: now_s, bytes_max=2 * size) as journal:
        first, second = (journal.begin(f"r{number}", ENTRY, deadline_s=10) for number in range(2))
        assert first is not None
        assert second is not None
        assert journal.begin("r2", ENTRY, deadline_s=10) is None
        first.end()
        now_s = LIFE_AFTER_END_S - 1
        assert journal.begin("r3", ENTRY, deadline_s=10) is None
        now_s = LIFE_AFTER_END_S
        assert journal.begin("r4", ENTRY, deadline_s=10) is not None
        assert journal.begin("r5", ENTRY, deadline_s=10) is None
