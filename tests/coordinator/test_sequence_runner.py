"""One request's life between a target and a draft worker, faults included. Workers are fakes, gRPC is real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from coordinator.intake.generation_request import GenerationInput
from coordinator.speculation.priors import Evidence, PriorKey, StartingMode
from outrider.errors import WorkerUnreached
from outrider.local.free_ports import free_ports
from tests.coordinator.conftest import TEXT, Cluster, ClusterFactory
from tests.coordinator.fakes import FakeDraft, FakeTarget, eventually, serving


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def expected(clusters: ClusterFactory, num_tokens: int) -> str:
    script = clusters.script * (num_tokens // len(clusters.script) + 1)
    return clusters.tokenizer.decode(script[:num_tokens])


def once_attached(draft: FakeDraft) -> Callable[[int], bool]:
    """For a target whose whole text may otherwise be over before its draft worker has been reached."""
    return lambda num_tokens: bool(draft.requests)


async def released(cluster: Cluster) -> None:
    await eventually(lambda: cluster.num_open == 0, "both workers are free again")


class TestBothSides:
    async def test_target_and_draft_hear_of_the_same_session(self, clusters: ClusterFactory) -> None:
        draft = FakeDraft()
        target = clusters.target(may_step=once_attached(draft))
        async with clusters.open([target], [draft]) as cluster:
            assert text_of(await cluster.complete()) == expected(clusters, 12)
            await released(cluster)
        (generate,), (attach,) = target.requests, draft.requests
        assert attach.session_id == generate.session_id
        assert attach.attachment == 1
        assert attach.token_ids == generate.token_ids
        assert attach.sampling == generate.sampling
        assert attach.tokenizer_fingerprint == clusters.tokenizer.fingerprint
        assert generate.num_prompt_tokens == len(generate.token_ids)

    async def test_without_a_draft_worker_requests_are_served_plainly(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with clusters.open([target]) as cluster:
            response = await cluster.complete()
        assert text_of(response) == expected(clusters, 12)
        assert response.json()["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        assert target.speculation_calls == []

    async def test_a_request_may_switch_speculation_off(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(), FakeDraft()
        async with clusters.open([target], [draft]) as cluster:
            await cluster.complete(speculation={"enabled": False})
        assert not target.requests[0].speculation.enabled
        assert draft.requests == []

    async def test_a_request_may_set_the_number_of_hints(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with clusters.open([target]) as cluster:
            await cluster.complete(speculation={"num_speculative_tokens": 3})
        assert target.requests[0].speculation.num_speculative_tokens == 3

    async def test_a_draft_of_another_tokenizer_is_not_asked(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(), FakeDraft()
        async with clusters.open([target], [draft]) as cluster:
            snapshot = cluster.service.snapshot()
            object.__setattr__(snapshot.drafts[0], "tokenizer_fingerprint", "f" * 16)
            assert text_of(await cluster.complete()) == expected(clusters, 12)
            health = (await cluster.client.get("/health")).json()
        assert draft.requests == []
        assert "f" * 16 in health["excluded_workers"][0]["reason"]


class TestDraftFaults:
    async def test_a_full_draft_worker_is_replaced_by_another(self, clusters: ClusterFactory) -> None:
        target, full, free = clusters.target(), FakeDraft(is_full=True), FakeDraft()
        target.may_step = lambda num_tokens: len(free.requests) == len(target.requests)
        async with clusters.open([target], [full, free]) as cluster:
            num_requests = 0
            while not full.requests and num_requests < 50:  # chance picks between equals
                num_requests += 1
                assert text_of(await cluster.complete()) == expected(clusters, 12)
            await released(cluster)
        assert full.requests
        assert len(free.requests) == num_requests
        assert max(request.attachment for request in free.requests) == 2

    async def test_a_draft_that_dies_midway_is_replaced_with_the_tokens_so_far(self, clusters: ClusterFactory) -> None:
        target = clusters.target(step_s=0.02)
        mortals = [FakeDraft(lets_go_after_s=0.1), FakeDraft(lets_go_after_s=0.1)]

        def may_step(num_tokens: int) -> bool:
            return sum(len(mortal.requests) for mortal in mortals) > (1 if num_tokens >= 15 else 0)

        target.may_step = may_step
        async with clusters.open([target], mortals) as cluster:
            assert text_of(await cluster.complete(max_tokens=20)) == expected(clusters, 20)
        requests = sorted([*mortals[0].requests, *mortals[1].requests], key=lambda each: each.attachment)
        first, second = requests[:2]
        assert (first.attachment, second.attachment) == (1, 2)
        committed = [*target.requests[0].token_ids, *clusters.script]
        assert len(second.token_ids) > len(first.token_ids)
        assert list(second.token_ids) == committed[: len(second.token_ids)]

    async def test_a_draft_that_falls_silent_is_let_go(self, clusters: ClusterFactory) -> None:
        target, mute = clusters.target(step_s=0.02), FakeDraft(is_mute=True)
        # Its timeout has to suffice for a first connection.
        async with clusters.open([target], [mute], settings={"draft_silence_max_s": 0.5}) as cluster:
            target.may_step = lambda num_tokens: num_tokens < 15 or mute.num_closed > 0
            task = asyncio.create_task(cluster.complete(max_tokens=25))
            await eventually(lambda: mute.num_closed == 1, "attached, and let go while the request goes on")
            assert not task.done()
            assert text_of(await task) == expected(clusters, 25)


class TestFallback:
    async def test_low_acceptance_frees_the_draft_and_tells_the_target(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(step_s=0.01, num_draft_tokens=5, num_accepted=0), FakeDraft()
        target.may_step = once_attached(draft)
        async with clusters.open([target], [draft]) as cluster:
            task = asyncio.create_task(cluster.complete(max_tokens=40))
            await eventually(lambda: bool(draft.requests), "attached")
            await eventually(lambda: draft.num_open == 0, "detached")
            await eventually(lambda: bool(target.speculation_calls), "told the target")
            assert not task.done()
            assert text_of(await task) == expected(clusters, 40)
        (call,) = target.speculation_calls
        assert call.session_id == target.requests[0].session_id
        assert not call.speculation.enabled

    async def test_after_a_pause_the_draft_is_tried_again(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(step_s=0.002, num_draft_tokens=5, num_accepted=0), FakeDraft()

        def may_step(num_tokens: int) -> bool:
            """It pauses after 8 steps, is tried from token 72 to 80, and pauses again."""
            if num_tokens > 90:
                return len(target.speculation_calls) == 3
            return len(draft.requests) > (1 if num_tokens > 75 else 0)

        target.may_step = may_step
        async with clusters.open([target], [draft]) as cluster:
            await cluster.complete(max_tokens=110)
        assert [call.speculation.enabled for call in target.speculation_calls] == [False, True, False]
        assert [request.attachment for request in draft.requests] == [1, 2]

    async def test_a_request_that_speculates_always_is_not_paused_and_neither_learns_nor_teaches(
        self, clusters: ClusterFactory
    ) -> None:
        target, draft = clusters.target(num_draft_tokens=5, num_accepted=0), FakeDraft()
        target.may_step = once_attached(draft)
        async with clusters.open([target], [draft]) as cluster:
            doubt(cluster)
            priors, now_s = cluster.service.environment.speculation.priors, cluster.service.environment.now_s
            before = priors.evidence(KEY, now_s())
            request_id = request_id_that_starts(cluster, StartingMode.PAUSED)
            await cluster.complete(request_id=request_id, max_tokens=110, speculation={"always": True})
            assert priors.evidence(KEY, now_s()).num_steps <= before.num_steps, "evidence only fades"
        assert target.requests[0].speculation.enabled
        assert target.requests[0].speculation.always
        assert target.speculation_calls == []
        assert len(draft.requests) == 1

    async def test_good_acceptance_changes_nothing(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(tokens_per_step=4, num_draft_tokens=3), FakeDraft()
        target.may_step = once_attached(draft)
        async with clusters.open([target], [draft]) as cluster:
            await cluster.complete(max_tokens=400)
        assert target.speculation_calls == []
        assert len(draft.requests) == 1


KEY = PriorKey("demo", "text/free/greedy")


def doubt(cluster: Cluster) -> None:
    environment = cluster.service.environment
    for _ in range(40):
        environment.speculation.priors.record(KEY, Evidence(1, 1, 8, 8, 0), environment.now_s())


def request_id_that_starts(cluster: Cluster, mode: StartingMode) -> str:
    environment = cluster.service.environment
    ids = (f"request-{number}" for number in range(1000))
    return next(
        each for each in ids if environment.speculation.priors.start(KEY, f"{each}/0", environment.now_s()) is mode
    )


class TestPriors:
    async def test_a_doubted_request_starts_without_a_draft_and_probes_later(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(), FakeDraft()
        target.may_step = lambda num_tokens: num_tokens < 100 or bool(draft.requests and target.speculation_calls)
        async with clusters.open([target], [draft]) as cluster:
            doubt(cluster)
            request_id = request_id_that_starts(cluster, StartingMode.PAUSED)
            short = await cluster.complete(request_id=request_id)
            assert (target.requests[0].speculation.enabled, draft.requests) == (False, [])
            assert not target.requests[0].speculation.plain, "lookup and grammars go on"
            assert target.speculation_calls == []
            long = await cluster.complete(request_id=request_id, max_tokens=110)
            metrics = (await cluster.client.get("/metrics")).text
        assert text_of(short) == expected(clusters, 12)
        assert text_of(long) == expected(clusters, 110)
        assert [call.speculation.enabled for call in target.speculation_calls] == [True]
        (attach,) = draft.requests
        assert attach.attachment == 1
        assert len(attach.token_ids) >= target.requests[1].num_prompt_tokens + 64
        assert 'fallback_starts_total{engine="coordinator",mode="paused",model_name="demo"} 2.0' in metrics

    async def test_one_in_sixteen_of_them_probes_at_once(self, clusters: ClusterFactory) -> None:
        draft = FakeDraft()
        target = clusters.target(tokens_per_step=4, num_draft_tokens=3, may_step=once_attached(draft))
        async with clusters.open([target], [draft]) as cluster:
            doubt(cluster)
            request_id = request_id_that_starts(cluster, StartingMode.PROBING)
            await cluster.complete(request_id=request_id, max_tokens=60)
            metrics = (await cluster.client.get("/metrics")).text
        assert target.requests[0].speculation.enabled
        assert len(draft.requests) == 1
        assert 'fallback_starts_total{engine="coordinator",mode="probing",model_name="demo"} 1.0' in metrics
        probes = 'fallback_probes_total{engine="coordinator",model_name="demo",outcome="high_acceptance"} 1.0'
        assert probes in metrics

    async def test_requests_whose_draft_is_useless_teach_the_next_to_start_paused(
        self, clusters: ClusterFactory
    ) -> None:
        target, draft = clusters.target(num_draft_tokens=5), FakeDraft()
        async with clusters.open([target], [draft]) as cluster:
            for number in range(40):
                await cluster.complete(request_id=f"r{number}", max_tokens=10)
            environment = cluster.service.environment
            evidence = environment.speculation.priors.evidence(KEY, environment.now_s())
        enabled = [request.speculation.enabled for request in target.requests]
        assert enabled[:16] == [True] * 16, "nothing is known yet"
        assert enabled[20:].count(False) > 10
        assert (evidence.paused_share, evidence.acceptance) == (1.0, 0.0)

    async def test_requests_that_gain_teach_that_too_and_so_do_clients_that_leave(
        self, clusters: ClusterFactory
    ) -> None:
        target = clusters.target(step_s=0.001, tokens_per_step=4, num_draft_tokens=3)
        async with clusters.open([target], [FakeDraft()]) as cluster:
            service = cluster.service
            request = GenerationInput(request_id="r", text="import", max_tokens=500)
            items = service.generate(await service.prepare(request), service.environment.now_s())
            for _ in range(20):
                await anext(items)
            await items.aclose()
            key = PriorKey("demo", "text/free/coupled")
            evidence = service.environment.speculation.priors.evidence(key, service.environment.now_s())
        assert evidence.num_judged == pytest.approx(1, rel=0.05)
        assert evidence.num_paused == 0
        assert evidence.extra_tokens == pytest.approx(3)

    async def test_a_text_without_speculation_teaches_nothing(self, clusters: ClusterFactory) -> None:
        target = clusters.target(num_draft_tokens=5)
        async with clusters.open([target], [FakeDraft()]) as cluster:
            await cluster.complete(speculation={"enabled": False})
            assert cluster.service.environment.speculation.priors.num_keys == 0

    async def test_an_operator_may_do_without_priors(self, clusters: ClusterFactory) -> None:
        target = clusters.target(num_draft_tokens=5)
        async with clusters.open([target], [FakeDraft()], settings={"uses_priors": False}) as cluster:
            doubt(cluster)
            for _ in range(20):
                await cluster.complete(max_tokens=10)
        assert all(request.speculation.enabled for request in target.requests)


class TestTargetFaults:
    async def test_a_full_target_is_replaced_by_another(self, clusters: ClusterFactory) -> None:
        full, free = clusters.target(is_full=True), clusters.target()
        async with clusters.open([full, free]) as cluster:
            for _ in range(50):
                assert text_of(await cluster.complete()) == expected(clusters, 12)
        assert full.requests, "chance picks between equals"

    async def test_when_every_target_is_full_the_client_is_told_when_to_come_back(
        self, clusters: ClusterFactory
    ) -> None:
        full = [clusters.target(is_full=True), clusters.target(is_full=True)]
        async with clusters.open(full, settings={"queue_wait_max_s": 0.7}) as cluster:
            response = await cluster.complete()
            streamed = await cluster.complete(stream=True)
        for each in (response, streamed):
            assert each.status_code == 429
            assert int(each.headers["retry-after"]) >= 1
            assert each.json()["error"]["code"] == "overloaded"

    @pytest.mark.parametrize("body", [{"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 1}])
    async def test_a_target_that_dies_midway_loses_and_repeats_no_token(
        self, clusters: ClusterFactory, body: dict[str, Any]
    ) -> None:
        mortal, heir = clusters.target(dies_at=5, tokens_per_step=2), clusters.target(tokens_per_step=2)
        draft = FakeDraft()
        heir.may_step = lambda num_tokens: (
            bool(draft.requests) and draft.requests[-1].token_ids == heir.requests[-1].token_ids
        )
        async with clusters.open([mortal, heir], [draft]) as cluster:
            for _ in range(50):
                response = await cluster.complete(**body)
                assert text_of(response) == expected(clusters, 12)
                assert response.json()["usage"]["completion_tokens"] == 12
                if mortal.requests:
                    break
            await released(cluster)
        replay = heir.requests[-1]
        assert len(replay.token_ids) == replay.num_prompt_tokens + 6
        assert list(replay.token_ids[replay.num_prompt_tokens :]) == clusters.script[:6]
        assert replay.session_id != mortal.requests[0].session_id
        assert draft.requests[-1].token_ids == replay.token_ids

    async def test_a_target_that_falls_silent_is_left(self, clusters: ClusterFactory) -> None:
        silent, heir = clusters.target(falls_silent_at=4), clusters.target()
        async with clusters.open([silent, heir], settings={"target_silence_max_s": 0.2}) as cluster:
            for _ in range(50):
                assert text_of(await cluster.complete()) == expected(clusters, 12)
                if silent.requests:
                    break
            await released(cluster)
        assert silent.requests

    async def test_a_target_that_hangs_before_the_first_token_is_left(self, clusters: ClusterFactory) -> None:
        hung, heir = clusters.target(is_hung=True), clusters.target()
        async with clusters.open([hung, heir], settings={"target_silence_max_s": 0.2}) as cluster:
            for _ in range(50):
                assert text_of(await cluster.complete()) == expected(clusters, 12)
                if hung.requests:
                    break
            await released(cluster)
        assert hung.requests

    async def test_a_request_may_wait_for_its_turn_for_longer_than_a_target_may_be_silent(
        self, clusters: ClusterFactory
    ) -> None:
        busy = clusters.target(waits_s=0.6)
        async with clusters.open([busy], settings={"target_silence_max_s": 0.2}) as cluster:
            assert text_of(await cluster.complete()) == expected(clusters, 12)
        assert len(busy.requests) == 1

    async def test_a_stream_waits_for_its_only_target_to_come_back(self, clusters: ClusterFactory) -> None:
        target = clusters.target(dies_at=5)
        async with clusters.open([target], settings={"quarantine_s": 0.2}) as cluster:
            answer = asyncio.create_task(cluster.complete())
            await eventually(lambda: target.num_died >= 2, "it has died, and again when it was asked again")
            target.dies_at = None
            interrupted, whole = await answer, await cluster.complete()
        assert len(target.requests) >= 3
        assert interrupted.json()["choices"] == whole.json()["choices"]

    async def test_without_a_successor_the_stream_ends_with_an_error_event(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(dies_at=5)], settings={"target_wait_max_s": 0.2}) as cluster:
            response = await cluster.complete(stream=True)
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        assert "a target worker was lost while it had this request" in events[-2]
        assert '"code":"unavailable"' in events[-2]

    async def test_a_dead_address_is_503_for_whoever_tries_it(self, clusters: ClusterFactory) -> None:
        target = clusters.target(refuses_with=grpc.StatusCode.UNAVAILABLE)
        async with clusters.open([target], settings={"quarantine_s": 0.3}) as cluster:
            first = await cluster.complete()
            second, third = await asyncio.gather(cluster.complete(), cluster.complete())
        for response in (first, second, third):
            assert response.status_code == 503
            assert "a target worker" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) >= 1

    async def test_a_text_waits_for_the_only_target_where_that_did_not_answer_another_one(
        self, clusters: ClusterFactory
    ) -> None:
        target = clusters.target()
        async with clusters.open([target], settings={"quarantine_s": 0.5}) as cluster:
            environment = cluster.service.environment
            (record,) = cluster.service.snapshot().targets
            environment.placement.router.pass_over(record, environment.now_s())
            waiting = asyncio.create_task(cluster.complete(max_tokens=5))
            await asyncio.sleep(0.25)
            assert not waiting.done()
            assert environment.placement.admission.num_waiting == 1
            assert (await waiting).json()["choices"][0]["text"] == expected(clusters, 5)

    async def test_a_text_waits_for_targets_that_cannot_be_reached_however_often_they_were_tried(
        self, clusters: ClusterFactory, caplog: pytest.LogCaptureFixture
    ) -> None:
        (port,) = free_ports(1)
        address = f"127.0.0.1:{port}"
        async with clusters.open([clusters.target()], settings={"quarantine_s": 0.05}, address=address) as cluster:
            waiting = asyncio.create_task(cluster.complete())
            await eventually(lambda: caplog.text.count("leaves target") > 5, "it is tried again and again")
            async with serving(clusters.target(), port):
                assert text_of(await waiting) == expected(clusters, 12)

    @pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-worker.invalid:50051"])
    async def test_not_for_longer_than_texts_wait_in_the_queue(self, clusters: ClusterFactory, address: str) -> None:
        settings = {"quarantine_s": 0.3, "queue_wait_max_s": 1.0}
        async with clusters.open([clusters.target()], settings=settings, address=address) as cluster:
            responses = await asyncio.gather(*(cluster.complete() for _ in range(3)))
        # 429 is for one whose turn did not come within its second, on a machine that is busy.
        assert {response.status_code for response in responses} - {429} == {503}
        messages = {response.json()["error"]["message"] for response in responses if response.status_code == 503}
        told = [message for message in messages if message == WorkerUnreached.told_as]
        assert told, "who has tried it says what came of it"
        assert messages - set(told) <= {"no target of demo has answered within 1 s"}

    async def test_a_target_that_was_lost_before_the_first_token_is_asked_again_if_it_is_the_only_one(
        self, clusters: ClusterFactory
    ) -> None:
        target = clusters.target(dies_at=0)
        async with clusters.open([target], settings={"quarantine_s": 0.2}) as cluster:
            answer = asyncio.create_task(cluster.complete())
            await eventually(lambda: target.num_died == 1, "it was lost once")
            target.dies_at = None
            assert text_of(await answer) == expected(clusters, 12)
        assert len(target.requests) == 2

    async def test_a_target_that_fails_by_a_text_is_not_asked_for_it_again(self, clusters: ClusterFactory) -> None:
        targets = [clusters.target(refuses_with=grpc.StatusCode.INTERNAL) for _ in range(2)]
        async with clusters.open(targets, settings={"quarantine_s": 0.1}) as cluster:
            assert (await cluster.complete()).status_code == 503
        assert [len(target.requests) for target in targets] == [1, 1]

    async def test_a_text_without_a_token_brings_down_no_more_than_three_targets(
        self, clusters: ClusterFactory
    ) -> None:
        targets = [clusters.target(dies_at=0) for _ in range(5)]
        async with clusters.open(targets) as cluster:
            assert (await cluster.complete()).status_code == 503
        assert sum(len(target.requests) for target in targets) == 3

    async def test_what_a_target_refuses_is_the_clients_error(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(refuses_with=grpc.StatusCode.INVALID_ARGUMENT)]) as cluster:
            response = await cluster.complete()
        assert response.status_code == 400
        assert "refused by the test" in response.json()["error"]["message"]


class TestEnds:
    async def test_a_deadline_frees_both_workers(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(step_s=0.05), FakeDraft()
        async with clusters.open([target], [draft], settings={"deadline_default_s": 0.3}) as cluster:
            response = await cluster.complete(max_tokens=500)
            assert response.status_code == 504
            await released(cluster)

    async def test_a_stop_string_frees_both_workers_at_once(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(step_s=0.01), FakeDraft()
        async with clusters.open([target], [draft]) as cluster:
            response = await cluster.complete(max_tokens=500, stop=["return"])
            await released(cluster)
        choice = response.json()["choices"][0]
        assert choice["text"] == TEXT.partition("return")[0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "return")
        assert target.num_cancelled == 1
        assert response.json()["usage"]["completion_tokens"] < 20

    async def test_the_models_own_end_has_no_stop_reason(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target(eos_at=5)]) as cluster:
            choice = (await cluster.complete(max_tokens=50)).json()["choices"][0]
            asked = (await cluster.complete(max_tokens=50, stop_token_ids=[0])).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert (asked["finish_reason"], asked["stop_reason"]) == ("stop", 0)
        assert choice["text"] == expected(clusters, 5)

    async def test_a_client_that_leaves_a_stream_frees_both_workers(self, clusters: ClusterFactory) -> None:
        target, draft = clusters.target(step_s=0.02), FakeDraft()
        async with clusters.open([target], [draft]) as cluster:
            spec = await cluster.service.prepare(GenerationInput(request_id="r", text="import", max_tokens=500))
            items = cluster.service.generate(spec, cluster.service.environment.now_s())
            await anext(items)
            await eventually(lambda: cluster.num_open == 2, "both work for it")
            await items.aclose()
            await released(cluster)
        assert target.num_cancelled == 1

    async def test_a_replica_at_its_bound_refuses_and_recovers(self, clusters: ClusterFactory) -> None:
        target = clusters.target(step_s=0.02)
        async with clusters.open([target], settings={"requests_max": 1}) as cluster:
            task = asyncio.create_task(cluster.complete())
            await eventually(lambda: target.num_open == 1, "the first one runs")
            assert (await cluster.complete()).status_code == 429
            assert (await task).status_code == 200
            assert (await cluster.complete()).status_code == 200


async def test_many_requests_at_once_stay_apart(clusters: ClusterFactory) -> None:
    targets: list[FakeTarget] = [clusters.target(step_s=0.001, tokens_per_step=3) for _ in range(2)]
    async with clusters.open(targets, [FakeDraft()]) as cluster:
        lengths = [5 + 3 * number for number in range(20)]
        responses = await asyncio.gather(*(cluster.complete(max_tokens=length) for length in lengths))
        assert [text_of(each) for each in responses] == [expected(clusters, length) for length in lengths]
        await released(cluster)
    assert all(target.requests for target in targets), "both shared the work"
