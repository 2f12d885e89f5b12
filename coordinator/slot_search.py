"""Which waiting sequences could have a slot now, in one look through the queue. Pure.

What decides which targets a sequence may go to is its length and what else narrows its choice (`Restrictions`, equal
for almost all). Of sequences that are restricted alike a shorter one fits wherever a longer one does. So when one finds
all its targets full, none between it and the roomiest target needs to be tried, and the targets that the shortest one
could go to beside them tell which length is worth trying next. Each step rules out the longest context that is left:
how many sequences are tried is bounded by how many different `max_model_len` there are, and no number of sequences that
fit nowhere hides one that fits.

Targets found full are not asked again for those behind: a slot that comes free meanwhile is for the next look, which
begins with those whose turn is first.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from outrider.worker_record import WorkerRecord

Restrictions = frozenset[Hashable]
"""Whatever keeps targets from a sequence beside its length; more restrictions never leave more targets."""


@dataclass(slots=True)
class SlotSearch:
    """What one look through the queue has found out so far."""

    _full: set[str] = field(default_factory=set)  # targets' incarnations
    _in_vain: dict[Restrictions, tuple[float, float]] = field(default_factory=dict)  # lengths, both included

    def is_in_vain(self, num_tokens: int, restrictions: Restrictions) -> bool:
        """Whether all targets of such a sequence are known to be full."""
        lowest, highest = self._in_vain.get(restrictions, (math.inf, -math.inf))
        return lowest <= num_tokens <= highest

    def not_full(self, ranked: Iterable[WorkerRecord]) -> list[WorkerRecord]:
        """Those that are not known to be full, in their order."""
        return [worker for worker in ranked if worker.incarnation not in self._full]

    def found_full(self, num_tokens: int, restrictions: Restrictions, ranked: Sequence[WorkerRecord]) -> None:
        """No target of such a sequence had a slot; `ranked` are all there are."""
        self._full.update(worker.incarnation for worker in ranked)
        roomiest = max((worker.max_model_len for worker in ranked), default=math.inf)
        self._widen(restrictions, num_tokens, roomiest)

    def look_shorter(self, restrictions: Restrictions, ranked: Sequence[WorkerRecord]) -> None:
        """`ranked` are the targets of the shortest sequence that is restricted so: only what fits those of them that
        are not full is worth trying."""
        roomiest = max((worker.max_model_len for worker in self.not_full(ranked)), default=-1)
        lowest, highest = self._in_vain[restrictions]
        if roomiest < lowest:
            self._widen(restrictions, roomiest + 1, highest)

    def _widen(self, restrictions: Restrictions, lowest: float, highest: float) -> None:
        before = self._in_vain.get(restrictions, (math.inf, -math.inf))
        self._in_vain[restrictions] = min(lowest, before[0]), max(highest, before[1])
