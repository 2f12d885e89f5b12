"""A canary in front of fake workers: who gets which arm, what the workers are told, what is counted and audited."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.api.grpc import grpc_api
from coordinator.canary import audit as canary_audit
from coordinator.canary.assignment import CanaryDesk
from coordinator.intake.generation_request import GenerationInput, GenerationSpec, Origin
from outrider.canary.plan import ArmName, Assignment, CanaryPlan, CanaryState
from outrider.canary.statistics import NUM_CLUSTERS, ArmStatistics, Count, Figure, Loss
from outrider.canary.store import Batch
from outrider.errors import SlowReader
from outrider.observability.tracing import NO_SPAN, Span
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import common_pb2, generation_pb2, target_pb2
from tests.coordinator.canaries import CLOCK_MS, NEW_DRAFT, OFF, SHORT, hear_of, key_in, plan_of
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import FakeDraft, FakeTarget, eventually, served_model

CONTROL, CANARY = ArmName.CONTROL, ArmName.CANARY


@asynccontextmanager
async def opened(
    clusters: ClusterFactory,
    target: FakeTarget,
    drafts: list[FakeDraft] | None = None,
    plan: CanaryPlan | None = None,
    state: CanaryState = CanaryState.RUNNING,
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[Cluster]:
    """A replica that has heard of the canary."""
    async with clusters.open([target], drafts, settings=settings) as cluster:
        hear_of(cluster.service.canary, plan, state, now_s=cluster.service.environment.now_s())
        yield cluster


def batch_of(desk: CanaryDesk) -> Batch:
    batch = desk.take()
    assert batch is not None
    return batch


def counted(cluster: Cluster) -> dict[ArmName, ArmStatistics]:
    """The statistics of each arm that the replica would send now."""
    return {arm: ArmStatistics(sums) for arm, sums in batch_of(cluster.service.canary).sums.items()}


async def metrics_of(cluster: Cluster) -> dict[str, float]:
    text = (await cluster.client.get("/metrics")).text
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "canary" in sample.name
    }


class TestArms:
    async def test_speculation_is_off_for_one_arm_and_the_text_is_the_same(self, clusters: ClusterFactory) -> None:
        target, draft, plan = clusters.target(), FakeDraft(), plan_of(OFF)
        target.may_step = lambda num_tokens: bool(draft.requests)
        async with opened(clusters, target, [draft], plan) as cluster:
            answers = [await cluster.complete(user=key_in(plan, arm)) for arm in (CONTROL, CANARY)]
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert texts[0] == texts[1]
        assert [answer.json()["metrics"]["canary_arm"] for answer in answers] == ["control", "canary"]
        assert [request.speculation.enabled for request in target.requests] == [True, False]
        assert [request.speculation.plain for request in target.requests] == [False, True]
        assert len(draft.requests) == 1

    async def test_the_most_hints_a_step_are_the_plans_in_one_arm(self, clusters: ClusterFactory) -> None:
        target, draft, plan = clusters.target(), FakeDraft(), plan_of(SHORT)
        target.may_step = lambda num_tokens: len(draft.requests) == len(target.requests)
        async with opened(clusters, target, [draft], plan) as cluster:
            for arm in (CONTROL, CANARY):
                await cluster.complete(user=key_in(plan, arm))
        assert [request.speculation.num_speculative_tokens for request in target.requests] == [0, 3]
        assert [request.speculation.num_speculative_tokens for request in draft.requests] == [0, 3]

    @pytest.mark.parametrize(
        ("state", "control_has", "canary_has"),
        [
            (CanaryState.WAITING, "demo", "demo"),
            (CanaryState.RUNNING, "demo", "new"),
            (CanaryState.PROMOTED, "new", "new"),
            (CanaryState.ABORTED, "demo", "demo"),
        ],
    )
    async def test_draft_workers_of_the_new_model_are_for_its_arm_alone_as_long_as_it_is_known(
        self, clusters: ClusterFactory, state: CanaryState, control_has: str, canary_has: str
    ) -> None:
        drafts = [FakeDraft(), FakeDraft(model_name="new")]
        plan, target = plan_of(NEW_DRAFT), clusters.target()
        target.may_step = lambda num_tokens: sum(len(draft.requests) for draft in drafts) == len(target.requests)
        async with opened(clusters, target, drafts, plan, state) as cluster:
            for arm, name in ((CONTROL, control_has), (CANARY, canary_has)):
                for number in range(4):
                    before = Counter({draft.model_name: len(draft.requests) for draft in drafts})
                    await cluster.complete(user=key_in(plan, arm, number))
                    after = Counter({draft.model_name: len(draft.requests) for draft in drafts})
                    assert after - before == Counter({name: 1})

    @pytest.mark.parametrize("state", [CanaryState.RUNNING, CanaryState.PROMOTED, CanaryState.ABORTED])
    @pytest.mark.parametrize(("model", "takes_part"), [("demo", True), ("another", False)])
    async def test_a_canary_of_one_model_changes_nothing_for_others(
        self, clusters: ClusterFactory, state: CanaryState, model: str, takes_part: bool
    ) -> None:
        draft, plan = FakeDraft(model_name="old"), plan_of(NEW_DRAFT, model=model)
        target = clusters.target(may_step=lambda num_tokens: takes_part or bool(draft.requests))
        async with opened(clusters, target, [draft], plan, state) as cluster:
            answer = await cluster.complete(user=key_in(plan, CANARY))
        is_divided = takes_part and state is not CanaryState.ABORTED
        assert ("canary_arm" in answer.json()["metrics"]) == is_divided
        if not takes_part:
            assert len(draft.requests) == 1

    async def test_without_a_canary_any_draft_worker_will_do(self, clusters: ClusterFactory) -> None:
        draft = FakeDraft(model_name="new")
        target = clusters.target(may_step=lambda num_tokens: bool(draft.requests))
        async with opened(clusters, target, [draft]) as cluster:
            answer = await cluster.complete()
        assert "canary_arm" not in answer.json()["metrics"]
        assert len(draft.requests) == 1

    @pytest.mark.parametrize("speculation", [{"enabled": False}, {"always": True}, {"num_speculative_tokens": 5}])
    async def test_a_request_that_says_how_much_to_speculate_takes_no_part(
        self, clusters: ClusterFactory, speculation: dict[str, Any]
    ) -> None:
        target = clusters.target()
        async with opened(clusters, target, plan=plan_of(SHORT, share=0.999)) as cluster:
            answer = await cluster.complete(speculation=speculation)
            assert cluster.service.canary.take() is None
        assert "canary_arm" not in answer.json()["metrics"]
        (seen,) = target.requests
        assert seen.speculation.num_speculative_tokens == speculation.get("num_speculative_tokens", 0)

    async def test_it_may_still_not_have_the_new_draft_workers(self, clusters: ClusterFactory) -> None:
        drafts = [FakeDraft(model_name="new")]
        async with opened(clusters, clusters.target(), drafts, plan_of(NEW_DRAFT, share=0.999)) as cluster:
            await cluster.complete(speculation={"always": True})
        assert not drafts[0].requests

    async def test_once_promoted_it_is_everybodys_and_no_longer_compared(self, clusters: ClusterFactory) -> None:
        target, plan = clusters.target(), plan_of(SHORT)
        async with opened(clusters, target, plan=plan, state=CanaryState.PROMOTED) as cluster:
            for number in range(3):
                await cluster.complete(user=key_in(plan, CONTROL, number))
            assert cluster.service.canary.take() is None
            assert (await metrics_of(cluster))["outrider_canary_requests_total/canary"] == 3
        assert {request.speculation.num_speculative_tokens for request in target.requests} == {3}


class TestKeys:
    @pytest.mark.parametrize(
        ("body", "headers"),
        [
            ({"user": "KEY"}, {}),
            ({"prompt_cache_key": "KEY", "user": "OTHER"}, {}),
            ({"prompt_cache_key": "OTHER", "user": "OTHER"}, {"X-Canary-Key": "KEY"}),
            ({}, {"X-Request-Id": "KEY"}),
        ],
        ids=["user", "prompt_cache_key", "header", "request id"],
    )
    async def test_a_key_keeps_its_arm_at_every_replica(
        self, clusters: ClusterFactory, body: dict[str, str], headers: dict[str, str]
    ) -> None:
        plan = plan_of()
        for arm, other in ((CONTROL, CANARY), (CANARY, CONTROL)):
            keys = {"KEY": key_in(plan, arm), "OTHER": key_in(plan, other)}
            for _ in range(2):  # replicas
                async with opened(clusters, clusters.target(), plan=plan) as cluster:
                    for _ in range(2):
                        answer = await cluster.client.post(
                            "/v1/completions",
                            json={"prompt": "x", "max_tokens": 2} | {name: keys[of] for name, of in body.items()},
                            headers={name: keys[of] for name, of in headers.items()},
                        )
                        assert answer.json()["metrics"]["canary_arm"] == arm

    async def test_over_grpc_it_is_the_metadatas_key_or_the_tenant(self, clusters: ClusterFactory) -> None:
        target, plan = clusters.target(), plan_of(SHORT)
        keys = {arm: key_in(plan, arm) for arm in ArmName}
        async with opened(clusters, target, plan=plan) as cluster:
            for tenant, metadata in (("", keys[CANARY]), (keys[CANARY], ""), (keys[CONTROL], keys[CANARY])):
                request = generation_pb2.GenerationRequest(prompt="import", tenant=tenant)
                async for _ in grpc_api.generate(cluster.service, request, Origin(canary_key=metadata)):
                    pass
        assert [request.speculation.num_speculative_tokens for request in target.requests] == [3, 3, 3]

    async def test_a_key_that_is_too_long_is_refused_by_name(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            body = await cluster.complete(prompt_cache_key="x" * 257)
            header = await cluster.client.post(
                "/v1/completions", json={"prompt": "x"}, headers={"X-Canary-Key": "x" * 257}
            )
        assert (body.status_code, body.json()["error"]["param"]) == (400, "prompt_cache_key")
        assert (header.status_code, header.json()["error"]["param"]) == (400, "x-canary-key")


class TestTime:
    async def test_a_replica_that_hears_nothing_more_ends_it_in_time(self, clusters: ClusterFactory) -> None:
        plan = plan_of(SHORT)
        async with opened(clusters, clusters.target(), plan=plan) as cluster:
            desk, now_s = cluster.service.canary, cluster.service.environment.now_s()
            assert desk.share(now_s + 99) == plan.share
            assert desk.share(now_s + 101) == 0.0
            hear_of(desk, plan, now_s=now_s, clock_ms=CLOCK_MS + 200_000)
            answer = await cluster.complete(user=key_in(plan, CANARY))
        assert "canary_arm" not in answer.json()["metrics"]


class TestCounting:
    async def test_every_request_is_counted_once_in_its_arm(self, clusters: ClusterFactory) -> None:
        plan, target = plan_of(SHORT), clusters.target(tokens_per_step=3, num_draft_tokens=4)
        async with opened(clusters, target, plan=plan) as cluster:
            for arm, num in ((CONTROL, 5), (CANARY, 3)):
                for number in range(num):
                    await cluster.complete(user=key_in(plan, arm, number), n=2)
            counts, metrics = counted(cluster), await metrics_of(cluster)
        assert {arm: counts[arm].num_ended for arm in ArmName} == {CONTROL: 5, CANARY: 3}
        assert {arm: counts[arm].num(Count.FINISHED) for arm in ArmName} == {CONTROL: 5, CANARY: 3}
        assert metrics["outrider_canary_requests_total/control"] == 5
        assert metrics["outrider_canary_requests_total/canary"] == 3
        canary = counts[CANARY]
        assert canary.draft_acceptance_rate == pytest.approx(2 / 4)
        assert {figure: canary.mean(figure).whole for figure in Figure} == dict.fromkeys(Figure, 3)
        assert 0 < canary.mean(Figure.TTFT).value < canary.mean(Figure.E2E).value

    async def test_a_request_of_one_token_has_no_time_between_tokens(self, clusters: ClusterFactory) -> None:
        async with opened(clusters, clusters.target(), plan=plan_of()) as cluster:
            await cluster.complete(max_tokens=1, user=key_in(plan_of(), CONTROL))
            control = counted(cluster)[CONTROL]
        assert (control.mean(Figure.TTFT).whole, control.mean(Figure.TPOT).whole) == (1, 0)

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("options", "body", "what"),
        [
            ({"refuses_with": grpc.StatusCode.UNAVAILABLE}, {}, Count.FAILED),
            ({"step_s": 5.0}, {"deadline_ms": 60}, Count.LATE),
            ({"no_token_at": 2}, {}, Count.REFUSED),
        ],
        ids=["worker lost", "deadline", "impossible"],
    )
    async def test_requests_that_did_not_finish_are_counted_by_what_ended_them(
        self, clusters: ClusterFactory, options: dict[str, Any], body: dict[str, Any], what: Count
    ) -> None:
        plan = plan_of()
        async with opened(clusters, clusters.target(**options), plan=plan) as cluster:
            answer = await cluster.complete(user=key_in(plan, CANARY), **body)
            counts = counted(cluster)[CANARY]
        assert answer.status_code >= 400
        assert (counts.num_ended, counts.num(what)) == (1, 1)
        assert sum(map(counts.num_first, Loss)) == (what is not Count.REFUSED)

    async def test_requests_of_one_key_are_added_up_together(self, clusters: ClusterFactory) -> None:
        plan = plan_of()
        async with opened(clusters, clusters.target(), plan=plan) as cluster:
            for number in (0, 0, 0, 1):
                await cluster.complete(user=key_in(plan, CANARY, number))
            sums = counted(cluster)[CANARY].sums
        groups = [plan.group_of(key_in(plan, CANARY, number)) % NUM_CLUSTERS for number in (0, 1)]
        assert [sums[f"e2e:c:{group}:divisor"] for group in groups] == [3, 1]

    async def test_a_client_that_leaves_is_counted_as_such(self, clusters: ClusterFactory) -> None:
        plan = plan_of()
        async with opened(clusters, clusters.target(step_s=0.02), plan=plan) as cluster:
            chunks = grpc_api.generate(
                cluster.service,
                generation_pb2.GenerationRequest(prompt="x"),
                Origin(canary_key=key_in(plan, CANARY)),
            )
            await anext(chunks)
            await chunks.aclose()
            counts = counted(cluster)[CANARY]
        assert (counts.num_ended, counts.num(Count.LEFT)) == (1, 1)

    async def test_a_client_that_does_not_read_is_counted_as_one_that_left(self, clusters: ClusterFactory) -> None:
        plan = plan_of()
        settings = {"client_stall_max_s": 0.1}
        async with opened(clusters, clusters.target(), plan=plan, settings=settings) as cluster:
            service = cluster.service
            chunks = grpc_api.generate(
                service,
                generation_pb2.GenerationRequest(
                    prompt="x", sampling=common_pb2.SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
                ),
                Origin(canary_key=key_in(plan, CANARY)),
            )
            await anext(chunks)
            ended = service.environment.metrics.slow_readers.labels("request")._value
            await eventually(lambda: ended.get() == 1, "its request is ended")
            with pytest.raises(SlowReader):
                await anext(chunks)
            counts = counted(cluster)[CANARY]
        assert (counts.num_ended, counts.num(Count.LEFT), counts.num(Count.FAILED)) == (1, 1, 0)

    async def test_what_is_lost_on_its_way_is_sent_again_as_it_was(self, clusters: ClusterFactory) -> None:
        plan = plan_of()
        async with opened(clusters, clusters.target(), plan=plan) as cluster:
            desk, key = cluster.service.canary, key_in(plan, CANARY)
            await cluster.complete(user=key)
            first = batch_of(desk)
            await cluster.complete(user=key)
            assert batch_of(desk) is first
            hear_of(desk, plan)
            second = batch_of(desk)
            hear_of(desk, plan)
            assert desk.take() is None
        assert (first.number, second.number) == (1, 2)
        assert [each.sums[CANARY][Count.FINISHED] for each in (first, second)] == [1, 1]

    async def test_a_request_that_outlives_its_canary_counts_for_no_other(self, clusters: ClusterFactory) -> None:
        plan, target = plan_of(), clusters.target(step_s=0.01)
        async with opened(clusters, target, plan=plan) as cluster:
            running = asyncio.create_task(cluster.complete(user=key_in(plan, CANARY)))
            await eventually(lambda: target.num_open == 1, "it runs")
            hear_of(cluster.service.canary, plan_of(canary_id="wxyz9876"))
            assert (await running).status_code == 200
            assert cluster.service.canary.take() is None

    async def test_arms_learn_from_their_own_requests_whether_speculation_pays(self, clusters: ClusterFactory) -> None:
        plan = plan_of(NEW_DRAFT, share=0.5)
        target = clusters.target(num_draft_tokens=4, num_accepted=0)
        async with opened(clusters, target, [FakeDraft(), FakeDraft(model_name="new")], plan) as cluster:
            for number in range(20):
                await cluster.complete(user=key_in(plan, CONTROL, number), max_tokens=30)
            service = cluster.service
            now_s = service.environment.now_s()
            routes = {key.route: each for key, each in service.environment.speculation.priors.summary(now_s).items()}
            assert routes["text/free/greedy"].num_judged >= 16
            target.speculation_calls.clear()
            target.requests.clear()
            await cluster.complete(user=key_in(plan, CANARY))
            await cluster.complete(user=key_in(plan, CONTROL))
            assert target.requests[0].speculation.enabled
            routes = {key.route: each for key, each in service.environment.speculation.priors.summary(now_s).items()}
        assert set(routes) == {"text/free/greedy", "text/free/greedy@abcd1234"}


def audited_plan(**changes: Any) -> CanaryPlan:
    return plan_of(SHORT, **({"audit_share": 1.0} | changes))


def says_otherwise(clusters: ClusterFactory) -> FakeTarget:
    """A target whose text depends on speculation, from the third token on."""
    script = clusters.script
    wrong = [*script[:2], *reversed(script)]

    def script_of(request: target_pb2.GenerateRequest) -> list[int]:
        return script if request.speculation.plain else wrong

    return clusters.target(script_of=script_of)


def test_a_request_that_is_run_again_is_nobodys_and_has_no_part_in_the_trace_of_the_first() -> None:
    spec = GenerationSpec(
        request=GenerationInput(request_id="r", tenant="acme", canary_key="somebody", priority=-5),
        model="demo", prompt_token_ids=(1,), max_tokens=4, sampling=SamplingParams(max_tokens=4), deadline_s=60.0,
        served=served_model(), span=Span("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        assignment=Assignment("abcd1234", CANARY, group=0, is_compared=True),
    )  # fmt: skip
    plain = canary_audit.plain_spec(spec)
    assert plain.span is NO_SPAN
    assert plain.is_background
    assert plain.assignment is None
    assert (plain.request.tenant, plain.request.canary_key) == ("canary audit", "")
    assert plain.request.speculation.is_plain
    assert (plain.prompt_token_ids, plain.sampling) == (spec.prompt_token_ids, spec.sampling)


class TestAudits:
    async def audits(self, cluster: Cluster, num: int) -> ArmStatistics:
        """The canary's counts once so many audits have been decided."""
        assignment = Assignment("abcd1234", CANARY, group=0, is_compared=True)
        own = cluster.service.canary.statistics_of(assignment)
        await eventually(lambda: own.num(Count.AUDITED) + own.num(Count.UNAUDITED) == num, f"{num} audits are over")
        return own

    async def test_the_same_text_is_found_by_a_plain_run_behind_everybody_else(self, clusters: ClusterFactory) -> None:
        target, plan = clusters.target(), audited_plan()
        async with opened(clusters, target, [FakeDraft()], plan) as cluster:
            await cluster.complete(user=key_in(plan, CANARY), stop=["return"])
            counts = await self.audits(cluster, 1)
            assert (counts.num(Count.AUDITED), counts.num(Count.DIVERGED)) == (1, 0)
            assert counts.num_ended == 1
            assert (await metrics_of(cluster))["outrider_canary_divergences_total"] == 0
        first, second = target.requests
        assert (first.speculation.plain, first.priority) == (False, 0)
        assert (second.speculation.plain, second.priority) == (True, 1000)
        assert first.token_ids == second.token_ids
        assert first.sampling == second.sampling

    @pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
    async def test_another_text_is_a_divergence_and_the_log_tells_where_but_not_what(
        self, clusters: ClusterFactory, sampling: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        plan = audited_plan()
        async with opened(clusters, says_otherwise(clusters), plan=plan) as cluster:
            answer = await cluster.complete(user=key_in(plan, CANARY), request_id="odd", **sampling)
            counts = await self.audits(cluster, 1)
            assert (counts.num(Count.AUDITED), counts.num(Count.DIVERGED)) == (1, 1)
            assert (await metrics_of(cluster))["outrider_canary_divergences_total"] == 1
        (record,) = [record for record in caplog.records if record.name == canary_audit.__name__]
        assert "request odd" in record.getMessage()
        assert "diverged" in record.getMessage()
        assert "output token 2" in record.getMessage()
        assert answer.json()["choices"][0]["text"] not in record.getMessage()

    async def test_a_target_that_contradicts_itself_says_nothing_of_speculation(self, clusters: ClusterFactory) -> None:
        plan, script = audited_plan(), clusters.script
        numbers = itertools.count()
        target = clusters.target(script_of=lambda request: script[next(numbers) % 3 :] + script)
        async with opened(clusters, target, plan=plan) as cluster:
            await cluster.complete(user=key_in(plan, CANARY), max_tokens=1)
            counts = await self.audits(cluster, 1)
        assert (counts.num(Count.UNSTABLE), counts.num(Count.DIVERGED)) == (1, 0)

    async def test_only_requests_whose_text_is_settled_and_alone_are_audited(self, clusters: ClusterFactory) -> None:
        target, plan = clusters.target(), audited_plan()
        async with opened(clusters, target, plan=plan) as cluster:
            key = key_in(plan, CANARY)
            await cluster.complete(user=key, temperature=1, speculation={"acceptance_rule": "token"})
            await cluster.complete(user=key, n=2)
            await cluster.complete(user=key, max_tokens=0, echo=True)
            await cluster.complete(user=key_in(plan, CONTROL))
            await cluster.complete(user=key)
            await self.audits(cluster, 1)
        assert sum(request.priority == 1000 for request in target.requests) == 1

    async def test_without_a_share_nothing_is_run_again(self, clusters: ClusterFactory) -> None:
        target, plan = clusters.target(), audited_plan(audit_share=0.0)
        async with opened(clusters, target, plan=plan) as cluster:
            await cluster.complete(user=key_in(plan, CANARY))
            await asyncio.sleep(0.1)
        assert len(target.requests) == 1

    async def test_one_audit_runs_at_a_time_and_what_finds_no_room_is_counted(self, clusters: ClusterFactory) -> None:
        class SlowForAudits(FakeTarget):
            async def _events(self, request: Any, context: Any) -> AsyncIterator[target_pb2.GenerateEvent]:
                if request.priority == 1000:
                    await asyncio.sleep(60)
                async for event in super()._events(request, context):
                    yield event

        target, plan = SlowForAudits(clusters.script), audited_plan()
        async with opened(clusters, target, plan=plan) as cluster:
            key = key_in(plan, CANARY)
            num = canary_audit.WAITING_MAX + 4
            answers = [await cluster.complete(user=key, max_tokens=2) for _ in range(num)]
            assert {answer.status_code for answer in answers} == {200}
            counts = await self.audits(cluster, 3)
            assert (counts.num(Count.UNAUDITED), counts.num(Count.FINISHED)) == (3, num)
            await eventually(
                lambda: sum(request.priority == 1000 for request in target.requests) == 1, "one audit runs"
            )

    async def test_an_audit_that_fails_is_no_verdict(self, clusters: ClusterFactory) -> None:
        target, plan = clusters.target(), audited_plan()
        async with opened(clusters, target, plan=plan) as cluster:
            chunks = [
                chunk
                async for chunk in grpc_api.generate(
                    cluster.service,
                    generation_pb2.GenerationRequest(
                        prompt="x", sampling=common_pb2.SamplingParams(temperature=0, max_tokens=4)
                    ),
                    Origin(canary_key=key_in(plan, CANARY)),
                )
            ]
            assert chunks
            target.refuses_with = grpc.StatusCode.INTERNAL
            counts = await self.audits(cluster, 1)
        assert (counts.num(Count.UNAUDITED), counts.num(Count.AUDITED)) == (1, 0)
