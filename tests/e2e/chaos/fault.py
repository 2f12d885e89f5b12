"""Base classes of faults: something is broken, held for a while and repaired. The faults themselves are in `faults` and
the modules that it names."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import ClassVar

from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.costs import Costs
from tests.e2e.chaos.fleet import Fleet, Worker
from tests.e2e.chaos.ledger import Injection
from tests.e2e.chaos.links import Link
from tests.e2e.chaos.load import Load


class Fault(ABC):
    """One injection."""

    name: ClassVar[str]
    part: ClassVar[str]
    """The part of the fleet that it breaks. Of targets and drafts one is taken; of anything else there is only one."""
    is_rare: ClassVar[bool] = False
    """Whether it comes only where it is asked for by name."""
    needs_ranks: ClassVar[bool] = False
    """Whether it requires targets of several processes."""
    needs_own_engine: ClassVar[bool] = False
    """Whether it breaks, or starts, a target of our own engine."""
    empties_redis: ClassVar[bool] = False
    """Whether Redis loses its data, and with it the batches."""
    costs: ClassVar[Costs] = Costs.NOTHING
    """Costs that clients may meet, apart from time."""

    def __init__(self, fleet: Fleet, load: Load, rng: Random, injection: Injection) -> None:
        self.fleet = fleet
        self.load = load
        self.rng = rng
        self._injection = injection

    @classmethod
    def why_not(cls) -> str | None:
        """The reason why it cannot be injected on this machine, or None."""
        return None

    @classmethod
    async def prepare(cls, fleet: Fleet, cases: Sequence[Case]) -> None:
        """Finds out what has to be known before the load begins."""
        return

    @asynccontextmanager
    async def victim(self) -> AsyncIterator[Worker | None]:
        """Borrows the part that it breaks, so that no other fault has it, until everything is well again."""
        if self.part in ("target", "draft"):
            async with self.fleet.borrowed(self.part, self.rng) as worker:
                yield worker
        else:
            async with self.fleet.only_one(self.part):
                yield None

    @abstractmethod
    async def run(self, worker: Worker | None) -> None:
        """Breaks and mends. Afterwards it is a matter of time until everything is as it was."""

    def describe(self, what: str, seconds: float | None = None) -> None:
        """Says what was hit, and for how long."""
        times = [] if seconds is None else [f"{seconds:.1f} s"]
        self._injection.detail = ", ".join([*([what] if what else []), *times])


class WorkerFault(Fault):
    """A fault of one worker, of the kind that `part` names."""

    async def run(self, worker: Worker | None) -> None:
        assert worker is not None
        await self.hit(worker)

    @abstractmethod
    async def hit(self, worker: Worker) -> None: ...


class NetworkFault(Fault):
    """A fault of a link, which is repaired by opening the link."""

    seconds: ClassVar[tuple[float, float]]

    async def hold(self, link: Link, what: str) -> None:
        seconds = self.rng.uniform(*self.seconds)
        self.describe(what, seconds)
        await asyncio.sleep(seconds)
        link.open()
