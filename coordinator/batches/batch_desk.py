"""Batches as clients see them: created, shown, listed and cancelled. Each tenant sees its own."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from coordinator.access.api_keys import Caller
from coordinator.batches.batch import Batch, BatchState
from coordinator.batches.files import Files
from coordinator.batches.line_journal import Fenced, LineJournal
from outrider.errors import Conflict, InvalidRequest, NotFound

PURPOSE: Final = "batch"
OUTPUT_PURPOSE: Final = "batch_output"
WINDOW: Final = "24h"
"""The only window, as at OpenAI."""
WINDOW_S: Final = 24 * 3600


class BatchDesk:
    """The batches and files of one server, without the loop that runs them."""

    def __init__(self, files: Files, journal: LineJournal, endpoints: Collection[str]) -> None:
        """`endpoints`: paths whose requests a batch may have."""
        self.files = files
        self.journal = journal
        self.endpoints = tuple(endpoints)

    async def create(
        self,
        caller: Caller,
        *,
        input_file_id: str,
        endpoint: str,
        window: str,
        metadata: Mapping[str, str] | None,
        output_life_s: int | None,
    ) -> Batch:
        """Creates a batch over an uploaded file. Raises InvalidRequest, NotFound for the file, Overloaded."""
        if endpoint not in self.endpoints:
            raise InvalidRequest("endpoint", f"endpoint must be one of {', '.join(self.endpoints)}")
        if window != WINDOW:
            raise InvalidRequest("completion_window", f"completion_window must be {WINDOW}")
        file = await self.files.get(caller.tenant, input_file_id, "input_file_id")
        if file.purpose != PURPOSE:
            raise InvalidRequest("input_file_id", f"the file's purpose is {file.purpose}; it must be {PURPOSE}")
        now_s = int(await self.journal.now_s())
        batch = Batch(
            batch_id=f"batch_{uuid.uuid4().hex}",
            tenant=caller.tenant,
            shares_prefixes=caller.shares_prefixes,
            models=caller.models,
            input_file_id=input_file_id,
            endpoint=endpoint,
            window=window,
            metadata=metadata,
            output_life_s=output_life_s,
            created_at=now_s,
            expires_at=now_s + WINDOW_S,
        )
        await self.journal.create(batch)
        return batch

    async def get(self, caller: Caller, batch_id: str) -> Batch:
        """Reads a batch. Raises NotFound."""
        batch = await self.journal.get(batch_id)
        if batch is None or batch.tenant != caller.tenant:
            raise NotFound(f"there is no batch {batch_id[:100]!r}", "batch_id")
        return batch

    async def page(self, caller: Caller, after: str, limit: int) -> Sequence[Batch]:
        """Batches after one of them, the newest first. Raises NotFound if there is no such batch."""
        ids = await self.journal.page(caller, after, limit)
        if ids is None:
            raise NotFound(f"there is no batch {after[:100]!r}", "after")
        found = [await self.journal.get(batch_id) for batch_id in ids]
        return [batch for batch in found if batch is not None]

    async def cancel(self, caller: Caller, batch_id: str) -> Batch:
        """Cancels a batch: no line of it runs any more. Raises NotFound, and Conflict if it has ended."""
        batch = await self.get(caller, batch_id)
        if batch.state is BatchState.CANCELLED:
            return batch
        try:
            await self.journal.move(batch_id, BatchState.CANCELLING)
        except Fenced:
            state = (await self.get(caller, batch_id)).state
            raise Conflict(f"the batch is {state}, and cannot be cancelled any more", "batch_id") from None
        return await self.get(caller, batch_id)
