"""What the requests of one replica share, handed to each of them."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from coordinator.acceptance_watch import AcceptanceWatch
from coordinator.admission import Admission
from coordinator.concurrency_limits import ConcurrencyLimits
from coordinator.fallback import FallbackPolicy
from coordinator.loss_exchange import LossExchange
from coordinator.metrics import CoordinatorMetrics
from coordinator.poison import PoisonRecord, Trials
from coordinator.priors import PriorTable
from coordinator.rate_limits import RateLimits
from coordinator.reservations import Reservations
from coordinator.routing import Router
from coordinator.settings import CoordinatorSettings
from coordinator.worker_identity import WorkerIdentities
from coordinator.worker_threads import WorkerThreads
from coordinator.workers import WorkerChannels
from outrider.loop_lag import LoopLag
from outrider.registry import RegistryCalls
from outrider.tls import Dialer, Role, TlsFiles, check_role
from outrider.tokenizer import Tokenizer
from outrider.tracing import OFF, Tracing
from outrider.worker_record import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a replica reaches beyond its clients, and what is not the same in two runs. The simulation has its own."""

    tokenizer: Tokenizer
    channels: WorkerChannels
    metrics: CoordinatorMetrics
    identities: WorkerIdentities = field(default_factory=lambda: WorkerIdentities(None, time.monotonic))
    registry: RegistryCalls | None = None  # None: the Redis of the settings, for workers and for priors
    now_s: Callable[[], float] = time.monotonic
    chance: random.Random = field(default_factory=random.Random)
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex
    policy: FallbackPolicy = field(default_factory=FallbackPolicy)
    tracing: Tracing = OFF

    @classmethod
    def real(cls, settings: CoordinatorSettings) -> Self:
        tokenizer = Tokenizer(Path(settings.tokenizer_dir), settings.chat_template)
        files = None if settings.tls_dir is None else TlsFiles(Path(settings.tls_dir))
        if files is not None:
            check_role(files.current(), Role.COORDINATOR)
        identities = WorkerIdentities(files, time.monotonic, requires_ids=settings.require_worker_ids)
        return cls(
            tokenizer=tokenizer,
            channels=WorkerChannels(Dialer(files), identities.name_at),
            identities=identities,
            metrics=CoordinatorMetrics(files),
            tracing=Tracing.to(settings.otlp_endpoint, "outrider-coordinator", uuid.uuid4().hex[:8]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Built once per replica; tests build one around fake workers."""

    settings: CoordinatorSettings
    tokenizer: Tokenizer
    router: Router
    channels: WorkerChannels
    metrics: CoordinatorMetrics
    snapshot: Callable[[], Snapshot]
    reservations: Reservations
    admission: Admission
    now_s: Callable[[], float]  # a monotonic clock
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex  # of a session at a target; never the same twice
    policy: FallbackPolicy = field(default_factory=FallbackPolicy)
    priors: PriorTable = field(default_factory=PriorTable)
    watch: AcceptanceWatch = field(default_factory=AcceptanceWatch)
    limits: RateLimits = field(default_factory=lambda: RateLimits(None, time.monotonic))
    poison: PoisonRecord = field(default_factory=PoisonRecord)
    losses: LossExchange = field(  # of `poison`, with the other replicas
        default_factory=lambda: LossExchange(None, PoisonRecord(), time.monotonic)
    )
    trials: Trials = field(default_factory=Trials)
    concurrency: ConcurrencyLimits = field(default_factory=lambda: ConcurrencyLimits(None, time.monotonic))
    tracing: Tracing = OFF
    threads: WorkerThreads = field(default_factory=WorkerThreads)  # for what would hold up the event loop
    lag: LoopLag = field(default_factory=LoopLag)  # of the event loop that all of this runs on
    long_prompts: asyncio.Lock = field(
        default_factory=asyncio.Lock
    )  # one is made a message in a turn of the loop
    repeats: asyncio.Lock = field(
        default_factory=asyncio.Lock
    )  # likewise of what clients have, made text again
