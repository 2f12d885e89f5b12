"""A service that cannot open closes what was opened for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.recovery.journal import Journal
from coordinator.request.environment import Outside
from coordinator.service.generation_service import GenerationService
from coordinator.settings import CoordinatorSettings
from outrider.errors import RegistryUnavailable
from outrider.observability.tracing import Tracing
from tests.coordinator.conftest import ClusterFactory


class CountedTracing(Tracing):
    """Tracing that counts how often it was closed."""

    num_closings = 0

    async def close(self) -> None:
        self.num_closings += 1
        await super().close()


async def test_a_service_that_cannot_open_closes_tracing_and_connections(
    clusters: ClusterFactory, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Journal) -> Journal:
        raise RegistryUnavailable("it went away")

    monkeypatch.setattr(Journal, "__aenter__", fail)
    settings = CoordinatorSettings(tokenizer_dir=str(clusters.model_dir), redis_url=redis_url)
    tracing = CountedTracing()
    service = GenerationService(settings, outside=replace(Outside.real(settings), tracing=tracing))
    with pytest.raises(RegistryUnavailable, match="it went away"):
        async with service:
            pass
    assert tracing.num_closings == 1
