"""A draft worker with a draft head is paired with targets that keep features for it, and with no others."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from coordinator.placement.draft_heads import reason_against, unpaired
from outrider.registry.worker_record import Pool, Snapshot, WorkerRecord
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import FakeDraft, record_of
from tests.coordinator.test_sequence_runner import expected, once_attached, text_of

OURS, OTHER = "aa" * 16, "bb" * 16


def worker(pool: Pool, number: int, head: str = "", **changes: Any) -> WorkerRecord:
    return record_of(pool, f"127.0.0.1:{7000 + number}", "0" * 16, head_fingerprint=head, **changes)


def admit(model: str, draft: WorkerRecord) -> bool:
    return True


class TestReasons:
    def test_there_is_none_against_a_draft_model_or_a_head_that_some_target_keeps_features_for(self) -> None:
        targets = [worker("target", 0), worker("target", 1, OURS)]
        assert reason_against(worker("draft", 2), targets) is None
        assert reason_against(worker("draft", 2, OURS), targets) is None
        assert reason_against(worker("target", 0, OTHER), targets) is None

    @pytest.mark.parametrize("targets", [[], [worker("target", 0, tokenizer_fingerprint="1" * 16)]])
    def test_there_is_none_while_no_target_of_its_tokenizer_is_there(self, targets: list[WorkerRecord]) -> None:
        assert reason_against(worker("draft", 2, OURS), [replace(each, state="ready") for each in targets]) is None

    def test_a_head_that_no_target_keeps_features_for_is_named_with_the_way_out(self) -> None:
        found = reason_against(worker("draft", 2, OURS), [worker("target", 0), worker("target", 1, OTHER)])
        assert found == (
            "runs the draft head aaaaaaaaaaaaaaaa, for which no target keeps features: start the target with "
            "--draft-head and the folder of this head"
        )

    def test_another_engine_keeps_none(self) -> None:
        found = reason_against(worker("draft", 2, OURS), [worker("target", 0, engine="vllm")])
        assert found is not None
        assert "a target on vllm keeps none; use a draft model there" in found


class TestUnpaired:
    def test_pairs_are_told_by_model_and_heads(self) -> None:
        drafts = [worker("draft", 10), worker("draft", 11, OURS), worker("draft", 12, OURS), worker("draft", 13, OTHER)]
        targets = [worker("target", 0, OURS), worker("target", 1), worker("target", 2), worker("target", 3, OTHER)]
        found = unpaired(drafts, targets, admit)
        assert [(each.draft_head, each.target_head, each.num_pairs) for each in found] == [
            (OURS, "", 4),
            (OURS, OTHER, 2),
            (OTHER, "", 2),
            (OTHER, OURS, 1),
        ]
        assert str(found[0]) == (
            "draft worker draft-7011 (and 1 more) with the draft head aaaaaaaaaaaaaaaa is not paired with target "
            "worker target-7001 (and 1 more) of demo, which keeps features for no head: start the target with "
            "--draft-head and the folder of this head"
        )

    def test_models_that_take_no_hints_of_a_worker_anyway_are_left_out(self) -> None:
        drafts = [worker("draft", 11, OURS)]
        targets = [worker("target", 0, model_name="large"), worker("target", 1, model_name="small")]
        (found,) = unpaired(drafts, targets, lambda model, _: model == "large")
        assert (found.model, found.target_ids) == ("large", ("target-7000",))


def give_heads(cluster: Cluster, target_heads: tuple[str, ...], draft_head: str = OURS) -> None:
    before = cluster.snapshots[0]
    targets = (replace(each, head_fingerprint=head) for each, head in zip(before.targets, target_heads, strict=True))
    drafts = (replace(each, head_fingerprint=draft_head) for each in before.drafts)
    cluster.snapshots[0] = Snapshot(tuple(targets), tuple(drafts))


async def test_a_request_gets_hints_of_a_head_that_its_target_keeps_features_for(clusters: ClusterFactory) -> None:
    target, draft = clusters.target(), FakeDraft()
    target.may_step = once_attached(draft)
    async with clusters.open([target], [draft]) as cluster:
        give_heads(cluster, (OURS,))
        assert text_of(await cluster.complete()) == expected(clusters, 12)
        health = (await cluster.client.get("/health")).json()
    assert [request.head_fingerprint for request in draft.requests] == [OURS]
    assert (health["excluded_workers"], health["unpaired_workers"], health["num_draft_workers"]) == ([], [], 1)


@pytest.mark.parametrize("kept", ["", OTHER])
async def test_a_request_goes_without_where_no_target_does(clusters: ClusterFactory, kept: str) -> None:
    target, draft = clusters.target(), FakeDraft()
    async with clusters.open([target], [draft]) as cluster:
        give_heads(cluster, (kept,))
        assert text_of(await cluster.complete()) == expected(clusters, 12)
        health = (await cluster.client.get("/health")).json()
        (model,) = (await cluster.client.get("/v1/models")).json()["data"]
    assert draft.requests == []
    (excluded,) = health["excluded_workers"]
    assert (excluded["worker_id"], excluded["pool"]) == (cluster.snapshots[0].drafts[0].worker_id, "draft")
    assert "for which no target keeps features" in excluded["reason"]
    assert (health["num_draft_workers"], model["num_draft_workers"]) == (0, 0)


async def test_pairs_that_are_not_made_are_logged_once_shown_and_counted(
    clusters: ClusterFactory, caplog: pytest.LogCaptureFixture
) -> None:
    targets, draft = [clusters.target(), clusters.target()], FakeDraft()
    async with clusters.open(targets, [draft]) as cluster:
        give_heads(cluster, (OURS, ""))
        housekeeping = cluster.service._housekeeping()
        with caplog.at_level(logging.WARNING):
            await housekeeping._once()
            await housekeeping._once()
        (unpaired,) = (await cluster.client.get("/health")).json()["unpaired_workers"]
        metrics = (await cluster.client.get("/metrics")).text
        assert 'outrider_draft_head_unpaired_workers{engine="coordinator",model_name="demo"} 1.0' in metrics
        give_heads(cluster, (OURS, OURS))
        await housekeeping._once()
        metrics = (await cluster.client.get("/metrics")).text
        assert 'outrider_draft_head_unpaired_workers{engine="coordinator",model_name="demo"} 0.0' in metrics
        assert (await cluster.client.get("/health")).json()["unpaired_workers"] == []
    assert [record.message for record in caplog.records if "is not paired with" in record.message] == [
        unpaired["reason"]
    ]
    assert (unpaired["draft_head"], unpaired["target_head"]) == (OURS, "")
