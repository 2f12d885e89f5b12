"""Housekeeping every few seconds: connections, gauges, the record of lost targets, memory that is free."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import Gauge

from coordinator.access.api_keys import ANYBODY
from coordinator.placement.routing import Exclusion
from coordinator.request.environment import Environment
from coordinator.service.model_catalog import ModelCatalog
from outrider.local.freed_memory import FreedMemory

_log = logging.getLogger(__name__)

EVERY_S: Final = 5.0


@dataclass(slots=True)
class Housekeeping:
    """Updates what changes slowly, beside the requests of one replica."""

    _environment: Environment
    _catalog: ModelCatalog
    _degraded: Mapping[Gauge, Callable[[], bool]]  # whether the part of each gauge is
    _freed: FreedMemory = field(default_factory=FreedMemory)
    _reported: set[Exclusion] = field(default_factory=set)
    _unpaired: set[tuple[str, ...]] = field(default_factory=set)  # kinds of pairs that have been reported

    async def keep(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._once()
            await asyncio.to_thread(self._freed.return_some)
            await asyncio.sleep(EVERY_S)

    async def _once(self) -> None:
        environment, metrics = self._environment, self._environment.metrics
        learned, poison = environment.speculation, environment.losses.poison
        snapshot, now_s = environment.snapshot(), environment.now_s()
        await environment.channels.forget_all_but(
            {worker.address for worker in (*snapshot.targets, *snapshot.drafts)},
            now_s,
            after_s=environment.settings.deadline_max_s,  # longer than any call may take
        )
        excluded = set(self._catalog.exclusions())
        for exclusion in excluded - self._reported:
            _log.warning("%s worker %s is not used: %s", exclusion.pool, exclusion.worker_id, exclusion.reason)
        self._reported = excluded
        for pool, workers in (("target", snapshot.targets), ("draft", snapshot.drafts)):
            usable, _ = environment.placement.router.usable(workers, environment.now_s())
            metrics.live_workers.labels(pool).set(len(usable))
        served = self._catalog.served(ANYBODY)
        for model in served:
            metrics.know(model.model)
        self._tell_unpaired([model.model for model in served])
        learned.watch.keep(snapshot.drafts)
        metrics.show_draft_alarms(learned.watch.alarms)
        poison.look(snapshot.targets, environment.now_s())
        environment.losses.exchange.share_soon()
        metrics.show_poison(poison.convicted(environment.now_s()))
        metrics.show_priors(learned.priors.summary(environment.now_s()), learned.priors.num_keys)
        metrics.registry_degraded.set(snapshot.degraded)
        for gauge, is_degraded in self._degraded.items():
            gauge.set(is_degraded())

    def _tell_unpaired(self, models: Sequence[str]) -> None:
        """Exports the pairs of workers that draft heads rule out, and logs each kind of pair once."""
        found = self._catalog.unpaired()
        num_pairs = Counter(dict.fromkeys(models, 0))
        for each in found:
            num_pairs[each.model] += each.num_pairs
            if each.kind not in self._unpaired:
                _log.warning("%s", each)
        self._unpaired = {each.kind for each in found}
        self._environment.metrics.show_unpaired(num_pairs)
