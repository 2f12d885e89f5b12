"""What another replica needs to go on with a stream whose own is gone: the request, and the tokens it has shown.

    or:journal:ID   hash; expires with the request's deadline, or soon after its end
        kind, payload   the request as its edge got it; `seed` where the coordinator drew one
        INDEX:OFFSET    tokens of a text from that offset on, decimal, separated by spaces

Written at once, then every FLUSH_S, and beside the requests: Redis is not on their path. What a crash keeps from being
written costs time, for those tokens are made again, and no token. While Redis is away what is to be written waits,
bounded by the requests that run, and is forgotten with them.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self, cast, get_args

from outrider.background import end_tasks
from outrider.errors import RegistryUnavailable
from outrider.registry import RegistryCalls

_log = logging.getLogger(__name__)

FLUSH_S: Final = 0.2
LIFE_AFTER_END_S: Final = 60.0
"""How long a client that lost its connection just before the end can still ask for it."""
PAYLOAD_BYTES_MAX: Final = 256 << 10
REPLICA_BYTES_MAX: Final = 64 << 20
"""Of requests, one and all of a replica that can be resumed. What is more is not kept, for Redis has leases to keep as
well; their clients can still go on by sending them again."""

Kind = Literal["grpc", "completions", "chat"]


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A stream as the journal has it."""

    kind: Kind
    payload: bytes
    seed: int | None = None
    token_ids: tuple[Sequence[int], ...] = ()  # of each text, as far as they were written


@dataclass(slots=True, eq=False)
class JournaledStream:
    """One that runs here. What it is told is written soon."""

    request_id: str
    life_s: float
    _wake: Callable[[], None]
    fields: dict[str, str]  # to be written
    _on_end: Callable[[], None]
    has_ended: bool = False
    _num_tokens: dict[int, int] = field(default_factory=dict)  # of each text

    def add(self, index: int, token_ids: Sequence[int]) -> None:
        """The next tokens of a text were shown."""
        if token_ids:
            offset = self._num_tokens.get(index, 0)
            self._num_tokens[index] = offset + len(token_ids)
            self.fields[f"{index}:{offset}"] = " ".join(map(str, token_ids))
            self._wake()

    def end(self) -> None:
        """It has ended, in whatever way: its client may not know yet."""
        self.has_ended, self.life_s = True, LIFE_AFTER_END_S
        self._on_end()
        self._wake()


class Journal:
    """Of one replica; writes while the context is open."""

    def __init__(
        self,
        registry: RegistryCalls,
        flush_s: float = FLUSH_S,
        *,
        now_s: Callable[[], float] = time.monotonic,
        bytes_max: int = REPLICA_BYTES_MAX,
    ) -> None:
        self._registry = registry
        self._flush_s = flush_s
        self._now_s = now_s
        self._bytes_max = bytes_max
        self._num_bytes = 0  # of requests that Redis has, or is to have, from here
        # When streams that have ended are gone from there, and their bytes.
        self._leaving: deque[tuple[float, int]] = deque()
        self._streams: dict[str, JournaledStream] = {}
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_degraded = False  # the last attempt failed

    @property
    def num_streams(self) -> int:
        """That are written, or wait to be."""
        return len(self._streams)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep(), name="journal")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)
        await self._flush()

    def begin(self, request_id: str, entry: JournalEntry, deadline_s: float) -> JournaledStream | None:
        """A stream begins, or goes on here; its tokens follow from the first one on. None for one that is too long, or
        one too many."""
        while self._leaving and self._leaving[0][0] <= self._now_s():
            self._num_bytes -= self._leaving.popleft()[1]
        num_bytes = len(entry.payload)
        if num_bytes > PAYLOAD_BYTES_MAX or self._num_bytes + num_bytes > self._bytes_max:
            return None
        self._num_bytes += num_bytes

        def end() -> None:
            self._leaving.append((self._now_s() + LIFE_AFTER_END_S, num_bytes))

        fields = {"kind": entry.kind, "payload": base64.b64encode(entry.payload).decode()}
        if entry.seed is not None:
            fields["seed"] = str(entry.seed)
        stream = JournaledStream(request_id, deadline_s + LIFE_AFTER_END_S, self._has_news.set, fields, end)
        self._streams[request_id] = stream  # in place of one whose client has come back before it was missed
        self._has_news.set()
        return stream

    async def load(self, request_id: str) -> JournalEntry | None:
        """None when there is no such stream. Raises RegistryUnavailable."""
        stored = await self._registry.read_journal(request_id)
        return _parse(stored) if stored else None

    async def _keep(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            await self._flush()  # at once: a client may be back sooner than the next one
            await asyncio.sleep(self._flush_s)

    async def _flush(self) -> None:
        """One write for each stream that has news, for as long as Redis answers."""
        for request_id, stream in list(self._streams.items()):
            if not (stream.fields or stream.has_ended):
                continue
            fields, stream.fields = stream.fields, {}
            has_ended = stream.has_ended
            try:
                await self._registry.write_journal(request_id, fields, stream.life_s)
            except RegistryUnavailable as error:
                stream.fields = fields | stream.fields
                # What has ended meanwhile is not kept: nobody knows for how long.
                self._streams = {id: each for id, each in self._streams.items() if not each.has_ended}
                self._has_news.set()
                if not self.is_degraded:
                    _log.warning("streams cannot be resumed elsewhere: %s", error.message)
                self.is_degraded = True
                return
            # Unless its client is back, and its stream in its place.
            if has_ended and self._streams.get(request_id) is stream:
                del self._streams[request_id]
        self.is_degraded = False


def _parse(stored: Mapping[str, str]) -> JournalEntry | None:
    try:
        chunks: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        for name, value in stored.items():
            place, is_tokens, offset = name.partition(":")
            if is_tokens:
                chunks[int(place)][int(offset)] = [int(each) for each in value.split()]
        token_ids: list[list[int]] = []
        for index in range(max(chunks, default=-1) + 1):
            text: list[int] = []
            while chunk := chunks[index].get(len(text)):
                text += chunk
            token_ids.append(text)
        kind = cast(Kind, stored["kind"])
        if kind not in get_args(Kind):
            raise ValueError(f"kind is {kind!r}")
        seed = int(stored["seed"]) if "seed" in stored else None
        return JournalEntry(kind, base64.b64decode(stored["payload"]), seed, tuple(token_ids))
    except (KeyError, ValueError) as error:  # another release's, perhaps
        _log.warning("ignoring a stream in the journal: %s", error)
        return None
