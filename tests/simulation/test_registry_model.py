"""The simulation's registry does what the scripts on a real Redis do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.registry import LEASE_S, RESERVATION_S, Registry
from outrider.worker_record import WorkerRecord
from tests.simulation.registry import PoolModel

RECORD = WorkerRecord("t0", "target", "h:1", "a", 1, "demo", "0" * 16, 8, 8, 2, "float32", 1)
INCARNATIONS = ("a", "b", "c")

records = st.builds(
    lambda worker_id, life, state: replace(
        RECORD, worker_id=worker_id, incarnation=INCARNATIONS[life], started_at_ms=life, state=state
    ),
    st.sampled_from(("t0", "t1")),
    st.integers(0, 2),
    st.sampled_from(("ready", "draining")),
)
tokens = st.sampled_from("wxyz")
operations = st.one_of(
    st.tuples(st.just("write"), records),
    st.tuples(st.just("remove"), records),
    st.tuples(st.just("read")),
    st.tuples(
        st.just("reserve"),
        st.permutations(INCARNATIONS),
        st.lists(st.integers(0, 3), min_size=3, max_size=3),
        tokens,
    ),
    st.tuples(st.just("renew"), st.sampled_from(INCARNATIONS), st.lists(tokens, min_size=1, max_size=3)),
    st.tuples(st.just("release"), st.sampled_from(INCARNATIONS), tokens),
    st.tuples(st.just("pass"), st.sampled_from((LEASE_S / 2, LEASE_S, RESERVATION_S / 2))),
)


def let_time_pass(client: Any, seconds: float) -> None:
    """Brings everything nearer to its end: the clock of a real Redis goes its own way."""
    for key in client.keys("*"):
        if client.type(key) == "zset":
            for member in client.zrange(key, 0, -1):
                client.zincrby(key, -1000 * seconds, member)
        left_ms = client.pttl(key)
        if left_ms >= 0:
            client.pexpire(key, left_ms - int(1000 * seconds))


async def do(registry: Registry, name: str, *arguments: Any) -> Any:
    match name:
        case "write" | "remove":
            return await getattr(registry, name)(*arguments)
        case "read":
            view = await registry.read("target")
            return view.workers, view.num_reserved, view.last_kind
        case _:
            return await getattr(registry, name)("target", *arguments)


def do_in_model(model: PoolModel, now_s: float, name: str, *arguments: Any) -> Any:
    match name:
        case "read":
            view = model.read(now_s)
            return view.workers, view.num_reserved, view.last_kind
        case "release":
            return model.release(*arguments)
        case _:
            return getattr(model, name)(*arguments, now_s)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(operations, max_size=25))
def test_the_model_answers_as_redis_does(redis_url: str, steps: list[tuple[Any, ...]]) -> None:
    async def compare() -> None:
        registry, model, now_s = Registry(redis_url), PoolModel(), 0.0
        for name, *arguments in steps:
            if name == "pass":
                let_time_pass(client, arguments[0])
                now_s += arguments[0]
            else:
                real = await do(registry, name, *arguments)
                assert real == do_in_model(model, now_s, name, *arguments), (name, arguments)
        told = [tuple(fields.values()) for _, fields in client.xrange("{or:target}:events")]
        kinds = [(kind, worker_id) for kind, worker_id, _ in model.events]
        assert [(kind, worker_id) for kind, worker_id, _ in told] == kinds
        await registry.close()

    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        asyncio.run(compare())
