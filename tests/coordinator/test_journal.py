"""The journal of streams, on a real Redis and while there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from coordinator.recovery.journal import PAYLOAD_BYTES_MAX, Journal
from coordinator.recovery.journal_entry import (
    LIFE_AFTER_END_S,
    PART_FIELDS_MAX,
    JournalEntry,
    header_of,
    pack,
)
from outrider.errors import RegistryUnavailable
from outrider.registry.registry import JournalUpdate, JournalWriter, Registry
from tests.coordinator.fakes import eventually

Updates = Sequence[tuple[str, JournalUpdate]]
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
                while journal._streams:  # noqa: ASYNC110 - it tells nobody
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


@pytest.mark.parametrize("name", ["kind", "payload", "request", "seed", "weights", "losses", "0:0"])
async def test_bytes_that_are_no_text_are_an_error_of_no_reader(registry: Registry, redis_url: str, name: str) -> None:
    async with Journal(registry, 0.01) as journal:
        stream = journal.begin("r1", ENTRY, deadline_s=10)
        assert stream is not None
        stream.add(0, [1, 2, 3], "abc")
        before = await loaded(journal, "r1", 3)
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.hset("or:journal:r1", mapping={name: b"\xff\xfe\x80"})
        assert await journal.load("r1") != before


async def test_what_another_release_wrote_is_ignored(registry: Registry) -> None:
    async with Journal(registry) as journal:
        for fields in (
            {"kind": "telnet", "payload": ""},
            {"payload": ""},
            {"kind": "chat", "payload": "", "0:0": "1 2 3"},
        ):
            await registry.write_journals([("r1", JournalUpdate(JournalWriter("w", 1), fields, 10, 0))])
            assert await journal.load("r1") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("0:0", pack(0, 0, [1, 9, 3])[:8] + pack(0, 0, [1, 2, 3])[8:]),
        ("0:0", pack(0, 1, [1, 2, 3])),
        ("0:0", ""),
        ("x:0", pack(0, 0, [1])),
        ("999999999:0", pack(999999999, 0, [1])),
        ("-1:0", pack(-1, 0, [1])),
        ("seed", "seven"),
        ("losses", ""),
        ("losses", "2 f4dbdf21"),
        ("payload", "é"),
        ("payload", "eyJw"),
        ("kind", "completions"),
        ("request", "00"),
        ("seed", "8"),
        ("max_tokens", "1"),
        ("check", ""),
    ],
    ids=[
        *(
            "a token",
            "its place",
            "nothing",
            "no index",
            "far out",
            "below 0",
            "seed",
            "losses",
            "more losses",
        ),
        *("payload", "part of the payload", "kind", "digest", "another seed", "a limit", "the checksum"),
    ],
)
async def test_an_entry_that_was_damaged_is_no_entry(registry: Registry, name: str, value: str) -> None:
    async with Journal(registry, 0.01) as journal:
        stream = journal.begin("r1", ENTRY, deadline_s=10)
        assert stream is not None
        stream.add(0, [1, 2, 3])
        await loaded(journal, "r1", 3)
        await registry.write_journals([("r1", JournalUpdate(stream.writer, {name: value}, 10, None))])
        assert await journal.load("r1") is None


async def test_an_entry_is_of_one_writer(registry: Registry) -> None:
    """Late writes of a superseded writer do not mix with those of the writer that replaced it."""
    async with Journal(registry, 0.01) as before, Journal(registry, 0.01) as after:
        old = before.begin("r1", ENTRY, deadline_s=10)
        assert old is not None
        old.add(0, [7] * 40)
        await loaded(before, "r1", 40)
        new = after.begin("r1", replace(ENTRY, seed=8), deadline_s=10)
        assert new is not None
        new.add(0, [1, 2])
        await after._flush()
        assert (await loaded(after, "r1", 2)).seed == 8
        old.add(0, [7] * 40)
        await eventually(lambda: not before._streams, "the old writer hears that it was superseded")
        entry = await loaded(after, "r1", 2)
        assert [list(each) for each in entry.token_ids] == [[1, 2]]


async def test_an_entry_that_redis_lost_is_written_anew(registry: Registry, redis_url: str) -> None:
    async with Journal(registry, 0.01) as journal:
        stream = journal.begin("r1", ENTRY, deadline_s=10)
        assert stream is not None
        stream.add(0, [1, 2], "weights")
        await loaded(journal, "r1", 2)
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.delete("or:journal:r1")
        stream.add(0, [3])
        entry = await loaded(journal, "r1", 3)
        assert list(entry.token_ids[0]) == [1, 2, 3]
        assert (entry.seed, entry.payload, entry.weights_digest) == (7, ENTRY.payload, "weights")


async def test_a_token_takes_a_few_bytes(registry: Registry, redis_url: str) -> None:
    """It took eighty: a field for each step."""
    async with Journal(registry, 0.01) as journal:
        stream = journal.begin("r1", ENTRY, deadline_s=10)
        assert stream is not None
        for token_id in range(2000):
            stream.add(0, [token_id])
            if token_id % 20 == 0:
                await journal._flush()
        assert list((await loaded(journal, "r1", 2000)).token_ids[0]) == list(range(2000))
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            num_bytes = await client.memory_usage("or:journal:r1")
            assert num_bytes is not None
            assert num_bytes < 2000 * 10


async def test_one_tenant_leaves_room_for_others(registry: Registry) -> None:
    entry = JournalEntry("chat", b"x" * 1000)
    async with Journal(registry, 0.01, bytes_max=16_000) as journal:
        ours = [journal.begin(f"a{number}", entry, 10, "ours") for number in range(16)]
        assert 1 < sum(stream is not None for stream in ours) < 4
        assert journal.begin("b", entry, 10, "theirs") is not None
        assert ours[0] is not None
        ours[0].end()
        assert journal.begin("c", entry, 10, "ours") is None, "it stays in Redis for a while"


async def test_tokens_behind_what_does_not_fit_are_left_out_for_good(registry: Registry) -> None:
    async with Journal(registry, 0.01, bytes_max=600) as journal:
        stream = journal.begin("r1", ENTRY, deadline_s=10)
        assert stream is not None
        stream.add(0, [1, 2, 3])
        stream.add(0, [4] * 1000)
        stream.add(0, [5])
        await loaded(journal, "r1", 3)
        await journal._flush()
        assert list((await loaded(journal, "r1", 3)).token_ids[0]) == [1, 2, 3]


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
        assert len(journal._streams) == 0


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


async def test_a_write_that_is_late_does_not_replace_what_its_replica_began_later(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how long ago its stream began as of when it was sent, so to Redis' clock that was later."""
    write, sent, gate, done = registry.write_journals, asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def late(updates: Updates) -> Any:
        monkeypatch.setattr(registry, "write_journals", write)
        sent.set()
        await gate.wait()
        try:
            return await write(updates)
        finally:
            done.set()

    monkeypatch.setattr(registry, "write_journals", late)
    async with Journal(registry, 3600) as journal:
        assert journal.begin("r1", ENTRY, deadline_s=10) is not None
        await sent.wait()
        after = journal.begin("r1", replace(ENTRY, seed=99), deadline_s=10)
        assert after is not None
        await journal._flush()
        await asyncio.sleep(0.02)  # Redis' clock counts ms
        gate.set()
        await done.wait()
        after.add(0, [1, 2, 3])
        await journal._flush()
        entry = await loaded(journal, "r1", 3)
        assert (entry.seed, list(entry.token_ids[0])) == (99, [1, 2, 3])


async def test_requests_beyond_a_replicas_share_of_redis_are_not_kept_until_others_are_gone(
    registry: Registry,
) -> None:
    now_s = 0.0
    size = sum(len(name) + len(value) for name, value in header_of(ENTRY).items())
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


async def test_a_writer_that_was_superseded_does_not_take_an_entry_back(registry: Registry) -> None:
    """It missed a write, and began again what another one had begun meanwhile."""
    absent = Absent(registry)
    absent.is_away = False
    async with Journal(absent, 3600) as before, Journal(registry, 3600) as after:
        old = before.begin("r1", ENTRY, deadline_s=10)
        assert old is not None
        await before._flush()
        absent.is_away = True
        old.add(0, [7] * 40)
        await before._flush()
        new = after.begin("r1", replace(ENTRY, seed=99), deadline_s=10)
        assert new is not None
        new.add(0, [1, 2])
        await after._flush()
        absent.is_away = False
        await before._flush()
        assert not before._streams
        new.add(0, [3])
        await after._flush()
        entry = await after.load("r1")
        assert entry is not None
        assert (entry.seed, [list(each) for each in entry.token_ids]) == (99, [[1, 2, 3]])
        assert after._streams


@pytest.mark.parametrize("is_later", [True, False])
async def test_a_first_write_that_did_not_arrive_replaces_what_is_older_alone(
    registry: Registry, is_later: bool
) -> None:
    absent, now_s = Absent(registry), 0.0
    async with (
        Journal(absent, 3600, now_s=lambda: now_s) as one,
        Journal(registry, 3600, now_s=lambda: now_s) as other,
    ):
        ours = one.begin("r1", ENTRY, deadline_s=10)
        now_s += 2.0 if is_later else 1.0
        assert other.begin("r1", replace(ENTRY, seed=99), deadline_s=10) is not None
        assert ours is not None
        if is_later:
            ours.begun_s += 3.0
        now_s += 2.0
        await other._flush()
        await one._flush()
        assert ours.is_first
        absent.is_away = False
        await one._flush()
        entry = await one.load("r1")
        assert entry is not None
        assert entry.seed == (7 if is_later else 99)
        assert len(one._streams) == is_later


async def test_what_was_added_while_redis_was_away_is_written_later(registry: Registry) -> None:
    absent = Absent(registry)
    absent.is_away = False
    async with Journal(absent, 3600) as journal:
        stream = journal.begin("r1", ENTRY, deadline_s=10)
        assert stream is not None
        for number, absent.is_away in enumerate((False, True, True, False)):
            stream.add(0, [number] * 300)
            await journal._flush()
        entry = await journal.load("r1")
        assert entry is not None
        assert list(entry.token_ids[0]) == [number for number in range(4) for _ in range(300)]


async def test_a_long_stream_is_written_in_parts(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one it was more than a script of Redis can take, which read as a Redis that was away."""
    num_tokens, sizes, write = 2_000_000, list[int](), registry.write_journals

    async def seen(updates: Updates) -> Any:
        sizes.extend(len(update.fields) for _, update in updates)
        return await write(updates)

    monkeypatch.setattr(registry, "write_journals", seen)
    async with Journal(registry, 3600) as journal:
        stream = journal.begin("r1", ENTRY, deadline_s=10)
        assert stream is not None
        stream.add(0, range(num_tokens))
        stream.add(1, [9])
        await journal._flush()
        assert not journal.is_degraded
        assert max(sizes) <= PART_FIELDS_MAX
        entry = await journal.load("r1")
        assert entry is not None
        assert list(entry.token_ids[0]) == list(range(num_tokens))
        assert list(entry.token_ids[1]) == [9]
        num_before = len(sizes)
        stream.add(0, [1])
        await journal._flush()
        assert sizes[num_before:] == [2], "the end of each sequence is written again, and no more"


async def test_many_streams_are_written_in_a_few_exchanges(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, write = list[list[str]](), registry.write_journals

    async def seen(updates: Updates) -> Any:
        batches.append([request_id for request_id, _ in updates])
        return await write(updates)

    monkeypatch.setattr(registry, "write_journals", seen)
    names = [f"r{number}" for number in range(150)]
    async with Journal(registry, 3600) as journal, Journal(registry, 3600) as other:
        streams = [journal.begin(name, ENTRY, deadline_s=10) for name in names]
        for number, stream in enumerate(streams):
            assert stream is not None
            stream.add(0, [number])
        await journal._flush()
        assert [len(batch) for batch in batches] == [64, 64, 22]
        assert [name for batch in batches for name in batch] == names
        for number, name in enumerate(names):
            entry = await other.load(name)
            assert entry is not None
            assert list(entry.token_ids[0]) == [number]
        assert streams[70] is not None
        streams[70].add(0, [7])
        await journal._flush()
        assert batches[3:] == [["r70"]], "streams without changes are left alone"


async def test_one_stream_of_a_batch_that_another_replica_took_over_leaves_the_others(registry: Registry) -> None:
    async with Journal(registry, 3600) as one, Journal(registry, 3600) as two:
        mine = [one.begin(name, ENTRY, deadline_s=10) for name in ("r1", "r2", "r3")]
        await one._flush()
        assert two.begin("r2", replace(ENTRY, seed=99), deadline_s=10) is not None
        await two._flush()
        for stream in mine:
            assert stream is not None
            stream.add(0, [5])
        await one._flush()
        assert list(one._streams) == ["r1", "r3"]
        assert [len((await loaded(two, name, 0)).token_ids) for name in ("r1", "r2", "r3")] == [1, 0, 1]


async def test_a_batch_is_written_again_whole_when_redis_was_away(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = registry.write_journals

    async def lost(updates: Updates) -> Any:
        await write(updates[:1])  # the connection broke behind the first
        raise RegistryUnavailable("gone")

    async with Journal(registry, 3600) as journal:
        streams = [journal.begin(name, ENTRY, deadline_s=10) for name in ("r1", "r2")]
        await journal._flush()
        for stream in streams:
            assert stream is not None
            stream.add(0, [1, 2])
        with monkeypatch.context() as patched:
            patched.setattr(registry, "write_journals", lost)
            await journal._flush()
        was_degraded = journal.is_degraded
        await journal._flush()
        assert (was_degraded, journal.is_degraded) == (True, False)
        for name in ("r1", "r2"):
            assert list((await loaded(journal, name, 2)).token_ids[0]) == [1, 2]


async def test_a_redis_that_has_forgotten_its_scripts_is_given_them_again(registry: Registry, redis_url: str) -> None:
    async with Journal(registry, 3600) as journal:
        stream = journal.begin("r1", ENTRY, deadline_s=10)
        assert stream is not None
        await journal._flush()
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.script_flush()
        stream.add(0, [4])
        await journal._flush()
        assert not journal.is_degraded
        assert list((await loaded(journal, "r1", 1)).token_ids[0]) == [4]


async def test_a_run_that_is_not_kept_leaves_nothing_of_an_earlier_one(registry: Registry) -> None:
    async with Journal(registry, 3600) as one, Journal(registry, 3600) as other:
        earlier = one.begin("r1", ENTRY, deadline_s=10)
        assert earlier is not None
        await one._flush()
        other.forget("r1", deadline_s=10)
        await other._flush()
        assert await other.load("r1") is None
        assert len(other._streams) == 0
        earlier.add(0, [1])
        await one._flush()
        assert await other.load("r1") is None
