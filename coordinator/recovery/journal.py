"""Journal of running streams in Redis, from which another replica resumes a stream whose replica is lost.

    or:journal:ID   hash; expires with the request's deadline, or soon after its end
        replica, number  its writer: the replica that has the stream, and that replica's count of streams when this one
                        began. Writes of an earlier writer are refused
        begun_ms        when the writer began, by Redis' clock; it decides which of two replicas is the later one
        kind, payload   the request as its edge received it, over gRPC with its defaults
        request         digest of everything that the output depends on (`coordinator.intake.run_identity`)
        seed, max_tokens  of this run, given by the client or chosen for it
        weights         digest of weights and numerics, with the first token
        losses          workers lost while they had this run or, before it, its prompt, followed by a checksum
        check           checksum of the constant fields above; damaged ones are not read as a request
        INDEX:CHUNK     at most CHUNK_TOKENS tokens of a sequence: three bytes each, little endian, in base64, followed
                        by their checksum

The first write is immediate, the next ones follow every FLUSH_S. Requests do not wait for Redis. Tokens that a crash
kept from being written are generated again: they cost time, and none is lost. While Redis does not answer, updates
wait, bounded by the running requests, and are dropped with them. An entry that Redis lost is written anew. A long entry
is written in parts: a reader in between finds the beginnings of its sequences.

Invariant: an entry belongs to one run, the last one that began under its id and asked to be kept. A replica that takes
a stream over, or begins another run under its id, replaces all of it; a run that is too long, or for which there is no
room, leaves an empty entry. A request without event ids leaves the journal alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, Self

from coordinator.recovery.journal_entry import (
    LIFE_AFTER_END_S,
    PART_FIELDS_MAX,
    JournaledStream,
    JournalEntry,
    JournalPart,
    header_of,
    parse,
)
from outrider.concurrency.background import end_tasks, keep_going
from outrider.errors import RegistryUnavailable
from outrider.registry.registry import JournalUpdate, JournalWrite, JournalWriter, RegistryCalls

_log = logging.getLogger(__name__)

FLUSH_S: Final = 0.2
PAYLOAD_BYTES_MAX: Final = 256 << 10
REPLICA_BYTES_MAX: Final = 64 << 20
"""Bytes of one request, and of all resumable streams of a replica: requests and tokens. More is not kept, for Redis
needs room for leases too; those clients can still resume by sending their requests again."""
TENANT_SHARE: Final = 0.25
"""Share of a replica's bytes for the streams of one tenant, if keys distinguish tenants."""


_STREAMS_AT_ONCE: Final = 64
"""Most streams that are written in one exchange with Redis: it takes some ms to prepare."""


class Journal:
    """Journaled streams of one replica; they are written while the context is open."""

    def __init__(
        self,
        registry: RegistryCalls,
        flush_s: float = FLUSH_S,
        *,
        now_s: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        bytes_max: int = REPLICA_BYTES_MAX,
    ) -> None:
        self._registry = registry
        self._replica = new_id()
        self._num_begun = 0
        self._flush_s = flush_s
        self._now_s = now_s
        self._bytes_max = bytes_max
        # What Redis has, or will have, from this replica: by tenant, None without keys.
        self._num_bytes: Counter[str | None] = Counter()
        # When ended streams expire in Redis, with their tenants and bytes.
        self._leaving: deque[tuple[float, str | None, int]] = deque()
        self._streams: dict[str, JournaledStream] = {}
        self._has_changes = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_degraded = False  # the last attempt failed

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(keep_going(self._keep, "the journal"), name="journal")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)
        await self._flush()

    def begin(
        self, request_id: str, entry: JournalEntry, deadline_s: float, tenant: str | None = None
    ) -> JournaledStream | None:
        """Begins or resumes a stream; its tokens follow from the first one on. None if it is too long or one too many:
        that changes nothing in Redis, so `forget` the entry if it is another run's. `tenant` is that of the caller's
        key."""
        while self._leaving and self._leaving[0][0] <= self._now_s():
            _, whose, num_bytes = self._leaving.popleft()
            self._take_bytes(whose, -num_bytes)
        num_bytes = sum(len(name) + len(value) for name, value in header_of(entry).items())
        if len(entry.payload) > PAYLOAD_BYTES_MAX or not self._has_room(tenant, num_bytes):
            return None
        self._take_bytes(tenant, num_bytes)
        num_taken = num_bytes

        def may_grow(num_more: int) -> bool:
            nonlocal num_taken
            if not self._has_room(tenant, num_more):
                return False
            self._take_bytes(tenant, num_more)
            num_taken += num_more
            return True

        def end() -> None:
            self._leaving.append((self._now_s() + LIFE_AFTER_END_S, tenant, num_taken))

        return self._add(request_id, entry, deadline_s, may_grow, end)

    def forget(self, request_id: str, deadline_s: float) -> None:
        """Replaces an entry by an empty one: a run begins that is not kept, and must not be resumed with an earlier
        output."""
        nothing = JournalEntry("grpc", b"")
        stream = self._add(request_id, nothing, deadline_s, lambda num_bytes: False, lambda: None)
        stream.is_kept, stream.has_ended = False, True

    def _add(
        self,
        request_id: str,
        entry: JournalEntry,
        deadline_s: float,
        may_grow: Callable[[int], bool],
        on_end: Callable[[], None],
    ) -> JournaledStream:
        begun_s, life_s = self._now_s(), deadline_s + LIFE_AFTER_END_S
        self._num_begun += 1
        writer = JournalWriter(self._replica, self._num_begun)
        stream = JournaledStream(request_id, entry, writer, begun_s, life_s, self._has_changes.set, may_grow, on_end)
        self._streams[request_id] = stream  # replaces one whose client came back before its loss was noticed
        self._has_changes.set()
        return stream

    def _has_room(self, tenant: str | None, num_bytes: int) -> bool:
        share = 1.0 if tenant is None else TENANT_SHARE
        return (
            self._num_bytes.total() + num_bytes <= self._bytes_max
            and self._num_bytes[tenant] + num_bytes <= share * self._bytes_max
        )

    def _take_bytes(self, tenant: str | None, num_bytes: int) -> None:
        self._num_bytes[tenant] += num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]

    async def load(self, request_id: str) -> JournalEntry | None:
        """Reads a stream's entry; None if there is none. Raises RegistryUnavailable."""
        stored = await self._registry.read_journal(request_id)
        if len(stored) > PART_FIELDS_MAX:  # 50 ms for a million tokens
            return await asyncio.to_thread(parse, stored)
        return parse(stored) if stored else None

    async def _keep(self) -> None:
        while True:
            await self._has_changes.wait()
            self._has_changes.clear()
            await self._flush()  # at once: a client may come back before the next flush
            await asyncio.sleep(self._flush_s)

    async def _flush(self) -> None:
        """Writes all streams' changes, several streams at a time, for as long as Redis answers."""
        due = deque(self._streams.items())
        unfinished: deque[tuple[str, JournaledStream]] = deque()  # long ones, of which a part was written
        while due or unfinished:
            parts = self._next_parts(unfinished, due)
            if not parts:
                break
            try:
                outcomes = await self._write(parts)
            except RegistryUnavailable as error:
                for _, stream, _ in parts:
                    stream.write_again()
                # A stream that has ended meanwhile is dropped: the outage may last for long.
                self._streams = {id: each for id, each in self._streams.items() if not each.has_ended}
                if not self.is_degraded:
                    _log.warning("streams cannot be resumed elsewhere: %s", error.message)
                self.is_degraded = True
                return
            for (request_id, stream, part), done in zip(parts, outcomes, strict=True):
                if done is JournalWrite.WRITTEN:
                    stream.wrote(part)
                    if not part.is_last:
                        unfinished.append((request_id, stream))
                        continue
                self._settle(request_id, stream, done, has_ended=part.has_ended)
        self.is_degraded = False

    def _next_parts(
        self, unfinished: deque[tuple[str, JournaledStream]], due: deque[tuple[str, JournaledStream]]
    ) -> list[tuple[str, JournaledStream, JournalPart]]:
        """Takes the next parts to write in one exchange; none if nothing has changed."""
        parts: list[tuple[str, JournaledStream, JournalPart]] = []
        num_fields = 0
        while (unfinished or due) and len(parts) < _STREAMS_AT_ONCE and num_fields < PART_FIELDS_MAX:
            is_unfinished = bool(unfinished)
            request_id, stream = (unfinished or due).popleft()
            if is_unfinished or stream.has_changes:
                part = stream.next_part()
                num_fields += len(part.fields)
                parts.append((request_id, stream, part))
        return parts

    async def _write(self, parts: Sequence[tuple[str, JournaledStream, JournalPart]]) -> Sequence[JournalWrite]:
        now_s, updates = self._now_s(), []
        for request_id, stream, part in parts:
            age_s = now_s - stream.begun_s if part.is_first else None
            updates.append((request_id, JournalUpdate(stream.writer, part.fields, stream.life_s, age_s)))
        return await self._registry.write_journals(updates)

    def _settle(self, request_id: str, stream: JournaledStream, done: JournalWrite, *, has_ended: bool) -> None:
        """Handles the outcome of a stream's last part; `has_ended`: it recorded the stream's end."""
        is_ours = self._streams.get(request_id) is stream  # unless its client is back and has replaced it
        if done is JournalWrite.GONE and not has_ended:
            stream.write_again(is_lost=True)
        elif is_ours and (has_ended or done is JournalWrite.SUPERSEDED):
            del self._streams[request_id]
