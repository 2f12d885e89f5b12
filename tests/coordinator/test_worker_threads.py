"""Threads for large work: tenants take turns, short work waits for no long work, and nobody works for who has left."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from coordinator.access.api_keys import Caller, Scope
from coordinator.api.http.application import create_app
from coordinator.intake import worker_threads
from coordinator.intake.worker_threads import PENDING_MAX, SHORT_CHARS, WorkerThreads
from outrider.errors import InvalidRequest, Overloaded, Unauthenticated
from outrider.text.tokenizer import Tokenizer
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import eventually

LONG = SHORT_CHARS + 1


@pytest.fixture
def threads() -> Any:
    made = WorkerThreads(1)
    yield made
    made.close()


class Gate:
    """Work that waits until it may go on."""

    def __init__(self) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self) -> bool:
        self.has_begun.set()
        return self.may_go_on.wait(60)


@pytest.fixture
async def gate(threads: WorkerThreads) -> AsyncIterator[Gate]:
    """Keeps the only thread for long work busy with a piece of tenant `flood`."""
    made = Gate()
    running = asyncio.create_task(threads.of("flood").run(made))
    await eventually(made.has_begun.is_set, "the thread is busy")
    yield made
    made.may_go_on.set()
    assert await running


async def test_what_the_work_returns_or_raises_comes_back(threads: WorkerThreads) -> None:
    assert await threads.of(None).run(lambda a, b: a + b, 1, b=2) == 3
    with pytest.raises(InvalidRequest, match="no"):
        await threads.of(None).run(_refuse)


def _refuse() -> None:
    raise InvalidRequest(None, "no")


async def test_tenants_take_turns_and_each_ones_work_is_done_as_it_came(threads: WorkerThreads, gate: Gate) -> None:
    done: list[str] = []
    tasks = [asyncio.create_task(threads.of("flood").run(done.append, f"flood {number}")) for number in range(20)]
    await asyncio.sleep(0)
    for tenant in ("modest", "other"):
        tasks += [asyncio.create_task(threads.of(tenant).run(done.append, f"{tenant} {number}")) for number in (0, 1)]
        await asyncio.sleep(0)
    gate.may_go_on.set()
    await asyncio.gather(*tasks)
    assert [done.index(f"modest {number}") for number in (0, 1)] == [1, 4]
    assert [done.index(f"other {number}") for number in (0, 1)] == [2, 5]
    assert [each for each in done if each.startswith("flood")] == [f"flood {number}" for number in range(20)]


async def test_short_work_waits_for_no_long_work(threads: WorkerThreads, gate: Gate) -> None:
    waiting = asyncio.create_task(threads.of("flood", LONG).run(int))
    async with asyncio.timeout(30):
        assert await threads.of("flood", SHORT_CHARS).run(lambda: "done") == "done"
    assert not waiting.done()
    gate.may_go_on.set()
    await waiting


async def test_beyond_a_bound_work_is_refused_and_room_comes_back() -> None:
    threads, gate = WorkerThreads(1, pending_max=4), Gate()
    held = [asyncio.create_task(threads.of(tenant).run(gate)) for tenant in ("a", "a", "b")]
    await asyncio.sleep(0)
    for tenant in ("a", "b"):
        with pytest.raises(Overloaded):
            await threads.of(tenant).run(int)
    gate.may_go_on.set()
    assert await asyncio.gather(*held) == [True, True, True]
    assert await threads.of("a").run(int) == 0
    threads.close()


async def test_a_tenant_alone_has_as_much_as_ever_and_leaves_room_for_others(
    threads: WorkerThreads, gate: Gate
) -> None:
    assert PENDING_MAX == 2 * 256
    tasks = [asyncio.create_task(threads.of("flood").run(int)) for _ in range(300)]
    await asyncio.sleep(0)
    modest = asyncio.create_task(threads.of("modest").run(int))
    gate.may_go_on.set()
    assert await modest == 0
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(each, Overloaded) for each in outcomes) == 300 - 255


async def test_what_long_work_is_about_is_bounded_in_sum(
    threads: WorkerThreads, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_threads, "PENDING_CHARS_MAX", 8 * LONG)
    tasks = [asyncio.create_task(threads.of("flood", LONG).run(int)) for _ in range(9)]
    await asyncio.sleep(0)
    modest = asyncio.create_task(threads.of("modest", LONG).run(int))
    await asyncio.sleep(0)
    gate.may_go_on.set()
    assert await modest == 0
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(each, Overloaded) for each in outcomes] == [False] * 4 + [True] * 5
    assert await threads.of("flood", LONG).run(int) == 0


async def test_work_that_has_not_begun_when_its_caller_leaves_never_begins(threads: WorkerThreads, gate: Gate) -> None:
    done: list[str] = []
    left = [asyncio.create_task(threads.of("flood").run(done.append, "left")) for _ in range(5)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.wait(left)
    assert threads.num_pending == 1, "what was given up counts no more"
    gate.may_go_on.set()
    await threads.of("flood").run(done.append, "last")
    assert done == ["last"]


async def test_what_failed_is_kept_by_nobody(threads: WorkerThreads) -> None:
    class Body:
        def refuse(self) -> None:
            raise InvalidRequest(None, "no")

    body = Body()
    kept = weakref.ref(body)
    with pytest.raises(InvalidRequest):
        await threads.of("a").run(body.refuse)
    del body
    await threads.of("a").run(int)  # the thread has something else to hold
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_an_answer_whose_work_is_done_is_not_refused_at_its_end(
    clusters: ClusterFactory, is_streaming: bool
) -> None:
    gate = Gate()
    # A long answer in one piece, or the long log probabilities of a prompt.
    body = {"prompt": [65] * 2500, "prompt_logprobs": 1, "max_tokens": 2, "stream": is_streaming}
    async with clusters.open([clusters.target()], max_model_len=1 << 20) as cluster:
        threads = cluster.service.threads
        target = cluster.targets[0]
        asking = asyncio.create_task(cluster.client.post("/v1/completions", json=body))
        target.may_step = lambda num_tokens: bool(held)
        held: list[asyncio.Task[bool]] = []
        await eventually(lambda: target.num_open == 1, "it runs")
        threads._pending_max = 2
        held.append(asyncio.create_task(threads.of(None).run(gate)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await threads.of(None).run(int)
        await eventually(lambda: asking.done() or threads.num_pending == 2, "its answer is written", 30)
        gate.may_go_on.set()
        answer = await asking
        await asyncio.gather(*held)
    assert answer.status_code == 200, answer.text
    assert "overloaded" not in answer.text


PROMPT = "import os, sys\n" * (SHORT_CHARS // 10)
CALLS: dict[str, Any] = {
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [65] * 50_000},
    "/v1/messages/count_tokens": {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}


async def post_and_leave(cluster: Cluster, path: str, body: Any, may_leave: asyncio.Event) -> int:
    """Sends a request over a connection that its client closes before the answer; returns the status."""
    sent, statuses = False, list[int]()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode()}
        await may_leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "raw_path": b""}
    await create_app(cluster.service)(scope, receive, send)
    return statuses[0]


@pytest.mark.parametrize("path", CALLS)
async def test_nobody_works_for_a_client_that_has_left(
    clusters: ClusterFactory, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with clusters.open([clusters.target()], max_model_len=1 << 20) as cluster:
        threads, gate = cluster.service.threads, Gate()
        held = [asyncio.create_task(threads.of("flood").run(gate)) for _ in range(8)]
        await asyncio.sleep(0)
        may_leave = asyncio.Event()
        leaving = asyncio.create_task(post_and_leave(cluster, path, CALLS[path], may_leave))
        await eventually(lambda: threads.num_pending == 9, "its work waits")
        may_leave.set()
        async with asyncio.timeout(30):
            assert await leaving == 499
        assert threads.num_pending == 8
        gate.may_go_on.set()
        await asyncio.gather(*held)


async def test_a_tenants_chat_passes_another_tenants_large_requests(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many large texts as a tenant may have pending, and another's chat of 20 KiB, which is begun last."""
    tenants = {"Bearer a": "a", "Bearer b": "b"}

    async def authenticate(authorization: str | None, scope: Scope) -> Caller:
        if authorization not in tenants:
            raise Unauthenticated("no key")
        return Caller(tenants[authorization], frozenset(Scope))

    encode, order, gate = Tokenizer.encode, list[int](), Gate()

    def seen(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        if len(text) > 10_000:
            gate()
            order.append(len(text))
        return encode(tokenizer, text, **options)

    async with clusters.open([clusters.target()], max_model_len=1 << 20) as cluster:
        monkeypatch.setattr(cluster.service, "authenticate", authenticate)
        monkeypatch.setattr(Tokenizer, "encode", seen)
        post = poster(cluster.client)
        large = [asyncio.create_task(post("/tokenize", "a", {"prompt": PROMPT})) for _ in range(40)]
        await eventually(lambda: cluster.service.threads.num_pending == 40 and gate.has_begun.is_set(), "they wait", 60)
        chat = {"messages": [{"role": "user", "content": PROMPT[:20_000]}], "max_tokens": 1}
        small = asyncio.create_task(post("/v1/chat/completions", "b", chat))
        await eventually(lambda: cluster.service.threads.num_pending == 41, "the chat waits, too", 60)
        gate.may_go_on.set()
        answer = await small
        assert answer.status_code == 200, answer.text
        assert {each.status_code for each in await asyncio.gather(*large)} == {200}
    place = next(number for number, length in enumerate(order) if length < len(PROMPT))
    assert place < 10, f"{place} large texts of another tenant went before"


def poster(client: httpx.AsyncClient) -> Callable[[str, str, Any], Any]:
    def post(path: str, key: str, body: Any) -> Any:
        return client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

    return post
