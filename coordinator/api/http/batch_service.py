"""Files and batches of one replica: opens what they need beside its service, and closes it again."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from coordinator.api.http.line_calls import ENDPOINTS, LineCalls
from coordinator.batches.batch_desk import BatchDesk
from coordinator.batches.batch_runner import BatchRunner
from coordinator.batches.file_store import S3_SCHEME, FileStore, FolderStore, S3Store
from coordinator.batches.files import Files
from coordinator.batches.line_journal import LineJournal
from coordinator.service.generation_service import GenerationService
from outrider.registry.registry import Registry


def open_store(place: str) -> FileStore:
    """Opens the storage that `--batch-files` names. Raises ConfigurationError."""
    return S3Store(place) if place.startswith(S3_SCHEME) else FolderStore(Path(place))


class BatchService:
    """Batches of a service; `desk` is None while they are off, by its settings."""

    def __init__(self, service: GenerationService) -> None:
        self.desk: BatchDesk | None = None
        self._service = service
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        settings = self._service.environment.settings
        if settings.batch_files is None:
            return self
        store = open_store(settings.batch_files)
        registry = Registry(settings.redis_url)  # of its own: its calls may wait longer than those of requests
        self._stack.push_async_callback(registry.close)
        self.desk = BatchDesk(Files(registry, store, settings.batch_bytes_max), LineJournal(registry), tuple(ENDPOINTS))
        metrics = self._service.environment.metrics
        await self._stack.enter_async_context(BatchRunner(self.desk, LineCalls(self._service), metrics))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
