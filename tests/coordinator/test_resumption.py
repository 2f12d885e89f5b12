"""A stream that broke behind any of its events goes on at another replica as if nothing had happened."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest

from coordinator.api.grpc import grpc_api
from coordinator.intake.run_identity import RunIdentity
from coordinator.recovery.resumption import Claim, ResumePoint, StreamPosition, parse_position
from outrider.errors import InvalidRequest, NotFound, RegistryUnavailable
from outrider.registry.registry import JournalUpdate, JournalWrite
from outrider.registry.worker_record import Snapshot
from protos.outrider.v1 import common_pb2, generation_pb2, target_pb2
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import FakeTarget
from tests.simulation.registry import exchange_losses, write_journal

Event = tuple[str, str]  # id, data


class Memory:
    """The journal's part of a registry."""

    def __init__(self) -> None:
        self.stored: dict[str, dict[str, str]] = {}
        self.losses: dict[str, float] = {}

    async def write_journals(self, updates: Sequence[tuple[str, JournalUpdate]]) -> Sequence[JournalWrite]:
        return [write_journal(self.stored, request_id, update, time.monotonic()) for request_id, update in updates]

    async def read_journal(self, request_id: str) -> Mapping[str, str]:
        return self.stored.get(request_id, {})

    async def exchange_losses(self, once: Sequence[str], anew: Sequence[str]) -> Mapping[str, float]:
        return exchange_losses(self.losses, once, anew, time.monotonic())


def events_of(text: str) -> list[Event]:
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line)
        if fields:
            events.append((fields.get("id", ""), fields["data"]))
    return events


def run_of(text: str) -> str:
    """The fingerprint that the events of an answer carry."""
    return events_of(text)[0][0].rpartition(":")[0]


def said(events: list[Event]) -> dict[int, dict[str, Any]]:
    """Returns by index the sequences that a client assembles from the events: text, roles, token ids, log probabilities
    and ends."""
    texts: dict[int, dict[str, Any]] = {}
    for _, data in events:
        if data == "[DONE]":
            continue
        for choice in json.loads(data)["choices"]:
            text = texts.setdefault(choice["index"], {"text": "", "roles": 0, "ids": [], "logprobs": [], "ends": []})
            delta = choice.get("delta", choice)
            text["text"] += delta.get("text") or delta.get("content") or ""
            text["roles"] += "role" in delta
            text["ids"] += choice.get("token_ids", [])
            if choice.get("logprobs"):
                logprobs = choice["logprobs"]
                text["logprobs"] += logprobs.get("tokens") or [each["token"] for each in logprobs["content"]]
            if choice["finish_reason"]:
                text["ends"].append(choice["finish_reason"])
    return texts


@asynccontextmanager
async def replicas(clusters: ClusterFactory, **target: Any) -> AsyncIterator[tuple[Cluster, Cluster, Memory]]:
    """Two coordinators, each with a target of its own, and their common journal."""
    memory = Memory()

    def made() -> FakeTarget:
        return FakeTarget(clusters.script, **target)

    async with (
        clusters.open([made()], registry=memory) as one,  # type: ignore[arg-type]
        clusters.open([made()], registry=memory) as other,  # type: ignore[arg-type]
    ):
        yield one, other, memory


WITH_IDS: dict[str, Any] = {"stream_options": {"include_event_ids": True}}
SOME_RUN = "0123456789ab-ba9876543210:"
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "several texts": {"n": 2, "temperature": 1, "seed": 3},
    "token ids and usage": {
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "include_event_ids": True},
    },
    "log probabilities": {"logprobs": 2, "return_token_ids": True},
    "echo": {"echo": True, "logprobs": 1},
    "a stop string across tokens": {"stop": ["turn x"], "max_tokens": 40},
}


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_the_rest_follows_behind_every_event(clusters: ClusterFactory, body: dict[str, Any], step: int) -> None:
    request = {"prompt": "import", "temperature": 0, "max_tokens": 9, "stream": True} | WITH_IDS | body
    async with replicas(clusters, tokens_per_step=step) as (one, other, _):
        whole = events_of((await one.client.post("/v1/completions", json=request)).text)
        right = said(whole)
        for num_seen in range(len(whole)):
            request_id = f"r{num_seen}"
            await one.client.post("/v1/completions", json=request, headers={"X-Request-Id": request_id})
            last = next((id for id, _ in reversed(whole[:num_seen]) if id), "")
            answer = await other.client.post(
                "/v1/completions", json=request, headers={"X-Request-Id": request_id, "Last-Event-ID": last}
            )
            rest = events_of(answer.text)
            seen = [event for event in whole[:num_seen] if event[0]]
            assert said(seen + rest) == right, (num_seen, last)
            assert rest[-1][1] == "[DONE]"


async def test_a_connection_that_breaks_twice_repeats_no_text(clusters: ClusterFactory) -> None:
    """The second time before the texts that the client has were made again."""
    request = {
        "prompt": "import",
        "temperature": 1,
        "seed": 3,
        "n": 3,
        "max_tokens": 9,
        "stream": True,
    } | WITH_IDS
    request["return_token_ids"] = True
    async with replicas(clusters) as (one, other, _):
        whole = await one.client.post("/v1/completions", json=request)
        right, run = said(events_of(whole.text)), run_of(whole.text)
        headers = {"X-Request-Id": "unknown", "Last-Event-ID": f"{run}:1.9e.4"}
        rest = events_of((await other.client.post("/v1/completions", json=request, headers=headers)).text)
        for num_seen in range(len(rest)):
            if num_seen and (last := rest[num_seen - 1][0]):
                headers["Last-Event-ID"] = last
            answer = await one.client.post("/v1/completions", json=request, headers=headers)
            seen = said(rest[:num_seen] + events_of(answer.text))
            found = {index: text["ids"] for index, text in seen.items()}
            assert found == {0: right[0]["ids"][1:], 2: right[2]["ids"][4:]}, (num_seen, headers)


async def test_a_chat_goes_on_by_its_id_alone(clusters: ClusterFactory) -> None:
    messages = [{"role": "user", "content": "import"}]
    request = {"messages": messages, "temperature": 0, "max_tokens": 8, "stream": True} | WITH_IDS
    async with replicas(clusters) as (one, other, _):
        headers = {"X-Request-Id": "r1"}
        whole = events_of((await one.client.post("/v1/chat/completions", json=request, headers=headers)).text)
        await one.service.streams.journal._flush()  # type: ignore[union-attr]
        for num_seen in range(2, len(whole)):  # behind the role, which comes with the first token
            last = whole[num_seen - 1][0]
            answer = await other.client.get("/v1/streams/r1", headers={"Last-Event-ID": last} if last else {})
            assert answer.status_code == 200, (last, answer.text)
            rest = events_of(answer.text)
            assert said(whole[:num_seen] + rest) == said(whole)
        assert said(events_of((await other.client.get("/v1/streams/r1")).text)) == said(whole)


ODD_IDS = (
    "a/b",
    "/a",
    "a/",
    "a//b",
    "50%",
    "a%2Fb",
    "what?x=1",
    "a#b",
    "two words",
    "a+b;c=d&e",
    "{id}",
    "~!@$^*()",
    ".../..a",
    "back\\slash",
)


@pytest.mark.parametrize("request_id", ODD_IDS)
async def test_whatever_is_in_an_id_its_stream_goes_on_by_it(clusters: ClusterFactory, request_id: str) -> None:
    request = {"prompt": "import", "temperature": 0, "max_tokens": 5, "stream": True} | WITH_IDS
    async with replicas(clusters) as (one, other, _):
        body = request | {"request_id": request_id}
        whole = events_of((await one.client.post("/v1/completions", json=body)).text)
        await one.service.streams.journal._flush()  # type: ignore[union-attr]
        path = f"/v1/streams/{quote(request_id, safe='')}"
        answer = await other.client.get(path, headers={"Last-Event-ID": whole[1][0]})
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-Request-Id"] == request_id
        assert said(whole[:2] + events_of(answer.text)) == said(whole)


@pytest.mark.parametrize("request_id", [".", "..", "a/../b", "./a"])
async def test_an_id_that_no_path_could_carry_is_refused_before_anything_is_generated(
    clusters: ClusterFactory, request_id: str
) -> None:
    async with replicas(clusters) as (one, _, _):
        body = {"prompt": "import", "max_tokens": 5, "request_id": request_id}
        answer = await one.client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
        assert one.targets[0].requests == []


async def test_known_tokens_are_not_generated_again(clusters: ClusterFactory) -> None:
    request = {"prompt": "import", "temperature": 0, "max_tokens": 9, "stream": True} | WITH_IDS
    async with replicas(clusters) as (one, other, _):
        whole = await one.client.post("/v1/completions", json=request, headers={"X-Request-Id": "r1"})
        await one.service.streams.journal._flush()  # type: ignore[union-attr]
        run = run_of(whole.text)
        answer = await other.client.get("/v1/streams/r1", headers={"Last-Event-ID": f"{run}:6"})
        assert [id for id, _ in events_of(answer.text)][-2:] == [f"{run}:9e", ""]
        (sent,) = other.targets[0].requests
        assert len(sent.token_ids) - sent.num_prompt_tokens == 6


async def test_a_client_that_is_back_before_the_journal_was_written_finds_its_stream(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"prompt": "import", "temperature": 0, "max_tokens": 9, "stream": True} | WITH_IDS
    async with replicas(clusters) as (one, other, memory):
        whole = await one.client.post("/v1/completions", json=request, headers={"X-Request-Id": "r1"})
        read, num_reads = memory.read_journal, 0

        async def read_in_time(request_id: str) -> Mapping[str, str]:
            nonlocal num_reads
            num_reads += 1
            return {} if num_reads == 1 else await read(request_id)

        monkeypatch.setattr(memory, "read_journal", read_in_time)
        answer = await other.client.get("/v1/streams/r1")
    assert answer.status_code == 200
    assert said(events_of(answer.text)) == said(events_of(whole.text))


async def test_what_cannot_be_made_again_is_refused(clusters: ClusterFactory) -> None:
    request = {"prompt": "import", "temperature": 1, "max_tokens": 9, "stream": True} | WITH_IDS
    by_rejection = request | {"speculation": {"acceptance_rule": "token"}}
    async with replicas(clusters) as (_, other, _):
        headers = {"Last-Event-ID": SOME_RUN + "3"}
        answer = await other.client.post("/v1/completions", json=by_rejection, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seed")
        answer = await other.client.post("/v1/completions", json=request, headers={"Last-Event-ID": SOME_RUN + "3.4"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
        answer = await other.client.get("/v1/streams/nobody")
        assert answer.status_code == 404


async def test_events_have_ids_only_where_somebody_wants_them(clusters: ClusterFactory) -> None:
    """Many clients take an event for one line of data."""
    request = {"prompt": "import", "temperature": 0, "max_tokens": 4, "stream": True}
    async with replicas(clusters) as (one, _, memory):
        answer = await one.client.post("/v1/completions", json=request)
        assert all(block.startswith("data: ") for block in answer.text.split("\n\n") if block)
        await one.service.streams.journal._flush()  # type: ignore[union-attr]
        assert not memory.stored


@pytest.mark.parametrize(
    ("body", "change", "status"),
    [
        ({"temperature": 1, "max_tokens": 4}, {}, 503),
        ({"temperature": 0}, {}, 503),
        ({"temperature": 1, "seed": 3, "max_tokens": 4}, {}, 200),
        ({"temperature": 1, "seed": 3, "max_tokens": 4}, {"seed": 5}, 409),
    ],
    ids=["a seed that was drawn", "as many tokens as there is room for", "all is told", "another request"],
)
async def test_while_redis_is_away_what_it_alone_knows_is_asked_for_later(
    clusters: ClusterFactory,
    monkeypatch: pytest.MonkeyPatch,
    body: dict[str, Any],
    change: dict[str, Any],
    status: int,
) -> None:
    request = {"messages": [{"role": "user", "content": "import"}], "stream": True} | WITH_IDS | body
    async with clusters.open(
        [clusters.target()],
        settings={"seed_requests": True},
        registry=(memory := Memory()),  # type: ignore[arg-type]
        max_model_len=100,
    ) as one:
        whole = events_of((await one.client.post("/v1/chat/completions", json=request)).text)

        async def away(request_id: str) -> Mapping[str, str]:
            raise RegistryUnavailable("away")

        monkeypatch.setattr(memory, "read_journal", away)
        shorter = replace(one.service.snapshot().targets[0], max_model_len=90)
        monkeypatch.setattr(one.service, "_injected_snapshot", lambda: Snapshot((shorter,)))
        headers = {"Last-Event-ID": whole[1][0]}  # behind the role
        answer = await one.client.post("/v1/chat/completions", json=request | change, headers=headers)
    assert answer.status_code == status, answer.text
    if status == 200:
        assert said(whole[:2] + events_of(answer.text)) == said(whole)
    else:
        # Whoever is to come back is told when, and nobody else is to come back.
        assert ("Retry-After" in answer.headers) == (status == 503)
        assert answer.headers.get("X-Should-Retry") == (None if status == 503 else "false")


async def test_a_request_that_finds_no_room_in_the_journal_is_not_taken_for_an_earlier_one(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"prompt": "import", "temperature": 0, "max_tokens": 9, "stream": True} | WITH_IDS
    headers = {"X-Request-Id": "r1"}
    async with replicas(clusters) as (one, _, _):
        journal = one.service.streams.journal
        assert journal is not None
        whole = await one.client.post("/v1/completions", json=request, headers=headers)
        await journal._flush()
        monkeypatch.setattr(journal, "_bytes_max", 0)
        rest = await one.client.post(
            "/v1/completions", json=request, headers=headers | {"Last-Event-ID": f"{run_of(whole.text)}:3"}
        )
        assert rest.status_code == 200
        await journal._flush()
        assert (await one.client.get("/v1/streams/r1")).status_code == 200, "the entry is of that very run"
        await one.client.post("/v1/completions", json=request | {"prompt": "def"}, headers=headers)
        await journal._flush()
        assert (await one.client.get("/v1/streams/r1")).status_code == 404


async def test_a_seed_that_the_coordinator_drew_is_kept(clusters: ClusterFactory) -> None:
    request = {"prompt": "import", "temperature": 1, "max_tokens": 4, "stream": True} | WITH_IDS
    memory = Memory()

    def script_of(asked: target_pb2.GenerateRequest) -> list[int]:
        return [asked.sampling.seed % 7 + 5]

    settings = {"seed_requests": True}
    target = FakeTarget([], script_of=script_of)
    async with clusters.open([target], settings=settings, registry=memory) as cluster:  # type: ignore[arg-type]
        headers = {"X-Request-Id": "r1"}
        whole = events_of((await cluster.client.post("/v1/completions", json=request, headers=headers)).text)
        await cluster.service.streams.journal._flush()  # type: ignore[union-attr]
        headers = {"Last-Event-ID": whole[0][0]}
        rest = events_of((await cluster.client.get("/v1/streams/r1", headers=headers)).text)
    assert said(whole[:1] + rest) == said(whole)
    assert target.requests[0].sampling.seed == target.requests[1].sampling.seed


class TestOverGrpc:
    """By the id that the chunks carry, whoever made it up."""

    SAMPLING = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=9)

    async def chunks(self, cluster: Cluster, **fields: Any) -> list[generation_pb2.GenerationChunk]:
        asked = generation_pb2.GenerationRequest(**fields)
        found = [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
        await cluster.service.streams.journal._flush()  # type: ignore[union-attr]
        return found

    async def test_a_stream_goes_on_twice_under_its_own_id(self, clusters: ClusterFactory) -> None:
        async with replicas(clusters) as (one, other, _):
            whole = await self.chunks(one, prompt="import", sampling=self.SAMPLING)
            request_id = whole[0].request_id
            text = "".join(chunk.text for chunk in whole)
            seen, num_seen = "", 0
            for replica, num_new in ((other, 4), (one, 3), (other, 2)):
                point = generation_pb2.ResumePoint(num_tokens=num_seen, has_begun=num_seen > 0)
                rest = await self.chunks(replica, request_id=request_id, resume_from=[point], run=whole[0].run)
                assert {chunk.request_id for chunk in rest} == {request_id}
                assert seen + "".join(chunk.text for chunk in rest) == text
                right = [token_id for chunk in whole for token_id in chunk.token_ids]
                assert [token_id for chunk in rest for token_id in chunk.token_ids] == right[num_seen:]
                num_seen += num_new
                seen = clusters.tokenizer.decode(right[:num_seen])

    async def test_an_entry_of_a_release_that_left_zeros_out_is_read_as_it_was_written(
        self, clusters: ClusterFactory
    ) -> None:
        """There an unset temperature was 0. What is written here says every value, so that both read it alike."""
        async with replicas(clusters) as (one, other, memory):
            whole = await self.chunks(one, prompt="import", sampling=self.SAMPLING, request_id="a")
            written = base64.b64decode(memory.stored["a"]["payload"])
            older = generation_pb2.GenerationRequest.FromString(written)
            assert older.sampling.HasField("temperature")
            older.sampling.ClearField("temperature")
            assert one.service.streams.journal is not None
            entry = await one.service.streams.journal.load("a")
            assert entry is not None
            ghost = one.service.streams.journal.begin("a", replace(entry, payload=older.SerializeToString()), 10)
            assert ghost is not None
            await one.service.streams.journal._flush()
            point = generation_pb2.ResumePoint(num_tokens=4, has_begun=True)
            rest = await self.chunks(other, request_id="a", resume_from=[point], run=whole[0].run)
            right = [token_id for chunk in whole for token_id in chunk.token_ids]
            assert [token_id for chunk in rest for token_id in chunk.token_ids] == right[4:]

    async def test_the_best_of_several_begin_anew_for_whoever_has_nothing(self, clusters: ClusterFactory) -> None:
        async with replicas(clusters) as (one, _, _):
            fields: dict[str, Any] = {"prompt": "import", "sampling": self.SAMPLING, "best_of": 2}
            whole = await self.chunks(one, **fields)
            again = await self.chunks(one, **fields, request_id="a", resume_from=[generation_pb2.ResumePoint()])
            assert "".join(chunk.text for chunk in again) == "".join(chunk.text for chunk in whole)

    async def test_what_has_ended_brings_nothing_more(self, clusters: ClusterFactory) -> None:
        async with replicas(clusters) as (one, other, _):
            (first, *_) = await self.chunks(one, prompt="import", sampling=self.SAMPLING)
            point = generation_pb2.ResumePoint(num_tokens=9, has_begun=True, has_ended=True)
            fields = {"request_id": first.request_id, "resume_from": [point], "run": first.run}
            assert await self.chunks(other, **fields) == []

    async def test_what_makes_no_sense_is_refused_by_name(self, clusters: ClusterFactory) -> None:
        point, run = generation_pb2.ResumePoint(num_tokens=1, has_begun=True), SOME_RUN[:-1]
        async with replicas(clusters) as (one, _, _):
            with pytest.raises(InvalidRequest, match="request_id"):
                await self.chunks(one, resume_from=[point], run=run)
            with pytest.raises(NotFound, match="nobody"):
                await self.chunks(one, request_id="nobody", resume_from=[point], run=run)
            with pytest.raises(InvalidRequest, match="resume_from"):
                await self.chunks(one, request_id="x", prompt="import", resume_from=[point, point], run=run)
            with pytest.raises(InvalidRequest, match="run"):
                await self.chunks(one, request_id="x", prompt="import", resume_from=[point])


class TestPosition:
    def test_it_reads_back(self) -> None:
        position = StreamPosition([ResumePoint()] * 3, RunIdentity("0123456789ab", weights_digest="ba9876543210"))
        assert str(position) == SOME_RUN + "-.-.-"
        assert parse_position(str(position), 3, "id") is None
        position.advance(0, 12)
        position.advance(1, 7, has_ended=True)
        assert str(position) == SOME_RUN + "12.7e.-"
        points = (ResumePoint(12, True), ResumePoint(7, True, True), ResumePoint())
        assert parse_position(str(position), 3, "id") == Claim("0123456789ab", "ba9876543210", points)

    @pytest.mark.parametrize(
        "text",
        [
            *("", "x", "12", ":12", "0123456789ab:12", SOME_RUN.upper() + "1"),
            *(SOME_RUN + place for place in ("", "x", "1.", "-1", "1e3", "99999999999", "1.2", "é")),
        ],
    )
    def test_what_is_no_position_is_refused_by_name(self, text: str) -> None:
        with pytest.raises(InvalidRequest, match="Last-Event-ID"):
            parse_position(text, 1, "Last-Event-ID")
