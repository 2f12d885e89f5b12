"""What the requests of one replica share, handed to each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.fallback import FallbackPolicy
from coordinator.metrics import CoordinatorMetrics
from coordinator.priors import PriorTable
from coordinator.routing import Router
from coordinator.settings import CoordinatorSettings
from coordinator.workers import WorkerChannels
from outrider.tokenizer import Tokenizer
from outrider.worker_record import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Built once per replica; tests build one around fake workers."""

    settings: CoordinatorSettings
    tokenizer: Tokenizer
    router: Router
    channels: WorkerChannels
    metrics: CoordinatorMetrics
    snapshot: Callable[[], Snapshot]
    now_s: Callable[[], float]  # a monotonic clock
    policy: FallbackPolicy = field(default_factory=FallbackPolicy)
    priors: PriorTable = field(default_factory=PriorTable)
