"""What tests of several folders need: a Redis of their own."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio
from hypothesis import HealthCheck, settings

from outrider.redis_server import EmbeddedRedis
from outrider.registry import Registry

# How long an example takes is the machine's doing, which may be elsewhere for a moment.
settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")


# A developer's own Redis is nothing to them.
for name in ("OUTRIDER_REDIS_URL", "OUTRIDER_REDIS_URL_FILE"):
    os.environ.pop(name, None)


def pytest_collection_finish() -> None:
    """What was imported stays: half of a small model's loading was the garbage collector's look at all of it."""
    gc.freeze()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    yield server.start()
    server.stop()


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    """On an empty Redis."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushall()
    registry = Registry(redis_url)
    yield registry
    await registry.close()
