"""A whole coordinator in this process around fake workers, without Ray and without Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.api.http.application import create_app
from coordinator.request.environment import Outside
from coordinator.service.generation_service import GenerationService
from coordinator.settings import CoordinatorSettings
from outrider.registry.registry import RegistryCalls
from outrider.registry.worker_record import Pool, Snapshot, WorkerRecord
from outrider.text.tokenizer import Tokenizer
from tests.coordinator.fakes import FakeDraft, FakeTarget, record_of, serving
from tests.coordinator.tiny_model import write_model_dir

TEXT = "def f(x):\n    return x + 1\n"


@dataclass
class Cluster:
    """Fake workers, the service in front of them, and a client of its HTTP edge."""

    service: GenerationService
    client: httpx.AsyncClient
    targets: list[FakeTarget] = field(default_factory=list)
    drafts: list[FakeDraft] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)  # the one that the service sees; a test may replace it

    async def complete(self, **body: Any) -> httpx.Response:
        """POST /v1/completions of a greedy request, changed by `body`."""
        return await self.client.post(
            "/v1/completions", json={"prompt": "import", "temperature": 0, "max_tokens": 12, **body}
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the only model."""
        only = self.service.environment.models.current().only
        assert only is not None
        return only.tokenizer

    @property
    def num_open(self) -> int:
        """Calls that some worker still serves."""
        return sum(target.num_open for target in self.targets) + sum(draft.num_open for draft in self.drafts)


class ClusterFactory:
    """Opens clusters; the model folder is shared by all of them."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.tokenizer = Tokenizer(model_dir)
        self.script = self.tokenizer.encode(TEXT)

    def target(self, **options: Any) -> FakeTarget:
        """A target that says TEXT over and over."""
        return FakeTarget(self.script, **options)

    @asynccontextmanager
    async def open(
        self,
        targets: list[FakeTarget],
        drafts: list[FakeDraft] | None = None,
        *,
        settings: dict[str, Any] | None = None,
        registry: RegistryCalls | None = None,
        **record: Any,
    ) -> AsyncIterator[Cluster]:
        """A coordinator in front of the workers; `record` changes every worker's registry record. Its streams are
        journaled where there is a `registry`."""
        drafts = drafts or []
        async with AsyncExitStack() as stack:

            async def started(pool: Pool, workers: Sequence[FakeTarget | FakeDraft]) -> tuple[WorkerRecord, ...]:
                addresses = [await stack.enter_async_context(serving(worker)) for worker in workers]
                fingerprint = self.tokenizer.fingerprint
                return tuple(
                    record_of(
                        pool,
                        address,
                        worker.fingerprint or fingerprint,
                        **(registered(worker) | record),
                    )
                    for address, worker in zip(addresses, workers, strict=True)
                )

            snapshot = Snapshot(await started("target", targets), await started("draft", drafts))
            options = {"tokenizer_dir": str(self.model_dir), "redis_url": "unused", **(settings or {})}
            made = CoordinatorSettings(**options)
            outside = replace(Outside.real(made), registry=registry)
            seen = [snapshot]
            service = await stack.enter_async_context(GenerationService(made, lambda: seen[0], outside))
            transport = httpx.ASGITransport(create_app(service))
            client = await stack.enter_async_context(
                httpx.AsyncClient(transport=transport, base_url="http://coordinator", timeout=30)
            )
            yield Cluster(service, client, targets, drafts, seen)


def registered(worker: FakeTarget | FakeDraft) -> dict[str, Any]:
    """The fields of a fake worker's record that the fake itself determines."""
    own = {"model_name": worker.model_name, "engine": worker.engine}
    return own | ({"max_model_len": worker.max_model_len} if isinstance(worker, FakeDraft) else {})


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> ClusterFactory:
    return ClusterFactory(write_model_dir(tmp_path_factory.mktemp("model")))
