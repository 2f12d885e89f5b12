"""Tests of client faults on a real coordinator with fake targets, over HTTP: what they observe and which problems they
find."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import grpc
import httpx
import pytest

from coordinator.recovery.poison import LOSSES_MAX
from outrider.local.free_ports import free_ports
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.test_resumption import Memory
from tests.coordinator.test_slow_clients import listening
from tests.coordinator.tiny_model import write_model_dir
from tests.e2e.chaos import faults_of_clients
from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.fault import Fault
from tests.e2e.chaos.faults_of_clients import (
    OTHERS_MAX,
    ClientsDoNotRead,
    ClientsReadSlowly,
    OneIdTwice,
    PoisonLater,
)
from tests.e2e.chaos.ledger import Injection
from tests.e2e.chaos.own_requests import Door
from tests.e2e.chaos.slow_clients import UnreadHttp
from tests.e2e.chaos.verdict import Right

pytestmark = pytest.mark.thorough
STALL_MAX_S = 1.0


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> ClusterFactory:
    return ClusterFactory(write_model_dir(tmp_path_factory.mktemp("model")))


class Plain(UnreadHttp):
    """A slow client over plain TCP, without TLS."""

    def __init__(self, url: str, key: str | None, context: ssl.SSLContext | None, prompt: str) -> None:
        super().__init__(url, key, None, prompt)


@asynccontextmanager
async def two_doors(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """Two coordinators with a target each and one journal, which the faults use as their entry points."""
    memory, settings = Memory(), {"client_stall_max_s": STALL_MAX_S}
    options: dict[str, Any] = {"settings": settings, "registry": memory}
    async with (
        clusters.open([clusters.target(step_s=0.002)], **options) as one,
        clusters.open([clusters.target(step_s=0.002)], **options) as other,
        listening(one) as port,
        listening(other) as other_port,
    ):
        credentials = grpc.local_channel_credentials()
        found = [
            Door(f"http://127.0.0.1:{each}", "", "key", ssl.create_default_context(), credentials)
            for each in (port, other_port)
        ]
        monkeypatch.setattr(faults_of_clients, "doors", lambda fleet, rng: found)
        monkeypatch.setattr(faults_of_clients, "UnreadHttp", Plain)
        yield one, other


async def run(kind: type[Fault], load: object, seed: int) -> tuple[str, list[str]]:
    """Runs a fault; returns its description of what it has seen, and the problems that it has found."""
    options = SimpleNamespace(client_stall_max_s=STALL_MAX_S)
    fleet = SimpleNamespace(surprises=[], options=options, may_break_connections=lambda since_s: False)
    injection = Injection(1, kind.name, 0.0)
    await kind(cast(Any, fleet), cast(Any, load), Random(seed), injection).run(None)
    return injection.detail, fleet.surprises


async def test_each_client_that_does_not_read_is_told(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClientsDoNotRead, "edges", ("HTTP",))
    monkeypatch.setattr("tests.e2e.chaos.slow_clients.NUM_TOKENS", 400)
    async with two_doors(clusters, monkeypatch) as both:
        detail, problems = await run(ClientsDoNotRead, None, 2)
        assert not problems
        slow = sum(cluster.service.environment.metrics.slow_readers.labels("request")._value.get() for cluster in both)
        assert slow > 0
        assert "told" in detail


async def test_a_door_that_nobody_opens_ends_a_slow_client_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found: a coordinator was being started again just then, and every relay stood still for three minutes."""
    credentials = grpc.local_channel_credentials()
    closed = Door(f"http://127.0.0.1:{free_ports(1)[0]}", "", "key", ssl.create_default_context(), credentials)
    monkeypatch.setattr(faults_of_clients, "doors", lambda fleet, rng: [closed])
    monkeypatch.setattr(ClientsReadSlowly, "edges", ("HTTP",))
    detail, problems = await run(ClientsReadSlowly, None, 2)
    assert " cut" in detail
    assert problems
    assert all("not reached" in problem for problem in problems)


def cases(clusters: ClusterFactory) -> tuple[list[Case], dict[str, tuple[Right, ...]]]:
    """Requests that differ in their length, and the output of the fake targets for each."""
    known: dict[str, tuple[Right, ...]] = {}
    asked = []
    for max_tokens in (30, 60, 200):
        case = Case(f"of {max_tokens}", "import", max_tokens, {"ignore_eos": True})
        token_ids = (clusters.script * max_tokens)[:max_tokens]
        asked.append(case)
        known[case.name] = (Right(tuple(token_ids), clusters.tokenizer.decode(token_ids), "length", None),)
    return asked, known


def load_of(
    asked: list[Case], known: dict[str, tuple[Right, ...]], others: Sequence[Right] | None = None
) -> SimpleNamespace:
    return SimpleNamespace(cases=asked, known=known, other_rights=lambda case, answer: others)


async def test_twins_get_their_own_text_or_are_refused(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, known = cases(clusters)
    async with two_doors(clusters, monkeypatch):
        for seed in range(4):
            detail, problems = await run(OneIdTwice, load_of(asked, known), seed)
            assert not problems
            assert "complete" in detail


async def test_a_twin_with_another_text_is_found(clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, known = cases(clusters)
    (right,) = known["of 60"]
    known["of 60"] = (Right((*right.token_ids[:-1], 1), right.text, "length", None),)
    async with two_doors(clusters, monkeypatch):
        problems = []
        for seed in range(4):
            problems += (await run(OneIdTwice, load_of(asked, known), seed))[1]
            by_others = await run(OneIdTwice, load_of(asked, known, (right,)), seed)
            assert not by_others[1], "what other weights say is right while they are there"
        assert problems
        assert all("of 60" in each for each in problems)


class DoorTo:
    """To a function in place of a server."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        self._answer = answer

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.MockTransport(self._answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
            yield client


def error(status: int, code: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": code, "message": "words"}})


async def findings(
    monkeypatch: pytest.MonkeyPatch, answers: Sequence[tuple[httpx.Response, int]], *touched: str
) -> list[str]:
    """Returns the problems that a poison fault finds if it gets these answers one after the other, each after this
    number of deaths, while other faults have hit `touched`."""
    deaths: list[str] = []
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        response, num_deaths = left.pop(0)
        deaths.extend(["target-0"] * num_deaths)
        return response

    monkeypatch.setattr(faults_of_clients, "doors", lambda fleet, rng: [DoorTo(answer)])
    monkeypatch.setattr(faults_of_clients, "HEARD_S", 0.0)
    fleet = SimpleNamespace(
        surprises=[],
        of_role=lambda role: [SimpleNamespace(name="target-0", is_ready=False)],
        expecting_ends=lambda names: nullcontext(deaths),
        is_touched=lambda name, since_s: name in touched,
        was_returned=lambda name, since_s: False,
    )
    await PoisonLater(cast(Any, fleet), cast(Any, None), Random(1), Injection(1, "poison", 0.0)).run(None)
    assert not left
    return fleet.surprises


async def test_who_is_told_that_a_request_is_poison_after_three_workers_is_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = b'data: {"choices": [{"token_ids": [5]}]}\n\n'
    told = b'data: {"error": {"code": "poisonous_request", "message": "words"}}\n\n'
    assert not await findings(monkeypatch, [(error(503, "poisonous_request"), 3)])
    assert not await findings(monkeypatch, [(httpx.Response(200, content=token + told), 1)])
    assert not await findings(monkeypatch, [(error(429, "overloaded"), 0), (error(503, "poisonous_request"), 2)])


async def test_it_may_cost_more_where_other_targets_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_deaths, is_permitted in ((LOSSES_MAX + OTHERS_MAX, True), (LOSSES_MAX + OTHERS_MAX + 1, False)):
        told = [(error(503, "poisonous_request"), num_deaths)]
        found = await findings(monkeypatch, told, "target-0")
        assert (not found) == is_permitted


async def test_a_poison_that_costs_more_or_is_not_named_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = b'data: {"choices": [{"token_ids": [5]}]}\n\ndata: [DONE]\n\n'
    for answer, num_deaths in (
        (error(503, "poisonous_request"), 4),
        (error(503, "poisonous_request"), 0),
        (error(503, "unavailable"), 3),
        (httpx.Response(200, content=whole), 1),
        (httpx.Response(200, content=whole[:-16]), 1),
    ):
        assert await findings(monkeypatch, [(answer, num_deaths)])
