"""Results of one replica's lines, gathered into parts: stored first, then committed.

A part has results of one batch. It is stored when it has many, or when the oldest has waited long enough. A commit
takes all of it or nothing; lines that have been lost meanwhile are left out of the next try, under a new name.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from coordinator.batches.batch import Batch, LineCounts
from coordinator.batches.batch_desk import BatchDesk
from coordinator.batches.batch_lines import LineResult, join_part, part_line, result_line
from coordinator.batches.file_store import one_piece
from coordinator.batches.line_journal import Claim
from outrider.errors import OutriderError

_log = logging.getLogger(__name__)

LINES_MAX: Final = 256
"""Results of one part."""
PART_BYTES_MAX: Final = 1 << 20
"""A part is stored when it has so many bytes; a single result may have more."""
WAITING_BYTES_MAX: Final = 32 << 20
"""Bytes of results that wait to be committed, in one replica."""
WAIT_S: Final = 2.0
"""How long a result waits for others: what may have to run again after a crash."""
LOOK_S: Final = 0.25
KEPT_S: Final = 3 * 86400.0
"""How long after its batch's end a part is deleted that nobody has deleted."""


@dataclass(slots=True)
class _Part:
    """Results of one batch that are not committed."""

    batch: Batch
    since_s: float
    name: str = ""  # under which they are stored; empty: not yet
    claims: list[Claim] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    counts: list[LineCounts] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.claims) >= LINES_MAX or self.num_bytes >= PART_BYTES_MAX


class ResultCollector:
    """Stores and commits the results of one replica."""

    def __init__(self, desk: BatchDesk, on_ended: Callable[[str, list[Claim], LineCounts], None]) -> None:
        """`on_ended` gets lines that are committed, with their sums, or lost."""
        self._journal, self._files = desk.journal, desk.files
        self._on_ended = on_ended
        self._parts: dict[str, list[_Part]] = {}  # by batch; the last one is open
        self._lock = asyncio.Lock()

    def add(self, batch: Batch, claim: Claim, custom_id: str, result: LineResult) -> None:
        """Takes the result of a line."""
        line = result_line(batch.batch_id, claim.line, custom_id, result)
        parts = self._parts.setdefault(batch.batch_id, [])
        if not parts or parts[-1].is_full or parts[-1].name:
            parts.append(_Part(batch, time.monotonic()))
        part = parts[-1]
        part.claims.append(claim)
        part.lines.append(part_line(line, is_error=result.is_error))
        part.counts.append(result.counts())
        part.num_bytes += len(line) + 2

    @property
    def is_full(self) -> bool:
        """Whether no more lines should run until some results are committed: the store or Redis is slow."""
        return sum(part.num_bytes for parts in self._parts.values() for part in parts) >= WAITING_BYTES_MAX

    def hurry(self, batch_id: str) -> None:
        """Stores a batch's results soon, because no others come at present."""
        for part in self._parts.get(batch_id, ()):
            part.since_s = -math.inf

    def drop(self, batch_id: str) -> None:
        """Forgets the results of a batch that takes no more. What is stored already is committed or deleted later: a
        commit may have been made whose answer is lost."""
        parts = self._parts.get(batch_id, [])
        parts[:] = [part for part in parts if part.name]
        if not parts:
            self._parts.pop(batch_id, None)

    async def keep(self) -> None:
        """Stores parts when they are full or old enough; runs until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for batch_id, parts in list(self._parts.items()):
                if any(part.is_full or time.monotonic() - part.since_s >= WAIT_S for part in parts):
                    try:
                        await self.flush(batch_id)
                    except OutriderError as error:  # tried again
                        _log.warning("results of batch %s wait: %s", batch_id, error.message)

    async def flush(self, batch_id: str) -> None:
        """Stores and commits all results of a batch. Raises RegistryUnavailable, and Unavailable for the store; it can
        be repeated."""
        async with self._lock:
            while parts := self._parts.get(batch_id):
                part = parts[0]
                await self._commit(part)
                if parts and parts[0] is part:
                    parts.pop(0)
                if not parts:
                    self._parts.pop(batch_id, None)

    async def _commit(self, part: _Part) -> None:
        """Commits what is ours of a part."""
        batch_id = part.batch.batch_id
        while part.claims:
            if not part.name:
                await self._store(part)
            total = sum(part.counts, start=LineCounts())
            lost = await self._journal.commit(batch_id, part.name, part.claims, total)
            if not lost:
                self._on_ended(batch_id, part.claims, total)
                return
            await self._files.delete_content(part.name)
            part.name = ""
            self._on_ended(batch_id, [claim for claim in part.claims if claim.line in lost], LineCounts())
            kept = [at for at, claim in enumerate(part.claims) if claim.line not in lost]
            part.claims = [part.claims[at] for at in kept]
            part.lines = [part.lines[at] for at in kept]
            part.counts = [part.counts[at] for at in kept]

    async def _store(self, part: _Part) -> None:
        name = f"batches/{part.batch.batch_id}/part-{uuid.uuid4().hex}"
        await self._files.announce(name, part.batch.expires_at + KEPT_S)
        part.name = name  # from here on its lines do not change: `add` opens another
        try:
            await self._files.store.write(name, one_piece(join_part(part.lines)))
        except BaseException:
            part.name = ""
            raise
