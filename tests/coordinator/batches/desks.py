"""Parts for tests of batches: a desk over a real Redis and a folder, and a service that answers lines at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from coordinator.access.api_keys import ANYBODY, Caller
from coordinator.batches.batch import Batch
from coordinator.batches.batch_desk import PURPOSE, WINDOW, BatchDesk
from coordinator.batches.batch_lines import LineResult
from coordinator.batches.batch_runner import Hold
from coordinator.batches.file_store import FileStore, FolderStore, one_piece
from coordinator.batches.files import Files
from coordinator.batches.line_journal import LineJournal
from coordinator.batches.line_room import RoomSize
from outrider.errors import InvalidRequest
from outrider.registry.registry import Registry

ENDPOINT = "/v1/completions"
MODEL = "any"


def desk_over(
    registry: Registry, folder: Path, *, lease_s: float = 15.0, bytes_max: int = 1 << 30, store: FileStore | None = None
) -> BatchDesk:
    files = Files(registry, store or FolderStore(folder), bytes_max)
    return BatchDesk(files, LineJournal(registry, lease_s), (ENDPOINT, "/v1/chat/completions"))


def line(custom_id: str, /, **changes: Any) -> bytes:
    """A request of a file, without its newline."""
    content = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"prompt": custom_id}}
    return json.dumps(content | changes).encode()


def lines(num: int) -> bytes:
    return b"".join(line(f"r{number}") + b"\n" for number in range(num))


def a_batch(**changes: Any) -> Batch:
    """A record of a batch."""
    fields: dict[str, Any] = {"batch_id": "batch_1", "tenant": None, "input_file_id": "file-1", "endpoint": ENDPOINT}
    return Batch(**fields | {"window": WINDOW, "created_at": 1, "expires_at": 2} | changes)


async def created(desk: BatchDesk, content: bytes, caller: Caller = ANYBODY) -> Batch:
    """A batch over a file of this content."""
    file = await desk.files.upload(caller, "in.jsonl", PURPOSE, one_piece(content))
    return await desk.create(
        caller, input_file_id=file.file_id, endpoint=ENDPOINT, window=WINDOW, metadata=None, output_life_s=None
    )


async def state_of(desk: BatchDesk, batch: Batch) -> Batch:
    found = await desk.journal.get(batch.batch_id)
    assert found is not None
    return found


async def until(desk: BatchDesk, batch: Batch, condition: Callable[[Batch], bool], within_s: float = 30.0) -> Batch:
    """Waits until the batch meets the condition; fails with its last record."""
    found = await state_of(desk, batch)
    try:
        async with asyncio.timeout(within_s):
            while not condition(found):
                await asyncio.sleep(0.02)
                found = await state_of(desk, batch)
    except TimeoutError:
        raise AssertionError(f"not within {within_s} s: {found}") from None
    return found


async def results(desk: BatchDesk, file_id: str | None, tenant: str | None = None) -> list[dict[str, Any]]:
    """The lines of an output file."""
    if file_id is None:
        return []
    file = await desk.files.get(tenant, file_id)
    content = b"".join([piece async for piece in desk.files.store.pieces(file.content)])
    assert file.num_bytes == len(content)
    return [json.loads(each) for each in content.splitlines()]


def names_in(folder: Path) -> set[str]:
    """Files below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


class EchoLines:
    """A service that answers each line with its prompt. `fail` maps prompts to the errors of their next runs."""

    def __init__(self, room: int = 8, fail: Mapping[str, list[Exception]] | None = None, delay_s: float = 0.0) -> None:
        self.num_room = room
        self.runs: list[str] = []
        self.most = self.num_running = 0  # sequences
        self._fail = dict(fail or {})
        self._delay_s = delay_s
        self.gate = asyncio.Event()
        self.gate.set()

    def check_body(self, batch: Batch, url: str, body: bytes) -> None:
        if "prompt" not in json.loads(body):
            raise InvalidRequest("prompt", "parameter 'prompt' is required")

    def room(self) -> RoomSize:
        return RoomSize(self.num_room, {MODEL: self.num_room})

    async def run(self, batch: Batch, url: str, body: bytes, request_id: str, hold: Hold) -> LineResult:
        content = json.loads(body)
        prompt, num = content["prompt"], content.get("n", 1)
        async with hold(MODEL, num):
            self.runs.append(prompt)
            self.num_running += num
            self.most = max(self.most, self.num_running)
            try:
                await asyncio.sleep(self._delay_s)
                await self.gate.wait()
                if errors := self._fail.get(prompt):
                    raise errors.pop(0)
                return LineResult(200, request_id, {"text": prompt})
            finally:
                self.num_running -= num

    def failure(self, error: Exception, request_id: str) -> LineResult:
        return LineResult(getattr(error, "http_status", 500), request_id, {"error": {"message": str(error)}})


async def in_pieces(content: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]
