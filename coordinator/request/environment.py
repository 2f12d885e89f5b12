"""Resources that the requests of one replica share."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from coordinator.access.concurrency_limits import ConcurrencyLimits
from coordinator.access.rate_limits import RateLimits
from coordinator.models.models_file import ServedModels, open_models
from coordinator.observability.metrics import CoordinatorMetrics
from coordinator.placement import draft_heads
from coordinator.placement.admission import Admission
from coordinator.placement.reservations import Reservations
from coordinator.placement.routing import Router
from coordinator.recovery.loss_exchange import LossExchange
from coordinator.recovery.poison import PoisonRecord, Trials
from coordinator.settings import CoordinatorSettings
from coordinator.speculation.acceptance_watch import AcceptanceWatch
from coordinator.speculation.fallback import FallbackPolicy
from coordinator.speculation.priors import PriorTable
from coordinator.workers.channels import WorkerChannels
from coordinator.workers.worker_identity import WorkerIdentities
from outrider.errors import OutriderError, Unavailable
from outrider.observability.loop_lag import LoopLag
from outrider.observability.tracing import OFF, Tracing
from outrider.registry.registry import Registry, RegistryCalls
from outrider.registry.worker_record import Snapshot, WorkerRecord
from outrider.security.tls import Dialer, Role, TlsFiles, check_role


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """A replica's services, clock, randomness and ids, given from outside. The simulation gives its own."""

    models: ServedModels
    channels: WorkerChannels
    metrics: CoordinatorMetrics
    identities: WorkerIdentities = field(default_factory=lambda: WorkerIdentities(None, time.monotonic))
    registry: RegistryCalls | None = None  # None: the Redis of the settings; priors and canaries need that one
    now_s: Callable[[], float] = time.monotonic
    chance: random.Random = field(default_factory=random.Random)
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex
    policy: FallbackPolicy = field(default_factory=FallbackPolicy)
    tracing: Tracing = OFF

    @classmethod
    def real(cls, settings: CoordinatorSettings) -> Self:
        """The collaborators of a real coordinator. Raises ConfigurationError."""
        models = open_models(settings)
        files = None if settings.tls_dir is None else TlsFiles(Path(settings.tls_dir))
        if files is not None:
            check_role(files.current(), Role.COORDINATOR)
        identities = WorkerIdentities(files, time.monotonic, requires_ids=settings.require_worker_ids)
        return cls(
            models=models,
            channels=WorkerChannels(Dialer(files), identities.name_at),
            identities=identities,
            metrics=CoordinatorMetrics(files, settings.metrics_names),
            tracing=Tracing.to(settings.otlp_endpoint, "outrider-coordinator", uuid.uuid4().hex[:8]),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Slots at workers: the choice of a worker, its reservation, and the queues for it."""

    router: Router
    reservations: Reservations
    admission: Admission


@dataclass(frozen=True, slots=True)
class Losses:
    """Lost targets and the prompts that they had."""

    exchange: LossExchange  # of `poison`, with the other replicas
    poison: PoisonRecord
    trials: Trials = field(default_factory=Trials)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Earlier requests' evidence on whether speculation pays."""

    policy: FallbackPolicy
    priors: PriorTable = field(default_factory=PriorTable)
    watch: AcceptanceWatch = field(default_factory=AcceptanceWatch)


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of the tenants that API keys name."""

    rates: RateLimits
    concurrency: ConcurrencyLimits


@dataclass(frozen=True, slots=True)
class LoopTime:
    """Time of the event loop: its lag, and locks by which each turn of the loop does one piece of some long work."""

    lag: LoopLag = field(default_factory=LoopLag)
    long_prompts: asyncio.Lock = field(default_factory=asyncio.Lock)  # encoding
    repeats: asyncio.Lock = field(default_factory=asyncio.Lock)  # detokenizing


class OpenRequests:
    """The requests that a replica runs, so that one that stops can end them with an error that clients see.

    Not thread-safe: it belongs to the event loop that serves them.
    """

    def __init__(self) -> None:
        self._endings: dict[object, Callable[[OutriderError], None]] = {}
        self._is_stopping = False

    @contextmanager
    def entered(self, end: Callable[[OutriderError], None]) -> Iterator[None]:
        """Counts a request as open inside the block. `end` ends it with an error and must return at once. Raises
        Unavailable once the replica has ended its requests."""
        if self._is_stopping:
            raise _stopping()
        key = object()
        self._endings[key] = end
        try:
            yield
        finally:
            del self._endings[key]

    def end_all(self) -> None:
        """Ends every open request, and refuses others from now on."""
        self._is_stopping = True
        for end in list(self._endings.values()):
            end(_stopping())


def _stopping() -> Unavailable:
    return Unavailable("this coordinator stops; send the request again, or resume its stream")


class Environment:
    """Shared resources of one replica, built once from its settings and `Outside`."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        outside: Outside,
        snapshot: Callable[[], Snapshot],
        reason_against: Callable[[WorkerRecord], str | None],
        *,
        slots_in: RegistryCalls | None,
        losses_in: RegistryCalls | None,
        limits_in: Registry | None,
    ) -> None:
        """`snapshot` returns the live workers, and `reason_against` why one is not used. The registries are those that
        keep slots, losses and limits of all replicas; without one this replica keeps its own."""
        self.settings, self.snapshot, self.now_s = settings, snapshot, outside.now_s
        self.models, self.channels, self.new_id = outside.models, outside.channels, outside.new_id
        self.metrics, self.tracing = outside.metrics, outside.tracing
        router = Router(
            lambda worker: (
                outside.models.current().reason_against(worker)
                or draft_heads.reason_against(worker, self.snapshot().targets)
            ),
            outside.chance,
            settings.quarantine_s,
            reason_against,
        )
        reservations, poison = Reservations(slots_in, self.now_s), PoisonRecord()
        admission = Admission(
            router,
            reservations,
            self.now_s,
            wait_max_s=settings.queue_wait_max_s,
            weights=dict(settings.tenant_weights),
        )
        self.placement = Placement(router, reservations, admission)
        self.losses = Losses(LossExchange(losses_in, poison, self.now_s), poison)
        self.limits = TenantLimits(RateLimits(limits_in, self.now_s), ConcurrencyLimits(limits_in, self.now_s))
        self.speculation = Speculation(outside.policy)
        self.loop = LoopTime()
        self.open_requests = OpenRequests()
