"""Refuses requests whose prompts have just cost target workers, and records how others ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.intake.generation_request import GenerationSpec
from coordinator.observability.metrics import CoordinatorMetrics
from coordinator.recovery.poison import CONVICTED_S, LOSSES_MAX
from coordinator.request.environment import Losses
from outrider.errors import Poisonous

KNOWN_LOSSES_S: Final = 0.1
"""Greatest age of other replicas' losses when a request begins."""


class PoisonGuard:
    """Checks requests against the record of poisonous prompts, and updates it at their end."""

    def __init__(self, losses: Losses, metrics: CoordinatorMetrics, now_s: Callable[[], float]) -> None:
        self._poison, self._exchange = losses.poison, losses.exchange
        self._metrics = metrics
        self._now_s = now_s

    async def check(self, spec: GenerationSpec) -> None:
        """Raises Poisonous for a prompt that has just cost more workers than one request may. A run whose prompt has
        cost some begins with their number."""
        if spec.run.num_losses >= LOSSES_MAX:
            raise Poisonous(f"{spec.run.num_losses} target workers were lost while they had this request", CONVICTED_S)
        if self._poison:
            await self._exchange.refresh(KNOWN_LOSSES_S)
            digest, now_s = spec.prompt_digest, self._now_s()
            left_s = self._poison.time_left_s(digest, now_s)
            if left_s > 0:
                raise Poisonous(
                    f"target workers were lost one after the other to a request with this prompt ({digest}); it is "
                    f"refused for another {left_s:.0f} s",
                    left_s,
                )
            spec.run.resume_with(self._poison.num_killed(digest, now_s))

    def acquit(self, spec: GenerationSpec) -> None:
        """Clears the prompt of a completed request: no worker was lost to it."""
        if self._poison and self._poison.acquit(spec.prompt_digest, self._now_s()):
            self._exchange.share_soon()
            self._metrics.show_poison(self._poison.convicted(self._now_s()))

    def suspect(self, spec: GenerationSpec) -> None:
        """Records the losses of a request that ended without its output, for any reason."""
        if spec.run.num_losses:
            self._poison.suspect(spec.prompt_digest, spec.run.killed, self._now_s())
            self._exchange.share_soon()
