"""A loop of a replica that an error ends which nobody foresaw begins again: what it keeps fresh does not grow old."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.access.concurrency_limits import ConcurrencyLimits
from coordinator.placement.reservations import Reservations
from coordinator.recovery.journal import Journal
from coordinator.service import generation_service
from coordinator.service.housekeeping import Housekeeping
from coordinator.speculation.prior_store import PriorStore
from coordinator.speculation.priors import PriorTable
from coordinator.workers.worker_identity import WorkerIdentities
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import eventually
from tests.coordinator.test_resumption import Memory


async def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for every command to the registry; returns None."""


def registry() -> Any:
    return SimpleNamespace(register_script=lambda script: nothing, ask=nothing)


@asynccontextmanager
async def replica(clusters: ClusterFactory) -> AsyncIterator[None]:
    async with clusters.open([clusters.target()]):
        yield


def clock_s() -> float:
    return 0.0


@pytest.mark.parametrize(
    ("owner", "loop", "opened"),
    [
        (Housekeeping, "keep", replica),
        (generation_service, "keep_ticking", replica),
        (Journal, "_keep", lambda _: Journal(cast(Any, Memory()))),
        (WorkerIdentities, "_keep", lambda _: WorkerIdentities(cast(Any, object()), clock_s)),
        (ConcurrencyLimits, "_keep_renewing", lambda _: ConcurrencyLimits(registry(), clock_s)),
        (ConcurrencyLimits, "_keep_releasing", lambda _: ConcurrencyLimits(registry(), clock_s)),
        (Reservations, "_keep_renewing", lambda _: Reservations(None, clock_s)),
        (Reservations, "_keep_releasing", lambda _: Reservations(None, clock_s)),
        (PriorStore, "_keep", lambda _: PriorStore(registry(), PriorTable(), clock_s)),
    ],
)
async def test_it_begins_again(
    clusters: ClusterFactory,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    loop: str,
    opened: Callable[[ClusterFactory], AbstractAsyncContextManager[Any]],
) -> None:
    begun = []

    async def fail(*args: Any) -> None:
        begun.append(args)
        raise KeyError("nobody foresaw it")

    monkeypatch.setattr(owner, loop, fail)
    monkeypatch.setattr(PriorStore, "sync", nothing)
    async with opened(clusters):
        await eventually(lambda: len(begun) > 1, "it has begun again", 20)
