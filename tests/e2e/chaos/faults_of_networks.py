"""Networks that are broken one way: what one side says arrives, and what the other answers does not."""

from __future__ import annotations

from typing import ClassVar, Final

from tests.e2e.chaos.fault import Fault, NetworkFault, WorkerFault
from tests.e2e.chaos.fleet import Worker
from tests.e2e.chaos.links import Direction


class _OneWay(NetworkFault):
    """Nothing passes in one direction, for less or for more than the silence that anybody bears."""

    direction: ClassVar[Direction]


class _TargetOneWay(_OneWay, WorkerFault):
    """Between the coordinators and a target. The hint streams to it are well."""

    part, seconds = "target", (0.5, 9.0)

    async def hit(self, worker: Worker) -> None:
        is_hints = self.fleet.hint_streams_to(worker)
        num = worker.link.stall(lambda port: not is_hints(port), self.direction)
        await self.hold(worker.link, f"{worker.name}, {num} connections")


class TargetUnheard(_TargetOneWay):
    """A target hears the coordinators and is not heard: it generates for nobody, and another goes on."""

    name, direction = "target to coordinator blackholed", Direction.TO_CALLER


class TargetDeaf(_TargetOneWay):
    """A target is heard and does not hear: what it has goes on, nothing new begins, who left is not let go."""

    name, direction = "coordinator to target blackholed", Direction.TO_SERVER


class _HintsOneWay(_OneWay, WorkerFault):
    """Between all draft workers and one target."""

    part, seconds = "target", (0.5, 6.0)

    async def hit(self, worker: Worker) -> None:
        num = worker.link.stall(self.fleet.hint_streams_to(worker), self.direction)
        await self.hold(worker.link, f"{worker.name}, {num} streams")


class HintsUnanswered(_HintsOneWay):
    """Hints arrive and commits do not come back: the draft workers run ahead of a text that they do not know."""

    name, direction = "commits to drafts blackholed", Direction.TO_CALLER


class HintsUnheard(_HintsOneWay):
    """Commits come and hints do not arrive, until all of them do at once, long after their time."""

    name, direction = "hints to target blackholed", Direction.TO_SERVER


class _RedisOneWay(_OneWay):
    """Between everybody and Redis."""

    part, seconds = "redis", (0.5, 9.0)

    async def run(self, worker: Worker | None) -> None:
        link = self.fleet.redis.link
        await self.hold(link, f"{link.stall(directions=self.direction)} connections")


class RedisUnheard(_RedisOneWay):
    """Redis does what it is told and its answers are lost: every write is done, and none is known to be."""

    name, direction = "Redis answers blackholed", Direction.TO_CALLER


class RedisDeaf(_RedisOneWay):
    """Nothing that is said to Redis arrives; what it publishes by itself does."""

    name, direction = "Redis commands blackholed", Direction.TO_SERVER


FAULTS_OF_NETWORKS: Final[tuple[type[Fault], ...]] = (
    TargetUnheard, TargetDeaf, HintsUnanswered, HintsUnheard, RedisUnheard, RedisDeaf,
)  # fmt: skip
