"""Draft workers' connections, and how they share an event loop's time.

Each connection has a share, whatever number of streams it opens, and takes it in short turns: what goes beyond waits on
the draft worker's side. Those that have exceeded theirs get one share together, which new connections have, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from outrider.concurrency.loop_share import LoopShare

logger = logging.getLogger(__name__)

NEWCOMER_S: Final = 1.0
"""How long a new connection has no share of its own: one that comes again at once gets no more by it."""
FLOODED_S: Final = 10.0
"""How long one that has exceeded its own share has none."""
SLICE_S: Final = 0.0005
"""Time after which a connection lets others go first."""
ROOM_S: Final = 0.005
"""How often a connection that waits for room looks for it."""
NOTE_S: Final = 10.0
"""No more than one line about connections is logged in this time."""


class LoopPart:
    """The part of the loop's time that one connection has, or several together: a share, and a slice in each turn."""

    def __init__(self, clock: Callable[[], float], now: Callable[[], float]) -> None:
        """clock: of what is spent; now: of what passes. Seconds."""
        self.share = LoopShare()
        self._clock = clock
        self._now = now
        self._turn_s = 0.0  # spent in this turn of the loop

    async def until_due(self) -> None:
        """Waits until the part permits more."""
        while (wait_s := self.share.wait_s(self._now())) or self._turn_s >= SLICE_S:  # noqa: ASYNC110 - it is time
            await asyncio.sleep(wait_s)

    def take(self, pieces: Iterator[object], has_room: Callable[[], bool]) -> bool:
        """Takes as many pieces of a message as a turn permits and have room; returns whether these were all."""
        end = object()
        while self._turn_s < SLICE_S and has_room():
            began_s = self._clock()
            try:
                if next(pieces, end) is end:
                    return True
            finally:
                self._spend(self._clock() - began_s)
        return False

    def _spend(self, spent_s: float) -> None:
        self.share.spend(spent_s, self._now())
        if not self._turn_s:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._turn_s += spent_s

    def _begin_turn(self) -> None:
        self._turn_s = 0.0


@dataclass(slots=True)
class Connection:
    """One draft worker's connection."""

    address: str
    part: LoopPart
    apart_from_s: float  # from then on it has a part of its own
    num_streams: int = field(default=0)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of its streams: one message at a time


class Connections:
    """All connections to one service."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, processor: Callable[[], float] = time.thread_time
    ) -> None:
        """now: a clock; processor: a clock of the time that this thread computes. Seconds."""
        self._now = now
        self._processor = processor
        self._by_address: dict[str, Connection] = {}
        # Of time in which nobody else had the loop. A connection's own part is of processor time: on a busy machine
        # nobody exceeds a share by what others compute.
        self._common_part = LoopPart(now, now)
        self._noted_at = -NOTE_S

    def join(self, address: str) -> Connection:
        """A stream begins. `leave` must follow."""
        connection = self._by_address.get(address)
        if connection is None:
            part = LoopPart(self._processor, self._now)
            connection = self._by_address[address] = Connection(address, part, self._now() + NEWCOMER_S)
        connection.num_streams += 1
        return connection

    def leave(self, connection: Connection) -> None:
        """A stream has ended."""
        connection.num_streams -= 1
        if not connection.num_streams:
            del self._by_address[connection.address]

    async def until_due(self, connection: Connection) -> None:
        """Waits until a connection may be read."""
        await self._part_of(connection).until_due()

    async def take(
        self,
        connection: Connection,
        pieces: Iterator[object],
        has_room: Callable[[str], bool] = lambda address: True,
    ) -> None:
        """Takes the pieces of one message, and lets others go first in between. While there is no room for a
        connection's pieces it waits, and flow control holds what follows on the draft worker's side."""

        def has_own_room() -> bool:
            return has_room(connection.address)

        async with connection.turn:
            while True:
                part = self._part_of(connection)
                await part.until_due()
                while not has_own_room():  # noqa: ASYNC110 - another thread makes room
                    await asyncio.sleep(ROOM_S)
                if part.take(pieces, has_own_room):
                    return

    def note(self, text: str, *values: object) -> None:
        """Logs what a connection did wrong, unless something was logged just now: it may come again at once."""
        if self._now() - self._noted_at >= NOTE_S:
            self._noted_at = self._now()
            logger.warning(text, *values)

    def _part_of(self, connection: Connection) -> LoopPart:
        now = self._now()
        if connection.part.share.wait_s(now):
            connection.apart_from_s = now + FLOODED_S
            self.note("the draft worker at %s sends too much, and is read more slowly", connection.address)
        return connection.part if now >= connection.apart_from_s else self._common_part
