"""What another replica needs to go on with a stream whose own is gone: the run, and the tokens it has shown.

    or:journal:ID   hash; expires with the request's deadline, or soon after its end
        replica, number  its writer: the replica that has the stream, and that replica's count of streams when it began
                        this one. What an earlier writer still sends is not taken
        begun_ms        when the writer began, by Redis' clock, which tells the earlier of two replicas
        kind, payload   the request as its edge got it
        request         digest of what the output depends on (`coordinator.run_identity`)
        seed, max_tokens  as they are for this run, whoever chose them
        weights         digest of weights and numerics, with the first token
        losses          workers lost while they had this run or, before it, its prompt, followed by a checksum
        check           checksum of those above that never change, so that damage to them is not taken for a request
        INDEX:CHUNK     CHUNK_TOKENS tokens of a sequence at most: three bytes each, little endian, in base64, followed
                        by their checksum

Written at once, then every FLUSH_S, and beside the requests: Redis is not on their path. What a crash keeps from being
written costs time, for those tokens are made again, and no token. While Redis is away what is to be written waits,
bounded by the requests that run, and is forgotten with them. An entry that Redis lost is written anew. A long one is
written in parts: whoever reads it in between finds the beginnings of its sequences.

Invariant: an entry is of one run, the last one that began under its id and wanted to be kept. Whoever takes a stream
over, or begins another run under its id, replaces all of it; one that is too long or for which there is no room leaves
nothing there. A request that did not ask for event ids is no business of the journal's: it leaves alone what is there.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import sys
import time
import uuid
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self, cast, get_args

from coordinator.generation_request import CHOICES_MAX
from outrider.background import end_tasks, keep_going
from outrider.errors import RegistryUnavailable
from outrider.registry import JournalUpdate, JournalWrite, JournalWriter, RegistryCalls

_log = logging.getLogger(__name__)

FLUSH_S: Final = 0.2
LIFE_AFTER_END_S: Final = 60.0
"""How long a client that lost its connection just before the end can still ask for it."""
PAYLOAD_BYTES_MAX: Final = 256 << 10
REPLICA_BYTES_MAX: Final = 64 << 20
"""Of requests and tokens, one request's and all of a replica that can be resumed. What is more is not kept, for Redis
has leases to keep as well; their clients can still go on by sending them again."""
TENANT_SHARE: Final = 0.25
"""Of a replica's bytes, that the streams of one tenant may take, where tenants are told apart by their keys."""
CHUNK_TOKENS: Final = 256
"""Tokens of one field, 1 KiB: what a flush writes again of a sequence, at most."""
PART_FIELDS_MAX: Final = 1024
"""Fields of one call, 1 MiB: a few ms on the event loop and in Redis, whose scripts take 3,900 or so at most."""
_TOKEN_BYTES: Final = 3
_TOKEN_CHARS: Final = 4  # in base64
_CHECKSUM_CHARS: Final = 8
_CHECKED: Final = ("kind", "payload", "request", "seed", "max_tokens")

Kind = Literal["grpc", "completions", "chat"]


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A stream as the journal has it."""

    kind: Kind
    payload: bytes
    request_digest: str = ""
    seed: int | None = None
    max_tokens: int | None = None
    weights_digest: str | None = None  # None: no token has been written
    num_losses: int = 0
    token_ids: tuple[Sequence[int], ...] = ()  # of each sequence, as far as they were written


@dataclass(frozen=True, slots=True)
class JournalPart:
    """What one call writes of a stream."""

    fields: Mapping[str, str]
    is_first: bool  # it replaces what is there
    is_last: bool  # more does not follow at once
    has_ended: bool  # the stream has, and this says so
    num_tokens: Mapping[int, int]  # of each sequence, that are written with it


@dataclass(slots=True, eq=False)
class JournaledStream:
    """A stream that runs here. What it is told is written soon."""

    request_id: str
    entry: JournalEntry
    writer: JournalWriter
    begun_s: float
    life_s: float
    _wake: Callable[[], None]
    _may_grow: Callable[[int], bool]  # by so many bytes; it is told that they are taken
    _on_end: Callable[[], None]
    is_kept: bool = True  # else all that there is to be written is that an earlier run's entry is gone
    is_first: bool = True  # nothing is known to have been written, or it is lost
    has_news: bool = True
    has_ended: bool = False
    _is_full: bool = False
    _token_ids: dict[int, array[int]] = field(default_factory=dict)  # of each sequence
    _num_written: dict[int, int] = field(default_factory=dict)
    _changed: dict[str, str] = field(default_factory=dict)

    def add(self, index: int, token_ids: Sequence[int], weights_digest: str | None = None) -> None:
        """The next tokens of a sequence were shown, generated by these weights."""
        if not token_ids or self._is_full:
            return
        if not self._may_grow(len(token_ids) * _TOKEN_CHARS):
            self._is_full = (
                True  # for good: tokens behind a gap are of no use, and what is missing can be made again
            )
            return
        self._token_ids.setdefault(index, array("I")).extend(token_ids)
        if weights_digest is not None and weights_digest != self._changed.get("weights"):
            self._changed["weights"] = weights_digest
        self._tell()

    def count_losses(self, num_losses: int) -> None:
        """So many workers were lost while they had this run."""
        self._changed["losses"] = _pack_losses(num_losses)
        self._tell()

    def end(self) -> None:
        """It has ended, in whatever way: its client may not know yet."""
        self.has_ended, self.life_s = True, LIFE_AFTER_END_S
        self._on_end()
        self._tell()

    def next_part(self) -> JournalPart:
        """What is to be written now: everything the first time, then whatever has changed since `wrote`."""
        self.has_news = False
        fields = {**self._changed}
        if self.is_first and self.is_kept:
            fields = _header(self.entry) | fields
        num_tokens = {} if self.is_first else {**self._num_written}
        is_last = True
        for index, token_ids in self._token_ids.items():
            first = num_tokens.get(index, 0) // CHUNK_TOKENS
            end = min(-(-len(token_ids) // CHUNK_TOKENS), first + PART_FIELDS_MAX - len(fields))
            for chunk in range(first, end):
                part = token_ids[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS]
                fields[f"{index}:{chunk}"] = pack(index, chunk, part)
            num_tokens[index] = min(end * CHUNK_TOKENS, len(token_ids))
            is_last &= num_tokens[index] == len(token_ids)
        return JournalPart(fields, self.is_first, is_last, self.has_ended, num_tokens)

    def wrote(self, part: JournalPart) -> None:
        """It has arrived."""
        self.is_first, self._num_written = False, {**part.num_tokens}

    def write_again(self, *, is_lost: bool = False) -> None:
        """Nobody knows whether the last part arrived, or it `is_lost` with all that was written before."""
        self.is_first |= is_lost
        self.has_news = True
        self._wake()

    def _tell(self) -> None:
        self.has_news = True
        self._wake()


class Journal:
    """The streams of one replica; writes while the context is open."""

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
        # That Redis has, or is to have, from here: of each tenant, None where there are no keys.
        self._num_bytes: Counter[str | None] = Counter()
        # When streams that have ended are gone from there, whose they were, and their bytes.
        self._leaving: deque[tuple[float, str | None, int]] = deque()
        self._streams: dict[str, JournaledStream] = {}
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_degraded = False  # the last attempt failed

    @property
    def num_streams(self) -> int:
        """Streams that are written, or wait to be."""
        return len(self._streams)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(keep_going(self._keep, "the journal"), name="journal")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)
        await self._flush()

    def begin(
        self, request_id: str, entry: JournalEntry, deadline_s: float, tenant: str | None = None
    ) -> JournaledStream | None:
        """A stream begins, or goes on here; its tokens follow from the first one on. None for one that is too long, or
        one too many, which leaves what is there: `forget` it where that is of another run. `tenant` is that of the
        caller's key."""
        while self._leaving and self._leaving[0][0] <= self._now_s():
            _, whose, num_bytes = self._leaving.popleft()
            self._take_bytes(whose, -num_bytes)
        num_bytes = sum(len(name) + len(value) for name, value in _header(entry).items())
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
        """A run begins that is not kept: an earlier one's output is not to be taken for its own."""
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
        stream = JournaledStream(
            *(request_id, entry, writer, begun_s, life_s), *(self._has_news.set, may_grow, on_end)
        )
        self._streams[request_id] = stream  # in place of one whose client has come back before it was missed
        self._has_news.set()
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
        """None when there is no such stream. Raises RegistryUnavailable."""
        stored = await self._registry.read_journal(request_id)
        if len(stored) > PART_FIELDS_MAX:  # 50 ms where there are a million tokens
            return await asyncio.to_thread(_parse, stored)
        return _parse(stored) if stored else None

    async def _keep(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            await self._flush()  # at once: a client may be back sooner than the next one
            await asyncio.sleep(self._flush_s)

    async def _flush(self) -> None:
        """Writes the news of each stream that has some, for as long as Redis answers."""
        for request_id, stream in list(self._streams.items()):
            if not stream.has_news:
                continue
            try:
                done, has_ended = await self._write(stream)
            except RegistryUnavailable as error:
                stream.write_again()
                # What has ended meanwhile is not kept: nobody knows for how long.
                self._streams = {id: each for id, each in self._streams.items() if not each.has_ended}
                if not self.is_degraded:
                    _log.warning("streams cannot be resumed elsewhere: %s", error.message)
                self.is_degraded = True
                return
            is_ours = self._streams.get(request_id) is stream  # unless its client is back, in its place
            if done is JournalWrite.GONE and not has_ended:
                stream.write_again(is_lost=True)
            elif is_ours and (has_ended or done is JournalWrite.SUPERSEDED):
                del self._streams[request_id]
        self.is_degraded = False

    async def _write(self, stream: JournaledStream) -> tuple[JournalWrite, bool]:
        """Writes the news of a stream in as many parts as they need. What became of the last one, and whether it said
        that the stream has ended. Raises RegistryUnavailable."""
        while True:
            part = stream.next_part()
            age_s = self._now_s() - stream.begun_s if part.is_first else None
            update = JournalUpdate(stream.writer, part.fields, stream.life_s, age_s)
            done = await self._registry.write_journal(stream.request_id, update)
            if done is not JournalWrite.WRITTEN:
                return done, part.has_ended
            stream.wrote(part)
            if part.is_last:
                return done, part.has_ended


def pack(index: int, chunk: int, token_ids: Sequence[int]) -> str:
    """A chunk of a sequence's tokens as text; `unpack` reverses it."""
    raw = bytearray(_to_little_endian(array("I", token_ids)).tobytes())
    del raw[3::4]
    return base64.b64encode(raw).decode() + _checksum(index, chunk, raw)


def unpack(index: int, chunk: int, text: str) -> array[int]:
    """Raises ValueError for what `pack` did not write for this place."""
    raw = base64.b64decode(text[:-_CHECKSUM_CHARS], validate=True)
    if text[-_CHECKSUM_CHARS:] != _checksum(index, chunk, raw) or len(raw) % _TOKEN_BYTES:
        raise ValueError(f"chunk {chunk} of sequence {index} is damaged")
    wide = bytearray(len(raw) // _TOKEN_BYTES * 4)
    for byte in range(_TOKEN_BYTES):
        wide[byte::4] = raw[byte::_TOKEN_BYTES]
    return _to_little_endian(array("I", bytes(wide)))


def _to_little_endian(token_ids: array[int]) -> array[int]:
    """Or back."""
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


def _checksum(index: int, chunk: int, raw: bytes | bytearray) -> str:
    return f"{zlib.crc32(raw, zlib.crc32(f'{index}:{chunk}'.encode())):0{_CHECKSUM_CHARS}x}"


def _header(entry: JournalEntry) -> dict[str, str]:
    """What is known of a stream from its beginning."""
    numbers = {"seed": entry.seed, "max_tokens": entry.max_tokens}
    fields = {
        "kind": entry.kind,
        "payload": base64.b64encode(entry.payload).decode(),
        "request": entry.request_digest,
        "losses": _pack_losses(entry.num_losses),
        **{name: str(value) for name, value in numbers.items() if value is not None},
    }
    return fields | {"check": _header_checksum(fields)}


def _pack_losses(num_losses: int) -> str:
    """As text; `_unpack_losses` reverses it. Read as a larger number, it would end a run that did no harm."""
    return f"{num_losses} {zlib.crc32(str(num_losses).encode()):0{_CHECKSUM_CHARS}x}"


def _unpack_losses(text: str) -> int:
    """Raises ValueError for what was damaged."""
    number, _, _ = text.partition(" ")
    if _pack_losses(int(number)) != text:
        raise ValueError("its number of losses is damaged")
    return int(number)


def _header_checksum(fields: Mapping[str, str]) -> str:
    told = repr([fields.get(name) for name in _CHECKED]).encode()
    return f"{zlib.crc32(told):0{_CHECKSUM_CHARS}x}"


def _parse(stored: Mapping[str, str]) -> JournalEntry | None:
    if "kind" not in stored:
        return None  # of a run that is not kept
    try:
        if stored["check"] != _header_checksum(stored):
            raise ValueError("it is damaged")
        kind = cast(Kind, stored["kind"])
        if kind not in get_args(Kind):
            raise ValueError(f"kind is {kind!r}")
        return JournalEntry(
            kind,
            base64.b64decode(stored["payload"], validate=True),
            stored["request"],
            int(stored["seed"]) if "seed" in stored else None,
            int(stored["max_tokens"]) if "max_tokens" in stored else None,
            stored.get("weights"),
            _unpack_losses(stored["losses"]),
            _tokens_of(stored),
        )
    except (KeyError, ValueError) as error:  # another release's, perhaps
        _log.warning("ignoring a stream in the journal: %s", error)
        return None


def _tokens_of(stored: Mapping[str, str]) -> tuple[array[int], ...]:
    """Of each sequence, up to the first chunk that is missing or not full. Raises ValueError."""
    chunks: dict[int, dict[int, array[int]]] = {}
    for name, value in stored.items():
        before, is_tokens, after = name.partition(":")
        if is_tokens:
            index, chunk = int(before), int(after)
            if not 0 <= index < CHOICES_MAX:
                raise ValueError(f"there is no sequence {index}")
            chunks.setdefault(index, {})[chunk] = unpack(index, chunk, value)
    sequences: list[array[int]] = []
    for index in range(max(chunks, default=-1) + 1):
        known = array("I")
        own = chunks.get(index, {})
        for chunk in range(len(own)):
            part = own.get(chunk, array("I"))
            known += part
            if len(part) != CHUNK_TOKENS:
                break
        sequences.append(known)
    return tuple(sequences)
