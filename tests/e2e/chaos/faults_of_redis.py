"""Faults of Redis that leave it running: it answers late, or has no memory for what is written.

What clients may see of each of them: nothing. Redis is on no request's path; while it cannot be asked in time the last
snapshot serves on, and what is to be written waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import ClassVar, Final

import redis
import redis.asyncio

from tests.e2e.chaos.costs import Costs
from tests.e2e.chaos.fault import Fault
from tests.e2e.chaos.fleet import Worker

FILL_EVERY_S: Final = 0.25


class RedisSlow(Fault):
    """Every answer of Redis takes longer, by more than a request waits for one, or more than anybody does."""

    name, part = "Redis slow", "redis"
    costs: ClassVar[Costs] = Costs.NOTHING

    async def run(self, worker: Worker | None) -> None:
        link, seconds = self.fleet.redis.link, self.rng.uniform(5.0, 15.0)
        link.delay_s = self.rng.choice((0.08, 0.5))
        self.describe(f"by {link.delay_s * 1e3:.0f} ms each way", seconds)
        try:
            await asyncio.sleep(seconds)
        finally:
            link.open()


class RedisFull(Fault):
    """Redis may take no more memory than it has, and evicts nothing: what would need more is refused."""

    name, part = "Redis full", "redis"
    costs: ClassVar[Costs] = Costs.NOTHING

    async def run(self, worker: Worker | None) -> None:
        seconds = self.rng.uniform(5.0, 15.0)
        self.describe("", seconds)
        # Administrators reach it past the link, which another fault may have broken.
        client = redis.asyncio.Redis.from_url(self.fleet.redis.url, socket_timeout=5.0)
        async with client:
            try:
                until_s = time.monotonic() + seconds
                while time.monotonic() < until_s:
                    # Again and again: what expires makes room.
                    used = int((await client.info("memory"))["used_memory"])
                    await client.config_set("maxmemory", max(used - (64 << 10), 1))
                    await asyncio.sleep(FILL_EVERY_S)
            finally:
                with contextlib.suppress(redis.RedisError):
                    await client.config_set("maxmemory", 0)


FAULTS_OF_REDIS: Final[tuple[type[Fault], ...]] = (RedisSlow, RedisFull)
