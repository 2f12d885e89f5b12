"""The draft workers of one engine, and which of them a request is attached to next. Pure.

A worker that fails is left alone for a growing pause. There is no queue: a request that no worker takes asks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
REFUSED_S: Final = 60.0
"""Pause of a worker that cannot draft for this engine at all, such as one with another tokenizer."""
FULL_S: Final = 0.5
"""Pause of a worker that is full."""
EMPTY_S: Final = 1.0
"""Pause while no worker is known that may take the request."""


@dataclass(slots=True, eq=False)
class DraftWorker:
    """One draft worker; times are on the caller's clock, seconds."""

    address: str
    num_sessions: int = 0
    away_until: float = 0.0
    num_failures: int = 0  # in a row


class DraftPool:
    """All draft workers of one engine."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.workers = [DraftWorker(address) for address in dict.fromkeys(addresses)]
        self._num_choices = 0

    def replace(self, addresses: Sequence[str]) -> None:
        """Takes the addresses that there are now. Those that stay keep what is known of them."""
        known = {worker.address: worker for worker in self.workers}
        self.workers = [known.get(address) or DraftWorker(address) for address in dict.fromkeys(addresses)]

    def choose(self, now: float, excluded: AbstractSet[DraftWorker] = frozenset()) -> DraftWorker | None:
        """The worker with the fewest sessions of those that are there; None if none is. Ties take turns."""
        there = [worker for worker in self.workers if worker.away_until <= now and worker not in excluded]
        if not there:
            return None
        self._num_choices += 1
        first = self._num_choices % len(there)
        return min(there[first:] + there[:first], key=lambda worker: worker.num_sessions)

    def wait_s(self, now: float, excluded: AbstractSet[DraftWorker] = frozenset()) -> float:
        """How long until a worker may be there again, or until another one may have come."""
        there_at = (worker.away_until for worker in self.workers if worker not in excluded)
        return max(min(there_at, default=now + EMPTY_S) - now, 0.0)

    def succeed(self, worker: DraftWorker) -> None:
        """Notes that a worker has answered."""
        worker.num_failures = 0

    def fail(self, worker: DraftWorker, now: float) -> bool:
        """Leaves a worker alone that did not answer; returns whether it was there before."""
        if worker.away_until > now:
            return False  # several of its sessions report one failure
        worker.away_until = now + PAUSES_S[min(worker.num_failures, len(PAUSES_S) - 1)]
        worker.num_failures += 1
        return worker.num_failures == 1

    def refuse(self, worker: DraftWorker, now: float) -> bool:
        """Leaves a worker alone that refuses this engine; returns whether it was there before."""
        was_there = worker.away_until <= now
        worker.away_until = now + REFUSED_S
        return was_there

    def fill(self, worker: DraftWorker, now: float) -> None:
        """Leaves a worker alone that has no slot."""
        worker.away_until = max(worker.away_until, now + FULL_S)
