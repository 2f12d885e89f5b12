"""Draft workers whose context is shorter than the target's: used up to their limit, which is no fault of theirs."""

from __future__ import annotations

from dataclasses import replace

from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeDraft
from tests.coordinator.test_sequence_runner import expected, once_attached, released, text_of

SHORT = 64
"""Enough for the prompt and some of the answer."""


async def test_an_answer_that_may_exceed_the_drafts_context_has_a_draft_all_the_same(clusters: ClusterFactory) -> None:
    draft = FakeDraft(max_model_len=SHORT)
    target = clusters.target(eos_at=12, may_step=once_attached(draft))
    async with clusters.open([target], [draft]) as cluster:
        assert text_of(await cluster.complete(max_tokens=900)) == expected(clusters, 12)
        await released(cluster)
    assert target.requests[0].sampling.max_tokens == 900


async def test_a_prompt_beyond_the_drafts_context_has_none(clusters: ClusterFactory) -> None:
    draft = FakeDraft(max_model_len=SHORT)
    async with clusters.open([clusters.target()], [draft]) as cluster:
        text_of(await cluster.complete(prompt=list(range(1, SHORT + 1)), max_tokens=12))
    assert draft.requests == []


async def test_at_its_limit_one_that_can_follow_further_takes_over(clusters: ClusterFactory) -> None:
    target, short, long = clusters.target(), FakeDraft(max_model_len=SHORT), FakeDraft()
    async with clusters.open([target], [short, long]) as cluster:
        both = cluster.snapshots[0]
        cluster.snapshots[0] = replace(both, drafts=both.drafts[:1])

        def may_step(num_tokens: int) -> bool:
            if num_tokens < 50:
                return bool(short.requests)
            cluster.snapshots[0] = both  # the long one has registered
            return bool(long.requests)

        target.may_step = may_step
        short.is_at_limit = lambda: cluster.snapshots[0] is both
        assert text_of(await cluster.complete(max_tokens=100)) == expected(clusters, 100)
        await released(cluster)
    assert (len(short.requests), len(long.requests)) == (1, 1)
    assert len(long.requests[0].token_ids) > len(short.requests[0].token_ids), "it begins where the other one ended"


async def test_its_limit_is_no_fault_and_it_is_not_asked_again_for_this_sequence(clusters: ClusterFactory) -> None:
    """The sequence goes on undrafted: nothing is counted against the draft worker, and probes find nobody to ask."""
    target, draft = clusters.target(), FakeDraft(max_model_len=SHORT)
    draft.is_at_limit = lambda: len(draft.requests) == 1
    target.may_step = lambda num_tokens: num_tokens < 60 or draft.num_closed > 0
    async with clusters.open([target], [draft]) as cluster:
        assert text_of(await cluster.complete(max_tokens=600)) == expected(clusters, 600)
        await released(cluster)
        assert len(draft.requests) == 1
        metrics = cluster.service.environment.metrics.registry
        assert not metrics.get_sample_value("outrider_draft_attach_failures_total")
        target.may_step = once_attached_again = lambda _: len(draft.requests) == 2
        assert text_of(await cluster.complete()) == expected(clusters, 12)
        assert once_attached_again(0), "the next sequence has it at once: it was not passed over"
