"""The beginning and the end of a batch: its file is checked, and its output is written. One process at a time does it.

Both may be repeated from the start: a process that dies has changed nothing that another would not write again. Output
files have ids that follow from the batch's, so a repetition writes the same files. What is written and then not needed,
because the batch has been cancelled meanwhile, or belongs to another process now, is deleted at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from coordinator.batches.batch import Batch, BatchState
from coordinator.batches.batch_desk import OUTPUT_PURPOSE, BatchDesk
from coordinator.batches.batch_lines import (
    LineIndex,
    lines_of_part,
    never_ran,
    read_line,
    result_line,
    told_error,
)
from coordinator.batches.batch_results import KEPT_S
from coordinator.batches.file_store import one_piece
from coordinator.batches.files import LIFE_S, StoredFile
from coordinator.batches.line_journal import Fenced
from coordinator.batches.validation import FileCheck
from outrider.concurrency.background import end_tasks, until_ended
from outrider.errors import NotFound, OutriderError

_log = logging.getLogger(__name__)

TASKS_MAX: Final = 2
"""Checks and finalizations that a replica does at once."""
SLICE_S: Final = 0.002
"""After so long a check leaves the interpreter to others for as long; one long line takes longer, up to 0.3 s."""


class Checker(Protocol):
    """The part of a `LineService` that checks lines."""

    def check_body(self, batch: Batch, url: str, body: bytes) -> None: ...


class BatchTasks:
    """Checks and finalizes batches for one replica."""

    def __init__(self, desk: BatchDesk, lines: Checker, fence: str) -> None:
        """`fence`: unique to this process."""
        self._journal, self._files = desk.journal, desk.files
        self._lines = lines
        self._fence = fence
        self._tasks: dict[str, tuple[BatchState, asyncio.Task[None]]] = {}

    def begin(self, batch: Batch) -> None:
        """Begins what a batch in its state needs, unless this replica has enough to do."""
        state, task = self._tasks.get(batch.batch_id, (batch.state, None))
        # The batch has been cancelled while its file was checked. A second cancellation would interrupt the deletions.
        if task is not None and state is not batch.state and not task.cancelling():
            task.cancel()
        if task is not None or len(self._tasks) >= TASKS_MAX:
            return
        works: Mapping[BatchState, Callable[[Batch], Coroutine[Any, Any, None]]] = {
            BatchState.VALIDATING: self._check,
            BatchState.FINALIZING: self._finalize,
            BatchState.CANCELLING: self._finalize,
        }
        work = works.get(batch.state, self._clear if batch.is_over else None)
        if work is None:
            return
        task = asyncio.create_task(self._hold(batch, work), name=f"{batch.state} {batch.batch_id}")
        self._tasks[batch.batch_id] = batch.state, task
        task.add_done_callback(lambda _: self._tasks.pop(batch.batch_id, None))

    async def close(self) -> None:
        """Ends what is under way; another process begins it again."""
        await end_tasks(*(task for _, task in self._tasks.values()))

    async def _hold(self, batch: Batch, work: Callable[[Batch], Coroutine[Any, Any, None]]) -> None:
        """Does the work while this process has the batch's task."""
        working: asyncio.Task[None] | None = None
        try:
            if not await self._journal.take_task(batch.batch_id, self._fence, batch.state):
                return
            working = asyncio.create_task(work(batch))
            while not working.done():
                await asyncio.wait((working,), timeout=self._journal.lease_s / 3)
                if not working.done() and not await self._journal.take_task(batch.batch_id, self._fence, batch.state):
                    return
            working.result()
        except Fenced as error:
            _log.info("%s", error)
        except OutriderError as error:
            _log.warning("batch %s, which is %s, waits: %s", batch.batch_id, batch.state, error.message)
        except Exception:
            _log.exception("batch %s, which is %s, waits", batch.batch_id, batch.state)
        finally:
            if working is not None and not working.done():
                working.cancel()
                await until_ended(working)

    async def _check(self, batch: Batch) -> None:
        """Checks every line, and keeps a copy of the file, which its owner may delete."""
        move = partial(self._journal.move, batch.batch_id, fence=self._fence)
        if await self._journal.now_s() >= batch.expires_at:
            error = told_error(None, "batch_expired", "its time was up before its file was checked", None)
            await move(BatchState.FAILED, {"errors": json.dumps([error])})
            return
        copy, index = self._name(batch, "input"), self._name(batch, "index")
        moving: asyncio.Task[None] | None = None
        try:
            check = FileCheck(batch.endpoint, partial(self._lines.check_body, batch))
            found = await self._copy(batch, copy, check)
            if check.errors:
                await move(BatchState.FAILED, {"errors": json.dumps(check.errors)})
                return
            await self._files.announce(index)
            await self._files.store.write(index, one_piece(found.to_bytes()))
            for name in (copy, index):
                await self._files.announce(name, batch.expires_at + KEPT_S)
            fields: dict[str, str | int] = {"num_lines": len(found), "input_content": copy, "index_content": index}
            moving = asyncio.create_task(move(BatchState.IN_PROGRESS, fields))
            await asyncio.wait((moving,))  # a cancellation of this task leaves the change whole
            moving.result()
        finally:
            if moving is None or not await self._may_refer(batch, copy, moving):
                await self._discard(copy, index)

    async def _may_refer(self, batch: Batch, copy: str, moving: asyncio.Task[None]) -> bool:
        """Whether the batch's record refers to a copy after a change that may have failed, or whose answer may be lost.
        Another process may have been faster, or the batch cancelled."""
        await until_ended(moving)
        if not moving.cancelled():
            moving.exception()  # a task that was cancelled has not read it
        try:
            now = await self._journal.get(batch.batch_id)
        except OutriderError:  # what nothing refers to is deleted when its time comes
            return True
        return now is None or now.input_content == copy

    async def _copy(self, batch: Batch, copy: str, check: FileCheck) -> LineIndex:
        """Copies the batch's file and checks it; returns the places of its lines."""
        await self._files.announce(copy)
        try:
            file = await self._files.get(batch.tenant, batch.input_file_id)
            await self._files.store.write(copy, _checked(self._files.store.pieces(file.content), check))
        except NotFound as error:
            check.errors.append(told_error("input_file_id", "file_not_found", error.told, None))
        return await asyncio.to_thread(check.end)

    async def _discard(self, *names: str) -> None:
        """Deletes content that nothing refers to; what cannot be deleted now is deleted when its time comes."""
        for name in names:
            try:
                await self._files.delete_content(name)
            except OutriderError as error:
                _log.info("%s is deleted later: %s", name, error.message)

    async def _finalize(self, batch: Batch) -> None:
        """Writes the output and the errors, and ends the batch."""
        open_lines = await self._journal.close(batch.batch_id)
        undone: list[int] = []
        if batch.is_overdue:
            # Without its copy of the file nobody could name them.
            undone = sorted({*open_lines, *range(await self._journal.next_line(batch.batch_id), batch.num_lines)})
        parts = await self._journal.parts(batch.batch_id)
        fields: dict[str, str | int] = {}
        for kind, expired in (("output", ()), ("error", undone)):
            file_id = await self._write(batch, kind, parts, expired)
            if file_id is not None:
                fields[f"{kind}_file_id"] = file_id
        end = BatchState.COMPLETED
        if batch.state is BatchState.CANCELLING:
            end = BatchState.CANCELLED
        elif batch.is_overdue:
            end = BatchState.EXPIRED
        await self._journal.move(batch.batch_id, end, fields, fence=self._fence)
        await self._clear(batch)

    async def _write(self, batch: Batch, kind: str, parts: list[str], expired: Sequence[int]) -> str | None:
        """Stores the file of the output or of the errors; returns its id, None if it would be empty."""
        name = self._name(batch, kind)
        await self._files.announce(name)
        is_kept = False
        try:
            num_bytes = await self._files.store.write(name, self._results(batch, kind, parts, expired))
            if not num_bytes:
                return None
            now_s = int(await self._journal.now_s())
            file = StoredFile(
                file_id=f"file-{batch.batch_id.removeprefix('batch_')}-{kind}",
                filename=f"{batch.batch_id}_{kind}.jsonl",
                purpose=OUTPUT_PURPOSE,
                num_bytes=num_bytes,
                created_at=now_s,
                expires_at=now_s + (batch.output_life_s or LIFE_S),
                content=name,
            )
            is_kept = True  # the record may be there though its answer is lost
            await self._files.record(batch.tenant, file)
            return file.file_id
        finally:
            if not is_kept:
                await self._discard(name)

    async def _results(self, batch: Batch, kind: str, parts: list[str], expired: Sequence[int]) -> AsyncIterator[bytes]:
        store = self._files.store
        for part in parts:
            content = b"".join([piece async for piece in store.pieces(part)])
            if lines := lines_of_part(content, errors=kind == "error"):
                yield lines
        if not expired:
            return
        index = LineIndex.from_bytes(b"".join([piece async for piece in store.pieces(batch.index_content)]))
        for line in expired:
            raw = await store.read(batch.input_content, index.starts[line], index.ends[line])
            result = never_ran("batch_expired", "the batch's time was up before this request had run")
            read = await asyncio.to_thread(read_line, raw)
            yield result_line(batch.batch_id, line, read.custom_id, result) + b"\n"

    async def _clear(self, batch: Batch) -> None:
        """Deletes what only a batch that runs needs."""
        for name in (*await self._journal.parts(batch.batch_id), batch.input_content, batch.index_content):
            if name:
                await self._files.delete_content(name)
        await self._journal.retire(batch.batch_id, batch.tenant)

    def _name(self, batch: Batch, kind: str) -> str:
        return f"batches/{batch.batch_id}/{kind}-{uuid.uuid4().hex}"


async def _checked(pieces: AsyncIterator[bytes], check: FileCheck) -> AsyncIterator[bytes]:
    """Passes a file on, checking it in a thread; ends early if the rest would change nothing."""
    async for piece in pieces:
        await asyncio.to_thread(check.feed, piece)
        is_left = True
        while is_left:
            began_s = time.monotonic()
            is_left = await asyncio.to_thread(check.check_some, lambda: time.monotonic() - began_s >= SLICE_S)  # noqa: B023
            # A thread of Python takes the interpreter from the event loop, however short each turn is.
            await asyncio.sleep(time.monotonic() - began_s)
        yield piece
        if check.is_over:
            return
