"""Tests of canary plans: which keys get which arm, when, and which plans are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.canary.plan import (
    ANY_DRAFT,
    NUM_GROUPS,
    ArmChange,
    ArmName,
    Canary,
    CanaryPlan,
    CanaryState,
    DraftChoice,
    share_point,
)

OFF = ArmChange(speculates=False)


def plan(**changes: Any) -> CanaryPlan:
    fields: dict[str, Any] = {"canary_id": "abcd1234", "change": OFF, "share": 0.25}
    return CanaryPlan(**fields | changes)


RUNNING = Canary(plan(), CanaryState.RUNNING, begins_ms=1000, ends_ms=2000)
KEYS = [f"user {number}" for number in range(8000)]


def test_a_key_has_the_same_arm_for_any_replica_that_read_the_plan_from_redis() -> None:
    ours, theirs = plan(), CanaryPlan.model_validate_json(plan().model_dump_json())
    assert ours == theirs
    assert [ours.arm_of(key) for key in KEYS[:100]] == [theirs.arm_of(key) for key in KEYS[:100]]


@pytest.mark.parametrize("share", [0.01, 0.25, 0.9])
def test_the_canary_gets_its_share_of_the_keys(share: float) -> None:
    num = sum(plan(share=share).arm_of(key) is ArmName.CANARY for key in KEYS)
    deviation = (len(KEYS) * share * (1 - share)) ** 0.5
    assert abs(num - len(KEYS) * share) < 4 * deviation


def test_the_next_canary_is_tried_on_other_keys() -> None:
    first, second = plan(), plan(canary_id="wxyz9876")
    theirs = [key for key in KEYS if first.arm_of(key) is ArmName.CANARY]
    share_again = sum(second.arm_of(key) is ArmName.CANARY for key in theirs) / len(theirs)
    assert share_again == pytest.approx(0.25, abs=0.05)


def test_groups_of_keys_are_of_one_size_and_cut_across_the_arms() -> None:
    keys = [f"user {number}" for number in range(20 * NUM_GROUPS)]
    groups = Counter(plan().group_of(key) for key in keys)
    assert set(groups) == set(range(NUM_GROUPS))
    assert max(groups.values()) < 45  # of twenty on average
    first = [key for key in keys if plan().group_of(key) < NUM_GROUPS // 8]
    share = sum(plan().arm_of(key) is ArmName.CANARY for key in first) / len(first)
    assert share == pytest.approx(0.25, abs=0.04)


def test_audits_are_drawn_from_both_ends_of_the_canarys_share() -> None:
    audited = plan(change=ArmChange(num_speculative_tokens=2), audit_share=0.5)
    both = [key for key in KEYS if audited.arm_of(key) is ArmName.CANARY]
    assert sum(map(audited.is_audited, both)) / len(both) == pytest.approx(0.5, abs=0.06)


@given(st.text(), st.text(), st.text(), st.text())
def test_other_pairs_of_salt_and_key_lie_elsewhere(salt: str, key: str, salt2: str, key2: str) -> None:
    pairs = [(each[0].encode(errors="replace"), each[1].encode(errors="replace")) for each in
             ((salt, key), (salt2, key2))]  # fmt: skip
    if pairs[0] != pairs[1]:
        assert share_point(salt, key) != share_point(salt2, key2)


class TestTime:
    def test_requests_are_divided_from_the_beginning_to_the_end(self) -> None:
        key = next(key for key in KEYS if RUNNING.plan.arm_of(key) is ArmName.CANARY)
        seen = [RUNNING.arm_at(key, now_ms) for now_ms in (999, 1000, 1999, 2000)]
        assert seen == [None, ArmName.CANARY, ArmName.CANARY, None]
        assert [RUNNING.share_at(now_ms) for now_ms in (999, 1500, 2000)] == [0.0, 0.25, 0.0]
        assert [RUNNING.has_ended(now_ms) for now_ms in (1999, 2000)] == [False, True]

    def test_one_that_waits_divides_nothing(self) -> None:
        waiting = Canary(plan(change=ArmChange(draft_model="new")), CanaryState.WAITING, 0, 2000)
        assert waiting.arm_at("x", 1500) is None
        assert not waiting.has_ended(1999)
        assert waiting.has_ended(2000)

    def test_one_that_is_promoted_is_everybodys_without_end(self) -> None:
        promoted = replace(RUNNING, state=CanaryState.PROMOTED)
        assert {promoted.arm_at(key, 10**9) for key in KEYS[:50]} == {ArmName.CANARY}
        assert promoted.share_at(10**9) == 1.0
        assert not promoted.has_ended(10**9)

    def test_one_that_is_aborted_is_nobodys(self) -> None:
        aborted = replace(RUNNING, state=CanaryState.ABORTED)
        assert aborted.arm_at("x", 1500) is None
        assert aborted.share_at(1500) == 0.0
        assert aborted.has_ended(1500)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"change": {}}, "no other than the control"),
        ({"change": {"speculates": False, "draft_model": "x"}}, "without speculation"),
        ({"change": {"num_speculative_tokens": 33}}, "32"),
        ({"share": 0.0}, "greater than 0"),
        ({"share": 1.0}, "less than 1"),
        ({"audit_share": 0.1}, "nothing to audit"),
        ({"rule": {"requests_min": 10}}, "50"),
        ({"rule": {"alpha": float("nan")}}, "finite"),
        ({"canary_id": "a b"}, "pattern"),
        ({"mood": "good"}, "Extra inputs"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_with_the_reason(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan(**change)


def test_arms_are_named_by_what_they_change() -> None:
    assert str(OFF) == "no speculation"
    both = ArmChange(draft_model="new", num_speculative_tokens=3)
    assert str(both) == "draft model new, at most 3 speculative tokens"


def test_draft_workers_of_a_model_are_for_one_arm_or_for_all_others() -> None:
    assert [ANY_DRAFT.admits(name) for name in ("old", "new")] == [True, True]
    assert [DraftChoice("new").admits(name) for name in ("old", "new")] == [False, True]
    assert [DraftChoice("new", is_excluded=True).admits(name) for name in ("old", "new")] == [True, False]
