"""Another process writes between the reads and the writes of a worker's transactions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from outrider.registry import own_lease
from outrider.registry.registry import Registry
from tests.outrider.test_registry import RECORD

PREFIX = "{or:target}:"
NEWER = replace(RECORD, incarnation="b")


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def before_writes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps to take between the reads and the writes of the next transactions, one for each."""
    steps: list[Any] = []
    execute = Pipeline.execute

    async def executed(calls: Pipeline, *given: Any, **named: Any) -> Any:
        if calls.watching and steps:
            await steps.pop(0)
        return await execute(calls, *given, **named)

    monkeypatch.setattr(Pipeline, "execute", executed)
    return steps


async def test_a_replacement_that_writes_meanwhile_keeps_the_id(
    registry: Registry, client: redis.asyncio.Redis, before_writes: list[Any]
) -> None:
    old, new = await registry.join("target"), await registry.join("target")
    before_writes += [registry.write(NEWER, new)]
    assert not await own_lease.write(client, PREFIX, RECORD, old, 1000)
    assert (await registry.read("target")).workers == (NEWER,)


async def test_one_that_leaves_meanwhile_does_not_remove_its_replacement(
    registry: Registry, client: redis.asyncio.Redis, before_writes: list[Any]
) -> None:
    await registry.write(RECORD, await registry.join("target"))
    before_writes += [registry.write(NEWER, await registry.join("target"))]
    assert not await own_lease.remove(client, PREFIX, RECORD)
    assert (await registry.read("target")).workers == (NEWER,)


async def test_the_tries_have_an_end(registry: Registry, client: redis.asyncio.Redis, before_writes: list[Any]) -> None:
    joined = await registry.join("target")
    key = f"{PREFIX}w:{RECORD.worker_id}"
    before_writes += [client.hset(key, "load", str(number)) for number in range(own_lease.TRIES_MAX)]
    with pytest.raises(WatchError):
        await own_lease.write(client, PREFIX, RECORD, joined, 1000)
    assert not before_writes
