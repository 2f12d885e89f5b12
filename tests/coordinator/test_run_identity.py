"""A run is one request, answered once: nobody gets another run's tokens, nor another model's (invariant I9)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.access.api_keys import ANYBODY, Scope, entry, new_key
from coordinator.api.grpc import grpc_api
from coordinator.intake.generation_request import _sampling_bytes
from coordinator.intake.run_identity import RunIdentity, digest_of, parse_fingerprint
from coordinator.recovery import journal
from coordinator.recovery.journal_entry import _pack_losses
from coordinator.recovery.loss_exchange import UNSENT_MAX
from coordinator.recovery.poison import LOSSES_MAX
from coordinator.request import target_call
from coordinator.request.sequence_runner import KNOWN_LOSSES_S, LONG_PROMPT_TOKENS
from outrider.errors import Conflict, RegistryUnavailable
from outrider.registry.worker_record import Snapshot, WorkerRecord
from outrider.sampling_params import SamplingParams
from outrider.security.tenants import tenant_digest
from protos.outrider.v1 import common_pb2, generation_pb2, target_pb2
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import FakeTarget, eventually, record_of
from tests.coordinator.test_resumption import Memory, events_of

IDS: dict[str, Any] = {"stream": True, "stream_options": {"include_event_ids": True}}
# With its token ids each step has an event, whatever text it makes visible.
BODY: dict[str, Any] = {"prompt": "import", "temperature": 0, "max_tokens": 9, "return_token_ids": True} | IDS
SEEDED: dict[str, Any] = BODY | {"temperature": 1, "seed": 3}


def prompt_of(asked: target_pb2.GenerateRequest) -> list[int]:
    """Tokens that only this prompt and seed bring forth."""
    return [sum(asked.token_ids[: asked.num_prompt_tokens]) % 97 + asked.sampling.seed % 89 + 5]


@asynccontextmanager
async def two_replicas(clusters: ClusterFactory, **settings: Any) -> AsyncIterator[tuple[Cluster, Cluster, Memory]]:
    memory = Memory()

    def opened() -> Any:
        target = FakeTarget([], script_of=prompt_of)
        return clusters.open([target], registry=memory, settings=settings)  # type: ignore[arg-type]

    async with opened() as one, opened() as other:
        yield one, other, memory


async def ask(cluster: Cluster, body: dict[str, Any], request_id: str, last_event: str = "") -> Any:
    headers = {"X-Request-Id": request_id} | ({"Last-Event-ID": last_event} if last_event else {})
    answer = await cluster.client.post("/v1/completions", json=body, headers=headers)
    assert cluster.service.streams.journal is not None
    await cluster.service.streams.journal._flush()
    return answer


def at(events: list[tuple[str, str]], num_tokens: int) -> str:
    """The id of the event that ends there, as if each token had one of its own."""
    return f"{run_of_events(events)}:{num_tokens}"


def ids_of(events: list[tuple[str, str]]) -> list[int]:
    found = (json.loads(data) for _, data in events if data != "[DONE]")
    return [id for event in found for id in event.get("choices", [{}])[0].get("token_ids", [])]


def run_of_events(events: list[tuple[str, str]]) -> str:
    return events[0][0].rpartition(":")[0]


class TestTheJournalIsOfOneRun:
    async def test_a_request_does_not_go_on_with_another_ones_tokens(self, clusters: ClusterFactory) -> None:
        """Found as (a): prompt B, sent under the id of A, got A's tokens as its own output."""
        async with two_replicas(clusters) as (one, other, _):
            whole = events_of((await ask(one, BODY, "r1")).text)
            answer = await ask(other, BODY | {"prompt": "def"}, "r1", at(whole, 3))
            assert answer.status_code == 409
            assert answer.json()["error"]["param"] == "request_id"
            assert not other.targets[0].requests, "no target hears of it"

    @pytest.mark.parametrize(
        "change",
        [
            {"max_tokens": 8},
            {"stop": ["x"]},
            {"logit_bias": {"7": 1}},
            {"user": "somebody else"},
            {"echo": True},
            {"seed": 4},
        ],
        ids=lambda change: next(iter(change)),
    )
    async def test_every_parameter_that_the_output_depends_on_counts(
        self, clusters: ClusterFactory, change: dict[str, Any]
    ) -> None:
        async with two_replicas(clusters) as (one, other, _):
            whole = events_of((await ask(one, SEEDED, "r1")).text)
            assert (await ask(other, SEEDED | change, "r1", at(whole, 3))).status_code == 409

    async def test_what_does_not_change_the_output_may_differ(self, clusters: ClusterFactory) -> None:
        async with two_replicas(clusters) as (one, other, _):
            whole = events_of((await ask(one, BODY, "r1")).text)
            change = {"deadline_ms": 60_000, "speculation": {"enabled": False}, "priority": 3}
            rest = await ask(other, BODY | change, "r1", at(whole, 3))
            assert ids_of(events_of(rest.text)) == ids_of(whole)[3:]

    async def test_an_id_that_is_used_again_begins_anew(self, clusters: ClusterFactory) -> None:
        """Gateways reuse ids for what one request of theirs needs. The journal has the last one; the client of the
        first is told so instead of getting the second's tokens."""
        async with two_replicas(clusters) as (one, other, _):
            first = events_of((await ask(one, BODY, "r1")).text)
            changed = BODY | {"prompt": "def"}
            second = events_of((await ask(other, changed, "r1")).text)
            assert ids_of(second) != ids_of(first)
            rest = events_of((await ask(one, changed, "r1", at(second, 3))).text)
            assert ids_of(rest) == ids_of(second)[3:]
            by_id = await one.client.get("/v1/streams/r1", headers={"Last-Event-ID": at(first, 3)})
            assert by_id.status_code == 409
            # The request itself says all that its output depends on.
            rest = events_of((await ask(one, BODY, "r1", at(first, 3))).text)
            assert ids_of(rest) == ids_of(first)[3:]

    async def test_a_replica_that_is_late_changes_nothing(self, clusters: ClusterFactory) -> None:
        """Found as (a): a replica 0.2 s behind its client left `AAABBBBBBBBB` where `AAABB` had been shown."""
        async with two_replicas(clusters) as (one, other, _):
            whole = events_of((await ask(one, SEEDED, "r1")).text)
            late = one.service.streams.journal
            assert late is not None
            entry = await late.load("r1")
            assert entry is not None
            ghost = late.begin("r1", replace(entry, payload=b"{}"), 10)
            assert ghost is not None
            await late._flush()
            rest = events_of((await ask(other, SEEDED, "r1", at(whole, 3))).text)
            ghost.add(0, [1, 2, 3])
            await late._flush()
            assert ids_of(rest) == ids_of(whole)[3:]
            again = await one.client.get("/v1/streams/r1", headers={"Last-Event-ID": at(whole, 3)})
            assert ids_of(events_of(again.text)) == ids_of(whole)[3:]

    async def test_over_grpc_as_well(self, clusters: ClusterFactory) -> None:
        sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=9)

        async def chunks(cluster: Cluster, **fields: Any) -> list[generation_pb2.GenerationChunk]:
            asked = generation_pb2.GenerationRequest(request_id="r1", sampling=sampling, **fields)
            found = [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
            await cluster.service.streams.journal._flush()  # type: ignore[union-attr]
            return found

        async with two_replicas(clusters) as (one, other, _):
            whole = await chunks(one, prompt="import")
            assert parse_fingerprint(whole[0].run) is not None
            point = generation_pb2.ResumePoint(num_tokens=3, has_begun=True)
            with pytest.raises(Conflict, match="another request"):
                await chunks(other, prompt="def", resume_from=[point], run=whole[0].run)
            rest = await chunks(other, prompt="import", resume_from=[point], run=whole[0].run)
            assert sum(len(chunk.token_ids) for chunk in rest) == 6


class TestADrawnSeed:
    """Found as (b): with the journal gone a new seed was drawn: `VVVVVVVV`, and the client's end `VVVVRRRR`."""

    DRAWN = BODY | {"temperature": 1}

    @pytest.mark.parametrize("why", ["Redis was emptied", "it is too long", "there is no room"])
    async def test_without_the_journal_nobody_knows_it_and_the_client_is_told(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch, why: str
    ) -> None:
        async with two_replicas(clusters, seed_requests=True) as (one, other, memory):
            if why == "it is too long":
                monkeypatch.setattr(journal, "PAYLOAD_BYTES_MAX", 10)
            if why == "there is no room":
                monkeypatch.setattr(one.service.streams.journal, "_bytes_max", 0)
            whole = events_of((await ask(one, self.DRAWN, "r1")).text)
            assert ids_of(whole)
            is_kept = "payload" in memory.stored["r1"]  # and not only that there was one
            assert is_kept == (why == "Redis was emptied")
            if is_kept:
                memory.stored.clear()
            for cluster in (one, other):  # the one that drew it keeps nothing of it either
                answer = await ask(cluster, self.DRAWN, "r1", at(whole, 3))
                assert answer.status_code == 409
                assert "seed was drawn" in answer.json()["error"]["message"]

    async def test_another_run_under_the_same_id_has_another_seed(self, clusters: ClusterFactory) -> None:
        async with two_replicas(clusters, seed_requests=True) as (one, other, _):
            first = events_of((await ask(one, self.DRAWN, "r1")).text)
            second = events_of((await ask(other, self.DRAWN, "r1")).text)
            assert run_of_events(first) != run_of_events(second)
            assert (await ask(other, self.DRAWN, "r1", at(first, 3))).status_code == 409
            rest = events_of((await ask(one, self.DRAWN, "r1", at(second, 3))).text)
            assert ids_of(rest) == ids_of(second)[3:]

    async def test_a_seed_of_the_clients_own_needs_no_journal(self, clusters: ClusterFactory) -> None:
        async with two_replicas(clusters, seed_requests=True) as (one, other, memory):
            whole = events_of((await ask(one, SEEDED, "r1")).text)
            memory.stored.clear()
            rest = events_of((await ask(other, SEEDED, "r1", at(whole, 3))).text)
            assert ids_of(rest) == ids_of(whole)[3:]


class TestAHeaderProvesNothing:
    """Found as (c): an entry was there before the request had a slot, and a client's word made it urgent."""

    @pytest.mark.parametrize("is_known", [True, False])
    async def test_who_has_no_token_by_the_journals_word_waits_as_anybody(
        self, clusters: ClusterFactory, is_known: bool
    ) -> None:
        async with two_replicas(clusters) as (one, other, memory):
            whole = events_of((await ask(one, BODY, "r1")).text)
            stored = memory.stored["r1"]
            for name in [name for name in stored if ":" in name or name == "weights"]:
                del stored[name]  # as it is while the request waits for a slot
            if not is_known:
                del memory.stored["r1"]
            rest = events_of((await ask(other, BODY, "r1", at(whole, 3))).text)
            assert ids_of(rest) == ids_of(whole)[3:]
            assert [request.priority for request in other.targets[0].requests] == [0]

    async def test_nor_while_redis_is_away(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            whole = events_of((await cluster.complete(**BODY)).text)
            headers = {"Last-Event-ID": at(whole, 3)}
            answer = await cluster.client.post("/v1/completions", json=BODY, headers=headers)
            assert ids_of(events_of(answer.text)) == ids_of(whole)[3:]
            assert [request.priority for request in cluster.targets[0].requests] == [0, 0]

    @pytest.mark.parametrize("forged", ["000000000000-000000000000:1", "1", "-:1", ""])
    async def test_a_made_up_run_opens_nothing(self, clusters: ClusterFactory, forged: str) -> None:
        async with two_replicas(clusters) as (one, other, _):
            await ask(one, BODY, "r1")
            answer = await ask(other, BODY, "r1", forged)
            assert answer.status_code == (409 if "-0" in forged else 200 if not forged else 400)


class TestEqualWeights:
    """Found as (d): a target that died in a rolling update of the model gave `11112222`."""

    @asynccontextmanager
    async def opened(
        self,
        clusters: ClusterFactory,
        *targets: FakeTarget,
        weights: tuple[tuple[str, str], ...],
        **settings: Any,
    ) -> AsyncIterator[Cluster]:
        """Targets that are asked in this order, with these weights and numerics."""
        settings = {"target_wait_max_s": 0.5, "quarantine_s": 30.0} | settings
        async with clusters.open(list(targets), settings=settings) as cluster:
            service = cluster.service
            before = service.snapshot().targets
            records = tuple(
                replace(
                    *(record,),
                    weights_fingerprint=fingerprint, numerics=numerics,
                    num_running=place, max_num_seqs=100,
                )
                for place, (record, (fingerprint, numerics)) in enumerate(zip(before, weights, strict=True))
            )  # fmt: skip
            service._injected_snapshot = lambda: Snapshot(records)
            yield cluster

    @pytest.mark.parametrize(
        "other", [("new", "cpu"), ("old", "gpu"), ("", "")], ids=["weights", "numerics", "unknown"]
    )
    @pytest.mark.parametrize("body", [BODY, SEEDED], ids=["greedy", "coupled"])
    async def test_a_sequence_never_goes_on_with_another_models_tokens(
        self, clusters: ClusterFactory, body: dict[str, Any], other: tuple[str, str]
    ) -> None:
        dying, new = FakeTarget([11], dies_at=4), FakeTarget([12])
        async with self.opened(clusters, dying, new, weights=(("old", "cpu"), other)) as cluster:
            answer = await cluster.client.post("/v1/completions", json=body)
            events = events_of(answer.text)
            ids = ids_of(events)
            assert ids in ([11] * 4, [12] * 9)
            if ids == [11] * 4:
                error = json.loads(events[-2][1])["error"]
                assert error["code"] == "unavailable"
                assert "weights and numerics" in error["message"]
                assert "after 4 tokens" in error["message"]

    async def test_it_waits_for_an_equal_target_and_goes_on_there(self, clusters: ClusterFactory) -> None:
        dying, equal, new = FakeTarget([11], dies_at=4), FakeTarget([11]), FakeTarget([12])
        weights = (("old", "cpu"), ("old", "cpu"), ("new", "cpu"))
        async with self.opened(clusters, dying, equal, new, weights=weights, target_wait_max_s=30) as cluster:
            records = cluster.service.snapshot().targets
            cluster.service._injected_snapshot = lambda: Snapshot((records[0],))
            asking = asyncio.create_task(cluster.client.post("/v1/completions", json=BODY))
            await eventually(lambda: dying.num_died > 0, "it has died")
            cluster.service._injected_snapshot = lambda: Snapshot((records[2],))
            await asyncio.sleep(0.3)
            assert not asking.done()
            assert not new.requests
            cluster.service._injected_snapshot = lambda: Snapshot(records[1:])
            events = events_of((await asking).text)
            assert ids_of(events) == [11] * 9
            assert not new.requests

    async def test_a_run_that_is_resumed_goes_on_at_equal_targets_only(self, clusters: ClusterFactory) -> None:
        old, new = FakeTarget([11]), FakeTarget([12])
        async with self.opened(clusters, old, new, weights=(("old", "cpu"), ("new", "cpu"))) as cluster:
            records = cluster.service.snapshot().targets
            cluster.service._injected_snapshot = lambda: Snapshot(records[:1])
            whole = await cluster.client.post("/v1/completions", json=BODY)
            headers = {"Last-Event-ID": at(events_of(whole.text), 3)}
            cluster.service._injected_snapshot = lambda: Snapshot(records[1:])
            answer = await cluster.client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 503
            assert "weights and numerics" in answer.json()["error"]["message"]
            assert not new.requests

    async def test_all_sequences_of_a_run_are_of_one_model(self, clusters: ClusterFactory) -> None:
        targets = FakeTarget([11]), FakeTarget([12])
        async with self.opened(clusters, *targets, weights=(("old", ""), ("new", ""))) as cluster:
            for _ in range(5):
                answer = await cluster.complete(n=6, return_token_ids=True)
                assert len({tuple(choice["token_ids"]) for choice in answer.json()["choices"]}) == 1

    async def test_a_sequence_without_a_token_may_begin_anywhere(self, clusters: ClusterFactory) -> None:
        dying, new = FakeTarget([11], dies_at=0), FakeTarget([12])
        async with self.opened(clusters, dying, new, weights=(("old", ""), ("new", ""))) as cluster:
            for _ in range(5):
                answer = await cluster.complete(return_token_ids=True)
                assert answer.json()["choices"][0]["token_ids"] == [12] * 12


class Deadly(FakeTarget):
    """Dies `after` tokens behind wherever it begins, until it and those like it have died `up_to` times altogether.
    From then on it generates nothing for as long as `is_held`."""

    def __init__(self, deaths: list[Deadly], after: int, up_to: int, *, is_held: bool = True) -> None:
        super().__init__([11], held_s_max=60.0)
        self.deaths, self.after, self.up_to, self.is_held = deaths, after, up_to, is_held
        self.may_step = lambda num_tokens: not self.is_held or len(self.deaths) < self.up_to

    async def Generate(self, request: Any, context: Any) -> Any:
        begins_at = len(request.token_ids) - request.num_prompt_tokens
        is_deadly = len(self.deaths) < self.up_to
        self.dies_at = begins_at + self.after if is_deadly else None
        async for event in super().Generate(request, context):
            yield event

    @property
    def num_died(self) -> int:
        return self._num_died

    @num_died.setter
    def num_died(self, number: int) -> None:
        self._num_died = number
        if number:
            self.deaths.append(self)


@dataclass
class Interrupted(FakeTarget):
    """Lives, and ends each call after a token; without a code it falls silent then."""

    code: grpc.StatusCode | None = grpc.StatusCode.UNAVAILABLE
    stalled_ms: int = 0  # that it tells of its model

    async def Generate(self, request: Any, context: Any) -> Any:
        async for event in super().Generate(request, context):
            yield event
            if event.WhichOneof("event") != "step":
                continue
            if self.code is not None:
                await context.abort(self.code, "Socket closed")
            await asyncio.sleep(60)

    async def GetInfo(self, request: Any, context: Any) -> common_pb2.WorkerInfo:
        info = await super().GetInfo(request, context)
        info.stalled_ms = self.stalled_ms
        return info


async def until_held(targets: Sequence[Deadly]) -> None:
    """Until one has a request that it does not die of: what that was lost with before, its coordinator knows."""
    await eventually(lambda: any(target.num_open and target.dies_at is None for target in targets), "it is held", 30)


async def leave(asking: asyncio.Task[Any], cluster: Cluster) -> None:
    """The client of a request leaves."""
    asking.cancel()
    await asyncio.wait([asking])
    await eventually(
        lambda: cluster.service.num_active == 0 and not any(target.num_open for target in cluster.targets),
        "the request has ended, at its target as well",
        30,
    )


class TestPoison:
    """Found as (f): a request whose target dies after its first token was replayed without a limit."""

    @pytest.mark.parametrize("dies_after", [0, 1, 3])
    async def test_at_most_three_workers_are_lost_to_one_run(self, clusters: ClusterFactory, dies_after: int) -> None:
        is_deadly = True

        class Deadly(FakeTarget):
            """Dies `dies_after` tokens behind wherever it begins."""

            async def Generate(self, request: Any, context: Any) -> Any:
                begins_at = len(request.token_ids) - request.num_prompt_tokens
                self.dies_at = begins_at + dies_after if is_deadly else None
                async for event in FakeTarget.Generate(self, request, context):
                    yield event

        targets: list[FakeTarget] = [Deadly(clusters.script) for _ in range(6)]
        async with clusters.open(targets, settings={"quarantine_s": 0.01}) as cluster:
            answer = await cluster.complete(max_tokens=40)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "poisonous_request"
            assert sum(target.num_died for target in targets) == 3
            metrics = (await cluster.client.get("/metrics")).text
            assert "outrider_poisonous_prompt{" in metrics
            # Its client tries again, as clients do.
            again = await cluster.complete(max_tokens=39)
            assert (again.status_code, again.json()["error"]["code"]) == (503, "poisonous_request")
            assert int(again.headers["Retry-After"]) > 30
            assert sum(target.num_died for target in targets) == 3
            is_deadly = False
            assert (await cluster.complete(prompt="def", max_tokens=4)).status_code == 200

    @pytest.mark.parametrize("dies_after", [0, 2, 20])
    @pytest.mark.parametrize("num_before", [1, 2])
    async def test_nor_are_more_where_its_client_leaves_in_between(
        self, clusters: ClusterFactory, num_before: int, dies_after: int
    ) -> None:
        """Found: one that left, or whose deadline was over, after the second death had two more with each request."""
        deaths = list[Deadly]()
        targets = [Deadly(deaths, dies_after, up_to=num_before) for _ in range(6)]
        async with clusters.open([*targets], settings={"quarantine_s": 30.0}) as cluster:
            while len(deaths) < 2:
                asking = asyncio.create_task(cluster.complete(max_tokens=90))
                await until_held(targets)
                await leave(asking, cluster)
                for target in targets:
                    target.up_to = len(deaths) + num_before
            answer = await asyncio.wait_for(cluster.complete(max_tokens=90), 30)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "poisonous_request")
            assert "outrider_poisonous_prompt{" in (await cluster.client.get("/metrics")).text
            again = await cluster.complete(max_tokens=90)
            assert (again.status_code, again.json()["error"]["code"]) == (503, "poisonous_request")
            assert len(deaths) == 3

    @pytest.mark.thorough
    async def test_nor_where_its_deadline_is_over_in_between(self, clusters: ClusterFactory) -> None:
        deaths = list[Deadly]()
        targets = [Deadly(deaths, 1, up_to=2) for _ in range(6)]
        async with clusters.open([*targets], settings={"quarantine_s": 30.0}) as cluster:
            codes: list[str] = []
            while "poisonous_request" not in codes and len(deaths) < 6:
                answer = await cluster.complete(max_tokens=40, deadline_ms=3000)
                codes.append(answer.json()["error"]["code"])
                for target in targets:
                    target.up_to = len(deaths) + 2
            assert set(codes) == {"deadline_exceeded", "poisonous_request"}
            assert len(deaths) == 3

    async def test_nor_where_its_client_leaves_while_a_loss_is_looked_into(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        deaths = list[Deadly]()
        asked = asyncio.Event()

        async def does_not_answer(*_: object) -> bool:
            asked.set()
            await asyncio.Event().wait()
            return True

        async with clusters.open([Deadly(deaths, 1, up_to=9)]) as cluster:
            environment = cluster.service.environment
            monkeypatch.setattr(environment.channels, "has_incarnation", does_not_answer)
            asking = asyncio.create_task(cluster.complete())
            await asyncio.wait_for(asked.wait(), 30)
            await leave(asking, cluster)
            assert [len(each.killed) for each in environment.losses.poison._suspects.values()] == [1]

    async def test_targets_that_never_answered_it_do_not_count(self, clusters: ClusterFactory) -> None:
        """Found: where all targets stood still at once, each request was sent to one after the other and ended."""
        still = [FakeTarget([11], is_hung=True) for _ in range(2)]
        settings = {"target_silence_max_s": 1.0, "quarantine_s": 30.0}
        async with clusters.open([*still, FakeTarget([11])], settings=settings) as cluster:
            while not all(target.requests for target in still):
                answer = await cluster.complete()
                assert answer.status_code == 200, answer.text
            assert not any(request.trial_tokens for request in cluster.targets[-1].requests)

    @pytest.mark.parametrize("tries_another", [False, True])
    async def test_a_target_that_ends_while_it_tries_another_run_was_not_lost_to_this_one(
        self, clusters: ClusterFactory, tries_another: bool
    ) -> None:
        """Found: a request on its last chance came to a target in the moment that another one brought that down."""

        class Moody(FakeTarget):
            async def Generate(self, request: Any, context: Any) -> Any:
                begins_at = len(request.token_ids) - request.num_prompt_tokens
                self.dies_at = begins_at + 1 if len(self.requests) < 2 else None
                if len(self.requests) == 2 and tries_another:
                    self.requests.append(request)
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another request is tried here")
                if len(self.requests) == 2 + tries_another:
                    self.requests.append(request)
                    self.num_died += 1
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                async for event in super().Generate(request, context):
                    yield event

        async with clusters.open([target := Moody([11])], settings={"quarantine_s": 0.01}) as cluster:
            answer = await cluster.complete(max_tokens=9)
            assert answer.status_code == (200 if tries_another else 503), answer.text
            assert target.num_died == 3

    async def test_one_that_no_target_answers_is_refused_and_blamed_for_nothing(self, clusters: ClusterFactory) -> None:
        """Nor does it wait for longer than at three targets."""
        still = [FakeTarget([11], is_hung=True) for _ in range(5)]
        settings = {"target_silence_max_s": 0.2, "quarantine_s": 30.0}
        async with clusters.open([*still], settings=settings) as cluster:
            answer = await cluster.complete()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert "does not answer" in answer.text
            environment = cluster.service.environment
            # Three were asked; whether each had heard of it within its time is the machine's affair.
            assert [loss.had for loss in environment.losses.poison._losses.values()] == [{}] * 3
            assert environment.losses.poison.convicted(environment.now_s()) == []
            assert not environment.losses.poison._suspects

    async def test_where_a_poison_is_a_place_in_its_output_clients_that_leave_hide_nothing(
        self, clusters: ClusterFactory
    ) -> None:
        """A target that goes on behind the place dies at once."""
        deaths = list[Deadly]()

        class AtPlace(Deadly):
            async def Generate(self, request: Any, context: Any) -> Any:
                self.after = max(30 - (len(request.token_ids) - request.num_prompt_tokens), 0)
                async for event in super().Generate(request, context):
                    yield event

        targets = [AtPlace(deaths, 30, up_to=2) for _ in range(6)]
        async with clusters.open([*targets], settings={"quarantine_s": 30.0}) as cluster:
            asking = asyncio.create_task(cluster.complete(max_tokens=90))
            await until_held(targets)
            await leave(asking, cluster)
            for target in targets:
                target.is_held, target.up_to = False, 9
            answer = await cluster.complete(max_tokens=90)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "poisonous_request")
            assert len(deaths) == 3

    async def test_one_that_kills_at_once_is_told_so_however_many_others_die(self, clusters: ClusterFactory) -> None:
        """Found: it was given up after three targets with an error that asks for another try, at each replica anew."""
        deaths = list[Deadly]()
        targets = [Deadly(deaths, 0, up_to=99) for _ in range(3)]
        async with clusters.open([*targets], settings={"quarantine_s": 0.01}) as cluster:
            environment = cluster.service.environment
            gone = replace(environment.snapshot().targets[0], incarnation="before")
            environment.losses.poison.note_loss(gone, "another prompt", environment.now_s())
            answer = await cluster.complete(max_tokens=9)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "poisonous_request")
            assert 3 < len(deaths) <= LOSSES_MAX

    @pytest.mark.parametrize("num_losses", [5, LOSSES_MAX])
    async def test_a_run_goes_on_elsewhere_unless_it_was_ended_for_its_losses(
        self, clusters: ClusterFactory, num_losses: int
    ) -> None:
        async with two_replicas(clusters) as (one, other, memory):
            whole = events_of((await ask(one, BODY, "r1")).text)
            memory.stored["r1"]["losses"] = _pack_losses(num_losses)
            answer = await ask(other, BODY, "r1", at(whole, 3))
            assert answer.status_code == (503 if num_losses == LOSSES_MAX else 200)

    @pytest.mark.parametrize(("num_others", "num_deaths"), [(0, 3), (1, 5), (2, 7), (9, 8)])
    async def test_where_others_die_as_well_it_is_ended_when_chance_explains_its_losses_no_longer(
        self, clusters: ClusterFactory, num_others: int, num_deaths: int
    ) -> None:
        """Found: where several targets were lost within a minute, an innocent request that had been at three was ended
        in the middle of its text. And that all that had lost two were tried alone, one after the other, for minutes."""
        deaths, trials = list[Deadly](), list[bool]()

        class Watched(Deadly):
            async def Generate(self, request: Any, context: Any) -> Any:
                trials.append(request.trial_tokens > 0)
                async for event in super().Generate(request, context):
                    yield event

        targets = [Watched(deaths, 1, up_to=99) for _ in range(4)]
        async with clusters.open([*targets], settings={"quarantine_s": 0.01}) as cluster:
            environment = cluster.service.environment
            record = environment.snapshot().targets[0]
            for number in range(num_others):
                gone = replace(record, incarnation=f"before {number}")
                environment.losses.poison.note_loss(gone, "another prompt", environment.now_s())
            answer = await cluster.complete(max_tokens=90)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "poisonous_request")
            assert len(deaths) == num_deaths
            assert trials == [False] * (num_deaths - 1) + [True], "it is tried when one more loss would end it"

    async def test_one_that_had_passed_its_trial_goes_on_when_it_is_lost_once_more(
        self, clusters: ClusterFactory
    ) -> None:
        """Found: long after a request had passed its trial another one brought its target down, and it was ended."""
        deaths = list[Deadly]()

        class Later(Deadly):
            async def Generate(self, request: Any, context: Any) -> Any:
                self.after = (1, 1, 60)[min(len(deaths), 2)]
                async for event in super().Generate(request, context):
                    yield event

        targets = [Later(deaths, 1, up_to=3, is_held=False) for _ in range(4)]
        async with clusters.open([*targets], settings={"quarantine_s": 0.01}) as cluster:
            answer = await cluster.complete(max_tokens=90)
            assert answer.status_code == 200, answer.text
            assert len(deaths) == 3

    @pytest.mark.parametrize("lives", [None, False])
    async def test_what_breaks_while_its_coordinator_is_stopped_is_lost_to_it_where_that_is_known(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch, lives: bool | None
    ) -> None:
        """Found by reading: the coordinator had no time either to hear that the target is as good as before."""

        async def has_incarnation(*_: object) -> bool | None:
            return lives

        monkeypatch.setattr(target_call, "is_own_loss", lambda error, lag: True)
        deaths = list[Deadly]()
        targets = [Deadly(deaths, 1, up_to=3, is_held=False) for _ in range(4)]
        async with clusters.open([*targets], settings={"quarantine_s": 0.01}) as cluster:
            monkeypatch.setattr(cluster.service.environment.channels, "has_incarnation", has_incarnation)
            answer = await cluster.complete(max_tokens=90)
            assert answer.status_code == (200 if lives is None else 503), answer.text
            assert len(deaths) == 3
            assert bool(cluster.service.environment.losses.poison) == (lives is not None)

    async def test_whoever_completes_a_prompt_clears_what_was_lost_with_it(self, clusters: ClusterFactory) -> None:
        """Whatever brought that worker down, for the next request with the prompt it is one of the others."""
        deaths = list[Deadly]()
        targets = [Deadly(deaths, 1, up_to=1, is_held=False) for _ in range(2)]
        async with clusters.open([*targets], settings={"quarantine_s": 0.01}) as cluster:
            answer = await cluster.complete(max_tokens=9)
            assert answer.status_code == 200, answer.text
            losses = cluster.service.environment.losses.poison._losses.values()
            assert len(deaths) == 1
            assert [loss.had for loss in losses] == [{}]

    async def test_whoever_completes_the_same_prompt_clears_it(self, clusters: ClusterFactory) -> None:
        deaths = list[Deadly]()
        targets = [Deadly(deaths, 1, up_to=2) for _ in range(3)]
        async with clusters.open([*targets], settings={"quarantine_s": 0.01}) as cluster:
            asking = asyncio.create_task(cluster.complete())
            await until_held(targets)
            await leave(asking, cluster)
            assert cluster.service.environment.losses.poison
            for target in targets:
                target.is_held = False
            trials = [len(target.requests) for target in targets]
            assert (await cluster.complete(prompt="def")).status_code == 200
            assert cluster.service.environment.losses.poison, "that was another one"
            assert (await cluster.complete()).status_code == 200
            environment = cluster.service.environment
            assert environment.losses.poison.convicted(environment.now_s()) == []
            assert not environment.losses.poison._suspects
            assert (await cluster.complete()).status_code == 200
            asked = [
                request.trial_tokens > 0
                for target, num in zip(targets, trials, strict=True)
                for request in target.requests[num:]
            ]
            assert sorted(asked) == [False, False, True], "it was tried alone until it was cleared"

    async def test_a_request_that_is_cancelled_before_its_trial_leaves_none(self, clusters: ClusterFactory) -> None:
        deaths, reached = list[Deadly](), asyncio.Event()
        targets = [Deadly(deaths, 1, up_to=2) for _ in range(3)]
        settings = {"quarantine_s": 0.01}
        async with clusters.open([*targets], settings=settings, max_model_len=1 << 20) as cluster:
            environment = cluster.service.environment

            class Line:
                """Those with long prompts wait in it; here one on trial waits without end."""

                async def __aenter__(self) -> None:
                    if environment.losses.trials._at:
                        reached.set()
                        await asyncio.Event().wait()

                async def __aexit__(self, *_: object) -> None: ...

            object.__setattr__(environment.loop, "long_prompts", Line())
            asking = asyncio.create_task(cluster.complete(prompt=[65] * (LONG_PROMPT_TOKENS + 1)))
            await asyncio.wait_for(reached.wait(), 30)
            await leave(asking, cluster)
            assert not environment.losses.trials._at

    @pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION])
    async def test_a_connection_that_breaks_is_no_death_nor_is_a_target_that_gives_it_back(
        self, clusters: ClusterFactory, code: grpc.StatusCode
    ) -> None:
        """Found: three targets were drained and cut a long text off, the last one when its record had gone already."""
        targets = [Interrupted(clusters.script, code=code) for _ in range(2)]
        async with clusters.open([*targets], settings={"quarantine_s": 0.01}) as cluster:
            answer = await cluster.complete(max_tokens=8)
            assert answer.status_code == 200, answer.text
            assert len(targets[0].requests) + len(targets[1].requests) >= 8
            assert not cluster.service.environment.losses.poison
            assert not any(request.trial_tokens for target in targets for request in target.requests)

    @pytest.mark.parametrize("comes_back", [True, False])
    async def test_nor_is_one_behind_which_nobody_answers_for_a_while(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch, comes_back: bool
    ) -> None:
        """Found: where connections to all targets broke several times, runs were tried and ended that nothing had died
        of."""
        targets = [Interrupted(clusters.script) for _ in range(2)]
        asked = Counter[str]()

        async def answers(address: str, *_: object) -> bool:
            asked[address] += 1
            return comes_back and asked[address] > 1

        async with clusters.open([*targets], settings={"quarantine_s": 0.01}) as cluster:
            environment = cluster.service.environment
            monkeypatch.setattr(environment.channels, "has_incarnation", answers)
            monkeypatch.setattr(environment.channels, "is_serving", answers)
            answer = await cluster.complete(max_tokens=8)
            assert answer.status_code == (200 if comes_back else 503), answer.text
            was_tried = any(request.trial_tokens for target in targets for request in target.requests)
            assert was_tried is not comes_back

    @pytest.mark.thorough
    @pytest.mark.parametrize("stalled_ms", [0, 60_000])
    async def test_nor_is_one_that_was_paused_and_serves_again(self, clusters: ClusterFactory, stalled_ms: int) -> None:
        """Found: on a machine with too much to do targets were silent for seconds, and runs were ended for that."""
        targets = [Interrupted(clusters.script, code=None, stalled_ms=stalled_ms) for _ in range(2)]
        settings = {"quarantine_s": 0.01, "target_silence_max_s": 0.3}
        async with clusters.open([*targets], settings=settings) as cluster:
            answer = await cluster.complete(max_tokens=6)
            assert answer.status_code == (503 if stalled_ms else 200), answer.text

    async def test_sequences_side_by_side_lose_their_worker_once(self, clusters: ClusterFactory) -> None:
        dying, others = FakeTarget([11], dies_at=2), [FakeTarget([11]), FakeTarget([11])]
        async with clusters.open([dying, *others], settings={"quarantine_s": 30.0}) as cluster:
            while not dying.num_died:
                answer = await cluster.complete(n=6)
                assert answer.status_code == 200, answer.text

    @pytest.mark.parametrize("dies_after", [0, 2])
    async def test_losses_are_remembered_across_coordinators(self, clusters: ClusterFactory, dies_after: int) -> None:
        deaths, memory = list[Deadly](), Memory()
        targets = [[Deadly(deaths, dies_after, up_to=2) for _ in range(3)] for _ in range(2)]
        opened = [
            clusters.open(
                [*each],
                registry=memory,  # type: ignore[arg-type]
                settings={"quarantine_s": 0.01},
            )
            for each in targets
        ]
        async with opened[0] as one, opened[1] as other:
            asking = asyncio.create_task(ask(one, BODY, "r1"))
            await until_held(targets[0])
            await eventually(
                lambda: memory.stored.get("r1", {}).get("losses", "").startswith("2 "),
                "the journal knows of both, whatever was shown before",
                30,
            )
            await leave(asking, one)
            for target in targets[1]:
                target.up_to = 9
            # What its client has seen, which is nothing or the tokens of the first target at least.
            service = one.service
            entry = (await service.streams.recall("r1", ANYBODY)).entry
            assert entry is not None
            seen = f"{entry.request_digest}-{entry.weights_digest}:1" if dies_after else ""
            headers = {"Last-Event-ID": seen} if seen else {}
            answer = await other.client.get("/v1/streams/r1", headers=headers)
            assert "poisonous_request" in answer.text
            assert len(deaths) == 3
            assert targets[1][0].deaths[-1].requests[0].trial_tokens > 0, "it was tried alone"
            await other.service.streams.journal._flush()  # type: ignore[union-attr]
            answer = await one.client.get("/v1/streams/r1", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "poisonous_request")
            assert len(deaths) == 3, "what lost as many as one may is not gone on with"

    async def test_no_run_is_ended_for_a_loss_that_was_no_trial(self, clusters: ClusterFactory) -> None:
        """Found: of four runs that were lost with a target none was on trial there, for others had died as well; what
        was known of these changed meanwhile, and all four were ended."""
        deaths, trials = list[Deadly](), list[bool]()

        class Forgotten(Deadly):
            """A target that dies; just before the third attempt, the recorded losses of other workers are forgotten."""

            async def Generate(self, request: Any, context: Any) -> Any:
                trials.append(request.trial_tokens > 0)
                if len(trials) == 3:
                    for worker in others:
                        environment.losses.poison.regain(worker)
                async for event in super().Generate(request, context):
                    yield event

        targets = [Forgotten(deaths, 1, up_to=99) for _ in range(4)]
        async with clusters.open([*targets], settings={"quarantine_s": 0.01}) as cluster:
            environment = cluster.service.environment
            record = environment.snapshot().targets[0]
            others = [replace(record, incarnation=f"before {number}") for number in range(2)]
            for worker in others:
                environment.losses.poison.note_loss(worker, "another prompt", environment.now_s())
            answer = await cluster.complete(max_tokens=90)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "poisonous_request")
            assert trials == [False, False, False, True]

    @pytest.mark.parametrize(("has_heard", "num_deaths"), [(True, 3), (False, 7)])
    async def test_what_a_prompt_costs_it_costs_all_coordinators_together(
        self, clusters: ClusterFactory, has_heard: bool, num_deaths: int
    ) -> None:
        """Its client comes to another coordinator with each try, without an id that the journal would know. At one that
        has not heard of it yet it costs another two workers, the second one on its trial."""
        deaths, memory = list[Deadly](), Memory()
        async with AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(
                    clusters.open(
                        [Deadly(deaths, 1, up_to=99) for _ in range(3)],
                        registry=memory,  # type: ignore[arg-type]
                        settings={"quarantine_s": 0.01},
                    )
                )
                for _ in range(3)
            ]
            for cluster in opened:
                environment = cluster.service.environment
                if not has_heard:
                    await environment.losses.exchange.__aexit__()
                    await asyncio.sleep(KNOWN_LOSSES_S)  # what it knows is not taken for fresh
                elif deaths:
                    while not environment.losses.poison.convicted(environment.now_s()):  # noqa: ASYNC110 - it tells nobody
                        await asyncio.sleep(0.01)
                answer = await cluster.complete(max_tokens=90)
                assert answer.json()["error"]["code"] == "poisonous_request"
                await environment.losses.exchange.refresh(0.0)
            assert len(deaths) == num_deaths

    async def test_a_prompt_that_one_tenant_has_refused_is_served_to_others(
        self, clusters: ClusterFactory, tmp_path: Path
    ) -> None:
        """Found: whoever knew of a parameter that brings targets down, which no digest of a prompt has, could have a
        public prompt refused to all. Whoever it is keeps to its own losses, over all its keys."""
        keys = {name: new_key() for name in ("a", "a again", "b")}
        (tmp_path / "keys.toml").write_text(
            "\n".join(entry(key, name[0], frozenset({Scope.GENERATE}), None, "") for name, key in keys.items())
        )

        class Brought(FakeTarget):
            """Comes down with each request of `a`."""

            async def Generate(self, request: Any, context: Any) -> Any:
                self.dies_at = 1 if request.owner == tenant_digest("a") else None
                async for event in super().Generate(request, context):
                    yield event

        targets = [Brought(clusters.script) for _ in range(4)]
        settings = {"quarantine_s": 0.01, "api_keys_file": str(tmp_path / "keys.toml")}
        async with clusters.open([*targets], settings=settings) as cluster:
            told = []
            for name in ("a", "a again", "b", "a", "b"):
                cluster.client.headers["Authorization"] = f"Bearer {keys[name]}"
                answer = await cluster.complete(max_tokens=4)
                told.append((answer.status_code, sum(target.num_died for target in targets)))
        assert told == [(503, 3), (503, 3), (200, 3), (503, 3), (200, 3)]

    async def test_without_keys_a_name_that_a_client_gives_itself_is_no_tenant(self, clusters: ClusterFactory) -> None:
        deaths = list[Deadly]()
        targets = [Deadly(deaths, 1, up_to=99) for _ in range(4)]
        async with clusters.open([*targets], settings={"quarantine_s": 0.01}) as cluster:
            for user in ("one", "two"):
                answer = await cluster.complete(max_tokens=90, user=user)
                assert answer.json()["error"]["code"] == "poisonous_request"
            assert len(deaths) == 3

    async def test_a_registry_that_does_not_answer_keeps_no_replay_waiting(self, clusters: ClusterFactory) -> None:
        class Away(Memory):
            num_asked = 0

            async def exchange_losses(self, once: Sequence[str], anew: Sequence[str]) -> Mapping[str, float]:
                self.num_asked += 1
                raise RegistryUnavailable("it is away")

        deaths, memory = list[Deadly](), Away()
        targets = [Deadly(deaths, 1, up_to=99) for _ in range(4)]
        async with clusters.open(
            [*targets],
            registry=memory,  # type: ignore[arg-type]
            settings={"quarantine_s": 0.01},
        ) as cluster:
            answer = await cluster.complete(max_tokens=90)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "poisonous_request")
            assert len(deaths) == 3, "it goes by what it knows"
            assert memory.num_asked
            told = cluster.service.environment.losses.exchange._unsent
            assert 0 < len(told) <= UNSENT_MAX

    async def test_losses_of_another_run_under_its_id_are_not_its_own(self, clusters: ClusterFactory) -> None:
        async with two_replicas(clusters) as (one, other, memory):
            whole = events_of((await ask(one, BODY, "r1")).text)
            await ask(one, BODY | {"prompt": "def"}, "r1")
            memory.stored["r1"]["losses"] = _pack_losses(2)
            await ask(other, BODY, "r1", at(whole, 3))
            await ask(one, BODY, "r1")
            memory.stored["r1"]["losses"] = _pack_losses(2)
            await ask(other, BODY, "r1", at(whole, 3))
            assert [request.trial_tokens > 0 for request in other.targets[0].requests] == [False, True]


class TestIdentity:
    def target(self, weights: str, numerics: str = "") -> WorkerRecord:
        return record_of("target", "h:1", "f", weights_fingerprint=weights, numerics=numerics)

    def test_the_first_place_binds_the_run(self) -> None:
        run = RunIdentity("0" * 12)
        assert run.accepts(self.target("a"))
        assert run.bind(0, self.target("a"))
        assert not run.bind(1, self.target("b"))
        assert run.bind(1, self.target("a"))
        run.release(0)
        assert not run.accepts(self.target("b"))
        run.release(1)
        assert run.bind(1, self.target("b"))

    def test_one_that_goes_on_stays_bound(self) -> None:
        before = RunIdentity()
        before.bind(0, self.target("a", "cpu"))
        run = RunIdentity(weights_digest=before.weights_digest)
        run.bind(0, self.target("a", "cpu"))
        run.release(0)
        assert not run.accepts(self.target("b", "cpu"))
        assert not run.accepts(self.target("a", "gpu"))
        assert run.accepts(self.target("a", "cpu"))

    def test_a_distribution_is_the_same_on_other_numerics(self) -> None:
        run = RunIdentity(compares_numerics=False)
        run.bind(0, self.target("a", "cpu"))
        assert run.accepts(self.target("a", "gpu"))
        assert not run.accepts(self.target("b", "cpu"))

    def test_parts_do_not_run_into_each_other(self) -> None:
        assert digest_of("ab", "c") != digest_of("a", "bc")
        assert digest_of(("a", "b")) != digest_of("a", "b")

    @pytest.mark.parametrize(
        ("temperature", "written"),
        [(0.0, "150000803f180330094d0000803f650000803f"), (0.5, "0d0000003f150000803f180330094d0000803f650000803f")],
    )
    def test_parameters_count_as_at_releases_that_left_zeros_out(self, temperature: float, written: str) -> None:
        """A stream that was begun at one of them is resumed here, while a fleet is upgraded."""
        sampling = SamplingParams(temperature=temperature, max_tokens=9, top_k=3)
        assert sampling.to_proto().HasField("temperature")
        assert _sampling_bytes(sampling).hex() == written
