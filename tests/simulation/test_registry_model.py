"""The simulation's registry does what the scripts on a real Redis do."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.registry.registry import (
    LEASE_S,
    LOSSES_MAX,
    LOSSES_S,
    RESERVATION_S,
    JournalUpdate,
    JournalWriter,
    Registry,
)
from outrider.registry.worker_record import WorkerRecord
from tests.simulation.registry import PoolModel, exchange_losses, write_journal

RECORD = WorkerRecord("t0", "target", "h:1", "a", 1, "demo", "0" * 16, 8, 8, 2, "float32", 1)
INCARNATIONS = ("a", "b", "c")

records = st.builds(
    lambda worker_id, life, state: replace(
        RECORD, worker_id=worker_id, incarnation=INCARNATIONS[life], started_at_ms=-life, state=state
    ),
    st.sampled_from(("t0", "t1")),
    st.integers(0, 2),
    st.sampled_from(("ready", "draining")),
)
tokens = st.sampled_from("wxyz")
operations = st.one_of(
    st.tuples(st.just("join")),
    st.tuples(st.just("write"), records, st.integers(0, 2)),
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


async def do(registry: Registry, joined: list[int], name: str, *arguments: Any) -> Any:
    """Runs an operation on the registry. joined: the times at which workers joined, the latest last."""
    match name:
        case "join":
            joined.append(await registry.join("target"))
            return sorted(set(joined)) == joined
        case "write":
            record, num_before = arguments
            return await registry.write(record, moment(joined, num_before))
        case "remove":
            return await registry.remove(*arguments)
        case "read":
            view = await registry.read("target")
            return view.workers, view.num_reserved, view.last_kind
        case _:
            return await getattr(registry, name)("target", *arguments)


def do_in_model(model: PoolModel, joined: list[int], now_s: float, name: str, *arguments: Any) -> Any:
    match name:
        case "join":
            joined.append(model.join(now_s))
            return sorted(set(joined)) == joined
        case "write":
            record, num_before = arguments
            return model.write(record, moment(joined, num_before), now_s)
        case "read":
            view = model.read(now_s)
            return view.workers, view.num_reserved, view.last_kind
        case "release":
            return model.release(*arguments)
        case _:
            return getattr(model, name)(*arguments, now_s)


def in_order(events: list[Any]) -> list[tuple[str, list[str]]]:
    """Kinds and worker ids. Leases that one reading finds ended come in order of their ends, which lie less than Redis'
    clock can tell apart."""
    runs = itertools.groupby(events, lambda event: event[0])
    return [
        (kind, sorted(ids) if kind == "expired" else ids)
        for kind, ids in ((kind, [event[1] for event in run]) for kind, run in runs)
    ]


def moment(joined: list[int], num_before: int) -> int:
    """The time of the join that was `num_before` joins before the last one; 0 if there was none."""
    return joined[-1 - num_before] if num_before < len(joined) else 0


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(operations, max_size=25))
def test_the_model_answers_as_redis_does(redis_url: str, steps: list[tuple[Any, ...]]) -> None:
    async def compare() -> None:
        registry, model, now_s = Registry(redis_url), PoolModel(), 0.0
        joined: list[int] = []
        joined_in_model: list[int] = []
        for name, *arguments in steps:
            if name == "pass":
                let_time_pass(client, arguments[0])
                now_s += arguments[0]
            else:
                real = await do(registry, joined, name, *arguments)
                assert real == do_in_model(model, joined_in_model, now_s, name, *arguments), (name, arguments)
        told = [tuple(fields.values()) for _, fields in client.xrange("{or:target}:events")]
        assert in_order(told) == in_order(model.events)
        await registry.close()

    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        asyncio.run(compare())


writes = st.builds(
    JournalUpdate,
    st.builds(JournalWriter, st.sampled_from("ab"), st.sampled_from((2, 9, 10))),
    st.dictionaries(st.sampled_from(("kind", "0:0", "0:1")), st.sampled_from("xyz"), max_size=2),
    st.just(100.0),
    st.sampled_from((None, 0, 10, 20)),
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(writes, st.none()), max_size=12))
def test_the_model_keeps_a_journal_as_redis_does(redis_url: str, steps: list[JournalUpdate | None]) -> None:
    """None: Redis loses the entry. Ages differ by more than a test takes."""

    async def compare() -> None:
        registry, stored = Registry(redis_url), dict[str, dict[str, str]]()
        for step in steps:
            if step is None:
                client.delete("or:journal:r1")
                stored.clear()
                continue
            assert await registry.write_journals([("r1", step)]) == [write_journal(stored, "r1", step, 1000.0)]
            there, expected = dict(await registry.read_journal("r1")), dict(stored.get("r1", {}))
            there.pop("begun_ms", None), expected.pop("begun_ms", None)
            assert there == expected
        await registry.close()

    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        asyncio.run(compare())


facts = st.lists(st.sampled_from([f'["lost", "t{number}"]' for number in range(5)]), max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(facts, facts), max_size=8))
def test_facts_about_losses_are_those_of_the_script(redis_url: str, steps: list[tuple[list[str], list[str]]]) -> None:
    async def compare() -> None:
        registry, stored = Registry(redis_url), dict[str, float]()
        for number, (once, anew) in enumerate(steps):
            there = await registry.exchange_losses(once, anew)
            expected = exchange_losses(stored, once, anew, float(number))
            assert there.keys() == expected.keys()
            assert all(0 <= age_s < 30 for age_s in there.values())
        await registry.close()

    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        asyncio.run(compare())


async def test_facts_keep_the_first_or_the_latest_moment_and_are_forgotten(redis_url: str) -> None:
    registry = Registry(redis_url)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        await registry.exchange_losses(["first"], ["anew"])
        before = int(client.hget("or:losses", "first")) - 60_000
        client.hset("or:losses", mapping={"first": before, "anew": before, "damaged": "x", "old": 1})
        there = await registry.exchange_losses(["first"], ["anew"])
        assert there.keys() == {"first", "anew"}
        assert there["first"] >= 60 > there["anew"]
        assert 0 < client.pttl("or:losses") <= LOSSES_S * 1000
        await registry.exchange_losses([str(number) for number in range(LOSSES_MAX)], ["latest"])
        assert len(there := await registry.exchange_losses(["one more"], [])) == LOSSES_MAX + 1
        assert "latest" in there
        assert "one more" not in there
        await registry.exchange_losses([], [str(-number) for number in range(1, LOSSES_MAX)])
        there = await registry.exchange_losses([], ["latest", "one more"])
        assert len(there) == 2 * LOSSES_MAX
        assert "one more" not in there
    await registry.close()
