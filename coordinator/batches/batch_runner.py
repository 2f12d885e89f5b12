"""The loop of one replica that runs batches' lines in spare capacity.

Every replica has one. It claims as many lines as there is room for their sequences, renews their leases, and runs them
in the turn that `line_room` gives them. Results gather for a moment, are stored as a part, and then committed. If this
process dies, others run its lines again once their leases end; a result that was not committed is lost, and one that
was is not repeated.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, Self

from coordinator.batches.batch import Batch, BatchState, LineCounts
from coordinator.batches.batch_desk import BatchDesk
from coordinator.batches.batch_lines import LineIndex, LineResult, never_ran, read_line
from coordinator.batches.batch_results import ResultCollector
from coordinator.batches.batch_tasks import BatchTasks
from coordinator.batches.line_journal import Claim, Fenced
from coordinator.batches.line_room import LineRoom, RoomSize, Turn
from coordinator.observability.metrics import CoordinatorMetrics
from outrider.concurrency.background import end_tasks, keep_going
from outrider.errors import NotFound, OutriderError, Overloaded, Poisonous, Unavailable, WorkerFailed, WorkerLost

_log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""How long a replica with nothing to do waits before it looks for new batches."""
ROUND_S: Final = 0.05
"""Shortest time between two rounds of claims."""
SWEEP_S: Final = 60.0
ATTEMPTS_MAX: Final = 60
"""Claims of one line, after which it fails: it may be what ends its processes."""
TRIES_MAX: Final = 3
"""Runs of a line that cost workers, or failed at them."""
WAIT_MAX_S: Final = 10.0
"""Longest pause before a line that found no room is tried again."""


Hold = Callable[[str, int], AbstractAsyncContextManager[None]]
"""Waits for room for so many sequences of a model, which is held inside the context."""


class LineService(Protocol):
    """The service that runs lines, as the API's calls do."""

    def check_body(self, batch: Batch, url: str, body: bytes) -> None:
        """Checks the body of a line before anything of its batch runs. Raises an OutriderError."""

    def room(self) -> RoomSize:
        """How many sequences of lines this replica may have at once, now."""

    async def run(self, batch: Batch, url: str, body: bytes, request_id: str, hold: Hold) -> LineResult:
        """Runs a request, holding room for its sequences. Raises OutriderError."""

    def failure(self, error: Exception, request_id: str) -> LineResult:
        """The result of a request that failed for good."""


@dataclass(slots=True)
class _Book:
    """A batch that runs here: its record as last read, the places of its lines, and the lines claimed by this
    replica."""

    batch: Batch
    index: LineIndex
    claims: dict[int, Claim] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    num_sequences: dict[int, int] = field(default_factory=dict)  # of lines that have been read, and have tasks
    expected: float = 1.0  # sequences of a line that has not been read

    def note(self, line: int, num: int) -> None:
        """Records how many sequences a line has."""
        if line not in self.num_sequences:
            self.num_sequences[line] = num
            self.expected += (num - self.expected) / 8

    @property
    def num_claimed(self) -> int:
        """Sequences of the lines that have tasks."""
        known = sum(self.num_sequences.values())
        return known + math.ceil((len(self.tasks) - len(self.num_sequences)) * self.expected)


def pause_before_retry_s(error: OutriderError, num_failures: int) -> float | None:
    """Returns how long to wait before a line runs again after an error; None if the error is its result.

    A line waits for room and for a target as long as its batch lasts. One that costs workers has `TRIES_MAX` runs.
    """
    if isinstance(error, Poisonous) or not isinstance(error, Overloaded | Unavailable):
        return None
    if isinstance(error, WorkerLost | WorkerFailed) and num_failures >= TRIES_MAX:
        return None
    return min(max(error.retry_after_s, 0.05), WAIT_MAX_S)


class BatchRunner:
    """Runs batches while the context is open."""

    def __init__(
        self, desk: BatchDesk, lines: LineService, metrics: CoordinatorMetrics | None = None, poll_s: float = POLL_S
    ) -> None:
        self._desk, self._journal, self._files = desk, desk.journal, desk.files
        self._lines = lines
        self._metrics = metrics or CoordinatorMetrics()
        self._poll_s = poll_s
        self._books: dict[str, _Book] = {}
        self._room = LineRoom()
        self._has_room = asyncio.Event()
        self._unreadable: set[str] = set()  # batches whose records are there and cannot be read
        self._batch_tasks = BatchTasks(desk, lines, uuid.uuid4().hex)
        self._results = ResultCollector(desk, self._end_lines)
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for work, name in (
            (self._keep, "running batches"),
            (self._keep_renewing, "renewing batches' leases"),
            (self._results.keep, "storing batches' results"),
            (self._keep_sweeping, "deleting expired files"),
        ):
            self._loops.append(asyncio.create_task(keep_going(work, name), name=name))
        return self

    async def __aexit__(self, *_: object) -> None:
        loops, self._loops = self._loops, []
        await end_tasks(*loops)
        await self._batch_tasks.close()
        for batch_id, book in self._books.items():
            await end_tasks(*book.tasks.values())
            try:  # others need not wait for the end of the leases
                async with asyncio.timeout(self._journal.lease_s):
                    await self._results.flush(batch_id)
                    if book.claims:
                        await self._journal.release(batch_id, list(book.claims.values()))
            except (OutriderError, TimeoutError) as error:
                _log.info("lines of batch %s are not given back: %s", batch_id, error)
        self._books.clear()

    @property
    def num_running(self) -> int:
        """Lines that this replica runs; those whose results wait to be committed are not among them."""
        return sum(len(book.tasks) for book in self._books.values())

    def _num_claimed(self, batch: Batch) -> int:
        book = self._books.get(batch.batch_id)
        return 0 if book is None else book.num_claimed

    async def _keep(self) -> None:
        while True:
            self._has_room.clear()
            try:
                await self._round()
            except OutriderError as error:  # Redis or the store is away
                _log.warning("batches wait: %s", error.message)
                self._metrics.batches_degraded.set(1)
                await asyncio.sleep(self._poll_s)
            await asyncio.sleep(ROUND_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._has_room.wait()

    async def _round(self) -> None:
        """Looks at every batch once, and claims lines of those that run."""
        active, now_s = await self._journal.active(), await self._journal.now_s()
        for batch_id in self._books.keys() - set(active):
            self._drop(batch_id)
        batches = []
        self._unreadable &= set(active)
        for batch_id in active:
            batch = await self._journal.get(batch_id)
            if batch is None:
                await self._miss(batch_id)
            elif await self._move_on(batch, now_s):
                batches.append(batch)
        self._metrics.batches_degraded.set(0)
        self._metrics.batches_open.set(len(active))
        self._metrics.batch_lines_left.set(sum(batch.num_lines - batch.counts.num_ended for batch in batches))
        self._room.resize(RoomSize() if self._results.is_full else self._lines.room())
        for batch, num in self._room.to_claim(batches, self._num_claimed):
            await self._claim(batch, num)

    async def _miss(self, batch_id: str) -> None:
        """Retires a batch whose record is gone. One that cannot be read stays: a later release may have written it."""
        if not await self._journal.has_record(batch_id):
            await self._journal.retire(batch_id, None)
        elif batch_id not in self._unreadable:
            self._unreadable.add(batch_id)
            _log.error("the record of batch %s cannot be read; this release leaves the batch as it is", batch_id)

    async def _move_on(self, batch: Batch, now_s: float) -> bool:
        """Takes a batch a step further; returns whether lines of it may run."""
        if batch.state is BatchState.IN_PROGRESS:
            is_overdue = now_s >= batch.expires_at
            if not is_overdue and not batch.has_ended_lines_only:
                return True
            fields: dict[str, str | int] = {} if batch.has_ended_lines_only else {"is_overdue": 1}
            with suppress(Fenced):  # it has been cancelled, or another replica was first
                await self._journal.move(batch.batch_id, BatchState.FINALIZING, fields)
            batch = await self._journal.get(batch.batch_id) or batch
        self._drop(batch.batch_id)
        self._batch_tasks.begin(batch)
        return False

    async def _claim(self, batch: Batch, num_sequences: int) -> None:
        """Claims lines of about so many sequences, at least one, and lets them run in their turn."""
        book = self._books.get(batch.batch_id)
        if book is None:
            index = await self._read_index(batch)
            if index is None:
                return
            book = self._books[batch.batch_id] = _Book(batch, index)
        num = math.ceil(num_sequences / book.expected)
        claims = await self._journal.claim(batch.batch_id, uuid.uuid4().hex, num)
        for claim in claims:
            if (old := book.tasks.get(claim.line)) is not None:  # this replica had lost it, and has it again
                old.cancel()
            book.claims[claim.line] = claim
            name = f"line {claim.line} of {batch.batch_id}"
            task = asyncio.create_task(self._run(book, claim), name=name)
            book.tasks[claim.line] = task
            self._metrics.batch_lines_running.inc()
            task.add_done_callback(partial(self._forget_task, book, claim.line))

    async def _read_index(self, batch: Batch) -> LineIndex | None:
        try:
            pieces = [piece async for piece in self._files.store.pieces(batch.index_content)]
            return LineIndex.from_bytes(b"".join(pieces))
        except (NotFound, ValueError) as error:
            _log.error("batch %s cannot run: %s", batch.batch_id, error)
            return None

    async def _run(self, book: _Book, claim: Claim) -> None:
        """Runs one line and hands in its result."""
        custom_id, result = await self._answer(book, claim)
        if book.claims.get(claim.line) is claim:
            self._results.add(book.batch, claim, custom_id, result)

    async def _answer(self, book: _Book, claim: Claim) -> tuple[str, LineResult]:
        """Runs a line until it has a result; returns its `custom_id`, too."""
        batch, index = book.batch, book.index
        request_id = f"{batch.batch_id}-{claim.line}"
        start, end = index.starts[claim.line], index.ends[claim.line]
        hold = partial(self._hold, book, claim)
        num_failures = 0
        custom_id = ""
        while True:
            try:
                raw = await self._files.store.read(batch.input_content, start, end)
                line = await asyncio.to_thread(read_line, raw)
                custom_id = line.custom_id
                if claim.num_attempts > ATTEMPTS_MAX:
                    message = f"{ATTEMPTS_MAX} processes in turn ended while they had this request"
                    return custom_id, never_ran("request_lost", message)
                return custom_id, await self._lines.run(batch, line.url, line.body, request_id, hold)
            except OutriderError as error:
                num_failures += isinstance(error, WorkerLost | WorkerFailed)
                pause_s = pause_before_retry_s(error, num_failures)
                if pause_s is None:
                    return custom_id, self._lines.failure(error, request_id)
                await asyncio.sleep(pause_s)
            except Exception as error:  # a bug of ours must not run the line for ever
                return custom_id, self._lines.failure(error, request_id)

    @asynccontextmanager
    async def _hold(self, book: _Book, claim: Claim, model: str, num_sequences: int) -> AsyncIterator[None]:
        """Waits for a line's turn, and holds its room. A line that waits to be tried again holds none."""
        if book.claims.get(claim.line) is claim:
            book.note(claim.line, num_sequences)
        may_begin = asyncio.Event()
        turn = Turn(model, book.batch, num_sequences, may_begin.set)
        self._room.ask(turn)
        try:
            await may_begin.wait()
            yield
        finally:
            self._room.leave(turn)

    def _forget_task(self, book: _Book, line: int, done: asyncio.Task[None]) -> None:
        self._metrics.batch_lines_running.dec()
        if book.tasks.get(line) is done:
            del book.tasks[line]
            book.num_sequences.pop(line, None)
        if not book.tasks:
            self._results.hurry(book.batch.batch_id)
        self._has_room.set()
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("a line of batch %s failed; its lease ends", book.batch.batch_id, exc_info=error)
            book.claims.pop(line, None)

    def _end_lines(self, batch_id: str, claims: list[Claim], total: LineCounts) -> None:
        """Counts and forgets lines that have ended, and forgets those that are somebody else's."""
        self._metrics.batch_lines.labels("completed").inc(total.num_completed)
        self._metrics.batch_lines.labels("failed").inc(total.num_failed)
        book = self._books.get(batch_id)
        for claim in claims if book is not None else ():
            assert book is not None
            if book.claims.get(claim.line) is claim:
                del book.claims[claim.line]
        self._has_room.set()

    def _drop(self, batch_id: str) -> None:
        """Ends all lines of a batch that does not run any more."""
        book = self._books.pop(batch_id, None)
        if book is not None:
            for task in book.tasks.values():
                task.cancel()
            self._results.drop(batch_id)

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._journal.lease_s / 3)
            for batch_id, book in list(self._books.items()):
                claims = list(book.claims.values())
                if not claims:
                    continue
                try:
                    lost = await self._journal.renew(batch_id, claims)
                except OutriderError as error:
                    _log.warning("leases of batch %s are not renewed: %s", batch_id, error.message)
                    continue
                for claim in claims:
                    if claim.line in lost and book.claims.get(claim.line) is claim:
                        if (task := book.tasks.get(claim.line)) is not None:
                            task.cancel()
                        self._end_lines(batch_id, [claim], LineCounts())

    async def _keep_sweeping(self) -> None:
        while True:
            try:
                await self._files.delete_due()
            except OutriderError as error:
                _log.warning("expired files are not deleted: %s", error.message)
            await asyncio.sleep(SWEEP_S)
