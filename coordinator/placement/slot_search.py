"""Search for the waiting sequences that could have a slot now, in one pass over the queue. Pure.

A sequence's length and its other restrictions (`Restrictions`, equal for almost all) decide which targets it may go to.
Among equally restricted sequences a shorter one fits wherever a longer one does. So when one finds all its targets
full, no length between its own and the roomiest target's need be tried, and the other targets of the shortest sequence
give the next length worth trying. Each step rules out the longest context that is left: the number of sequences tried
is bounded by the number of different `max_model_len`, and sequences that fit nowhere, however many, hide none that
fits.

Targets found full are not asked again for those behind: a slot that comes free meanwhile is for the next pass, which
begins at the head of the queue.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from outrider.registry.worker_record import WorkerRecord

Restrictions = frozenset[Hashable]
"""Everything beside its length that keeps a sequence from targets; more restrictions never leave more targets."""


@dataclass(slots=True)
class SlotSearch:
    """Findings of one pass over the queue."""

    _full: set[str] = field(default_factory=set)  # targets' incarnations
    _in_vain: dict[Restrictions, tuple[float, float]] = field(default_factory=dict)  # lengths, both included

    def is_in_vain(self, num_tokens: int, restrictions: Restrictions) -> bool:
        """Whether all targets of such a sequence are known to be full."""
        lowest, highest = self._in_vain.get(restrictions, (math.inf, -math.inf))
        return lowest <= num_tokens <= highest

    def not_full(self, ranked: Iterable[WorkerRecord]) -> list[WorkerRecord]:
        """The workers that are not known to be full, in their order."""
        return [worker for worker in ranked if worker.incarnation not in self._full]

    def found_full(self, num_tokens: int, restrictions: Restrictions, ranked: Sequence[WorkerRecord]) -> None:
        """Records that no target of such a sequence had a slot; `ranked` are all its targets."""
        self._full.update(worker.incarnation for worker in ranked)
        roomiest = max((worker.max_model_len for worker in ranked), default=math.inf)
        self._widen(restrictions, num_tokens, roomiest)

    def look_shorter(self, restrictions: Restrictions, ranked: Sequence[WorkerRecord]) -> None:
        """Rules out lengths that need a full target; `ranked` are the targets of the shortest sequence with these
        restrictions."""
        roomiest = max((worker.max_model_len for worker in self.not_full(ranked)), default=-1)
        lowest, highest = self._in_vain[restrictions]
        if roomiest < lowest:
            self._widen(restrictions, roomiest + 1, highest)

    def _widen(self, restrictions: Restrictions, lowest: float, highest: float) -> None:
        before = self._in_vain.get(restrictions, (math.inf, -math.inf))
        self._in_vain[restrictions] = min(lowest, before[0]), max(highest, before[1])
