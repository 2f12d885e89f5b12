"""Tests of a tenant's permissions and charges at a coordinator that identifies callers by their keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.access.api_keys import Caller, Scope, entry, new_key
from coordinator.api.grpc import grpc_api
from coordinator.intake.generation_request import Origin
from coordinator.placement.fair_queue import URGENT
from outrider.errors import InvalidRequest, Overloaded
from protos.outrider.v1 import generation_pb2
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import FakeTarget, eventually
from tests.coordinator.test_resumption import SOME_RUN, Memory, run_of

STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_event_ids": True}}


@dataclass(frozen=True)
class Door:
    """A coordinator that requires keys, and the key of one tenant."""

    cluster: Cluster
    headers: dict[str, str]
    charges: list[int]  # of output, tokens

    async def ask(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body = {"prompt": "import", "temperature": 0, "max_tokens": 8} | body
        return await self.cluster.client.post("/v1/completions", json=body, headers=self.headers | (headers or {}))

    async def resume(self, request_id: str, last_event: str) -> httpx.Response:
        headers = self.headers | {"Last-Event-ID": last_event}
        return await self.cluster.client.get(f"/v1/streams/{request_id}", headers=headers)

    async def write_journal(self) -> None:
        await self.cluster.service.streams.journal._flush()  # type: ignore[union-attr]

    @property
    def priorities(self) -> list[int]:
        """Priorities of the requests that the target has received."""
        return [request.priority for request in self.cluster.targets[0].requests]


@asynccontextmanager
async def door(clusters: ClusterFactory, folder: Path, limits: str) -> AsyncIterator[Door]:
    key = new_key()
    path = folder / "keys.toml"
    path.write_text(f"[tenants.search]\n{limits}\n" + entry(key, "search", frozenset({Scope.GENERATE}), None, ""))
    settings = {"api_keys_file": str(path)}
    target = FakeTarget(clusters.script)
    async with clusters.open([target], settings=settings, registry=Memory()) as cluster:  # type: ignore[arg-type]
        charges: list[int] = []
        tenants = cluster.service.environment.limits.rates
        owe = tenants.owe

        def noted(caller: Caller, num_output_tokens: int) -> None:
            charges.append(num_output_tokens)
            owe(caller, num_output_tokens)

        tenants.owe = noted  # type: ignore[method-assign]
        yield Door(cluster, {"Authorization": f"Bearer {key}"}, charges)


@pytest.mark.parametrize("last_event", ["0", "5", "999999999"])
async def test_a_position_in_a_stream_that_nobody_knows_passes_no_limit(
    clusters: ClusterFactory, tmp_path: Path, last_event: str
) -> None:
    async with door(clusters, tmp_path, "requests_per_minute = 3") as one:
        run = run_of((await one.ask(**STREAM)).text)
        headers = {"Last-Event-ID": f"{run}:{last_event}"}
        for _ in range(2):
            assert (await one.ask(headers, **STREAM)).status_code == 200
        refused = await one.ask(headers, **STREAM)
        assert refused.status_code == 429
        assert "tenant search has used up its 3 requests a minute" in refused.text
        assert one.priorities == [0, 0, 0]


async def test_a_stream_goes_on_beyond_its_tenants_limit_but_not_for_ever(
    clusters: ClusterFactory, tmp_path: Path
) -> None:
    """A tenant may owe up to a minute's worth of its limit."""
    async with door(clusters, tmp_path, "requests_per_minute = 2") as one:
        run = run_of((await one.ask({"X-Request-Id": "r1"}, **STREAM)).text)
        assert (await one.ask()).status_code == 200
        await one.write_journal()
        assert (await one.ask()).status_code == 429
        codes = [(await one.resume("r1", f"{run}:3")).status_code for _ in range(4)]
        assert codes == [200, 200, 429, 429]
        assert one.priorities == [0, 0, URGENT, URGENT]


async def test_what_is_made_is_paid_for_and_what_the_journal_has_is_not_made_again(
    clusters: ClusterFactory, tmp_path: Path
) -> None:
    async with door(clusters, tmp_path, "tokens_per_minute = 60000") as one:
        run = run_of((await one.ask({"X-Request-Id": "r1"}, **STREAM)).text)
        assert sum(one.charges) == 8
        await one.write_journal()
        await one.resume("r1", f"{run}:6")
        assert sum(one.charges) == 8 + 2


@pytest.mark.parametrize(
    ("body", "place", "num_tokens"),
    [
        ({}, "", 8),
        ({"n": 3, "seed": 1, "temperature": 1}, "", 24),
        ({"n": 1, "best_of": 4, "seed": 1, "temperature": 1}, "", 32),  # three of which nobody sees
        (STREAM, "999999999", 8),  # all of which the client says to have
    ],
    ids=["one", "several", "the best of several", "repeats"],
)
async def test_whatever_is_generated_is_charged_shown_or_not(
    clusters: ClusterFactory, tmp_path: Path, body: dict[str, Any], place: str, num_tokens: int
) -> None:
    async with door(clusters, tmp_path, "tokens_per_minute = 60000") as one:
        headers = {}
        if place:
            headers = {"Last-Event-ID": f"{run_of((await one.ask(**body)).text)}:{place}"}
            one.charges.clear()
        answer = await one.ask(headers, **body)
        assert answer.status_code == 200, answer.text
        assert sum(one.charges) == num_tokens


async def test_whoever_is_over_its_limit_gets_no_work_done(clusters: ClusterFactory, tmp_path: Path) -> None:
    async with door(clusters, tmp_path, "requests_per_minute = 1") as one:
        assert (await one.ask()).status_code == 200
        assert (await one.ask()).status_code == 429
        num_prepared = 0
        prepare = one.cluster.service.preparation.prepare

        async def counted(*arguments: Any) -> Any:
            nonlocal num_prepared
            num_prepared += 1
            return await prepare(*arguments)

        one.cluster.service.preparation.prepare = counted  # type: ignore[method-assign, assignment]
        assert (await one.ask(prompt="x " * 10_000)).status_code == 429
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            answer = await one.cluster.client.post(path, json=body, headers=one.headers)
            assert answer.status_code == 429, path
        assert num_prepared == 0


async def test_looking_for_a_stream_that_nobody_knows_counts_as_a_request(
    clusters: ClusterFactory, tmp_path: Path
) -> None:
    """It costs two looks at Redis and a wait in between."""
    async with door(clusters, tmp_path, "requests_per_minute = 2") as one:
        codes = [(await one.cluster.client.get("/v1/streams/r9", headers=one.headers)).status_code for _ in range(3)]
        assert codes == [404, 404, 429]


@pytest.mark.parametrize(
    ("limits", "priority", "code"),
    [("", 0, 200), ("", 7, 200), ("", -1, 403), ("priority_min = -3", -3, 200), ("priority_min = -3", -4, 403)],
)  # fmt: skip
async def test_nobody_goes_before_others_unless_the_file_says_so(
    clusters: ClusterFactory, tmp_path: Path, limits: str, priority: int, code: int
) -> None:
    async with door(clusters, tmp_path, limits) as one:
        answer = await one.ask(priority=priority)
        assert answer.status_code == code, answer.text
        assert one.priorities == ([priority] if code == 200 else [])


async def test_an_id_that_no_request_could_have_is_not_looked_up(clusters: ClusterFactory, tmp_path: Path) -> None:
    async with door(clusters, tmp_path, "") as one:
        answer = await one.ask({"Last-Event-ID": SOME_RUN + "1"}, request_id="x" * 100_000, **STREAM)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")


SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 1}


@pytest.mark.parametrize(("body", "num"), [({}, 1), ({"n": 3}, 3), ({"n": 1, "best_of": 4}, 4)])
async def test_a_prompt_is_charged_once_for_each_sequence_and_a_request_once(
    clusters: ClusterFactory, tmp_path: Path, body: dict[str, Any], num: int
) -> None:
    limits = "tokens_per_minute = 60000\nrequests_per_minute = 10"
    async with door(clusters, tmp_path, limits) as one:
        answer = await one.ask(**SAMPLED, **body)
        bucket = one.cluster.service.environment.limits.rates._buckets["search"]
        num_prompt_tokens = answer.json()["usage"]["prompt_tokens"]
        assert (round(60000 - bucket.tokens), round(10 - bucket.requests)) == (num * num_prompt_tokens, 1)


@pytest.mark.thorough
async def test_a_tenants_sequences_at_once_have_a_limit_and_each_of_n_counts(
    clusters: ClusterFactory, tmp_path: Path
) -> None:
    async with door(clusters, tmp_path, "max_concurrent_sequences = 3") as one:
        one.cluster.targets[0].step_s = 0.02
        two = asyncio.create_task(one.ask(**SAMPLED, n=2, max_tokens=200))
        await eventually(lambda: one.cluster.targets[0].num_open == 2, "two sequences run")
        refused = await one.ask(**SAMPLED, n=2)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "tenant search may have 3 sequences at once" in refused.json()["error"]["message"]
        assert (await one.ask()).status_code == 200  # a third
        too_many = await one.ask(**SAMPLED, n=1, best_of=4)
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "best_of")
        too_many = await one.ask(**SAMPLED, n=4)
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        assert (await two).status_code == 200
        assert (await one.ask(**SAMPLED, n=3)).status_code == 200
        assert not one.cluster.service.environment.limits.concurrency._running


async def test_whoever_has_too_many_sequences_gets_no_work_done(clusters: ClusterFactory, tmp_path: Path) -> None:
    async with door(clusters, tmp_path, "max_concurrent_sequences = 1") as one:
        one.cluster.targets[0].step_s = 0.02
        first = asyncio.create_task(one.ask(max_tokens=200))
        await eventually(lambda: one.cluster.targets[0].num_open == 1, "one sequence runs")

        async def prepare(*_: Any) -> Any:
            raise AssertionError("its prompt was looked at")

        prepared = one.cluster.service.preparation.prepare
        one.cluster.service.preparation.prepare = prepare  # type: ignore[method-assign, assignment]
        assert (await one.ask()).status_code == 429
        one.cluster.service.preparation.prepare = prepared  # type: ignore[method-assign]
        first.cancel()
        await eventually(lambda: one.cluster.targets[0].num_open == 0, "its client is gone")
        await eventually(lambda: not one.cluster.service.environment.limits.concurrency._running, "it counts no more")
        assert (await one.ask()).status_code == 200


REFUSED: dict[str, tuple[str, Any]] = {
    "a prompt that is too long": ("completions", {"prompt": "import " * 20_000}),
    "a grammar that does not compile": ("completions", {"prompt": "import", "guided_regex": "(" * 100}),
    "messages that the template refuses": ("chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}),
    "no JSON": ("completions", "{" * 40_000),
    "an unknown model": ("responses", {"model": "nothing", "input": "x"}),
    "a conversation whose tokens are counted": ("messages/count_tokens", {"messages": "none"}),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_is_refused_counts_as_a_request(clusters: ClusterFactory, tmp_path: Path, what: str) -> None:
    path, body = REFUSED[what]
    text = body if isinstance(body, str) else json.dumps(body)
    async with door(clusters, tmp_path, "requests_per_minute = 2") as one:
        codes = [
            (await one.cluster.client.post(f"/v1/{path}", content=text, headers=one.headers)).status_code
            for _ in range(3)
        ]
        assert codes[0] == codes[1], codes
        assert codes[0] in (400, 404), codes
        assert codes[2] == 429
        answer = await one.ask({"Last-Event-ID": SOME_RUN + "1"}, **STREAM)
        assert answer.status_code == 429, "a stream that nobody knows is a request as any other"


async def test_refused_claims_to_resume_a_stream_are_not_free_either(clusters: ClusterFactory, tmp_path: Path) -> None:
    async with door(clusters, tmp_path, "requests_per_minute = 2") as one:
        claim = one.headers | {"Last-Event-ID": SOME_RUN + "1"}
        codes = [
            (await one.cluster.client.post("/v1/completions", content="{" * 40_000, headers=claim)).status_code
            for _ in range(6)
        ]
        assert codes == [400, 400, 400, 400, 429, 429], "two requests, and two that a stream would be owed for"


async def test_a_prompt_that_is_too_long_costs_the_tokens_of_a_full_context(
    clusters: ClusterFactory, tmp_path: Path
) -> None:
    async with door(clusters, tmp_path, "tokens_per_minute = 60000") as one:
        answer = await one.ask(prompt="import " * 20_000)
        assert answer.status_code == 400
        (target,) = one.cluster.service.snapshot().targets
        bucket = one.cluster.service.environment.limits.rates._buckets["search"]
        assert round(60000 - bucket.tokens, -1) == round(target.max_model_len, -1)


async def test_a_refused_request_over_grpc_counts(clusters: ClusterFactory, tmp_path: Path) -> None:
    async with door(clusters, tmp_path, "requests_per_minute = 2") as one:
        service = one.cluster.service
        caller = await service.authenticate(one.headers["Authorization"], Scope.GENERATE)
        for error in (InvalidRequest, InvalidRequest, Overloaded):
            with pytest.raises(error):
                await anext(grpc_api.generate(service, generation_pb2.GenerationRequest(), Origin(caller)))


async def test_each_of_several_prompts_counts_as_a_request(clusters: ClusterFactory, tmp_path: Path) -> None:
    async with door(clusters, tmp_path, "requests_per_minute = 10") as one:
        assert (await one.ask(prompt=["import", "import", "import"])).status_code == 200
        bucket = one.cluster.service.environment.limits.rates._buckets["search"]
        assert round(10 - bucket.requests) == 3
