"""A memory worker's scheduler: commits in, hints out, through the events of any draft worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from draft_worker.memory import scheduler as memory_scheduler
from draft_worker.memory.options import MemoryLimits
from draft_worker.memory.scheduler import MAX_READ, MemoryScheduler
from draft_worker.messages import (
    Action,
    AttachmentAccepted,
    AttachmentEnded,
    AttachmentRefused,
    AttachSession,
    CommitReceived,
    DetachSession,
    LinkOpened,
    SendHints,
    Subscribe,
    Unsubscribe,
)
from outrider.errors import InvalidRequest, Overloaded
from outrider.sampling_params import SamplingParams

PROMPT = [1, 2, 3]
OUTPUT = list(range(10, 40))


def scheduler(**limits: Any) -> MemoryScheduler:
    return MemoryScheduler(MemoryLimits(**limits))


def attach(made: MemoryScheduler, name: str, token_ids: Sequence[int] = PROMPT, **fields: Any) -> list[Action]:
    sampling = SamplingParams(temperature=0.0, max_tokens=1000)
    told: dict[str, Any] = {"num_prompt_tokens": len(PROMPT), **fields}
    return made.handle(AttachSession(name, 1, "t:1", list(token_ids), sampling, 0, **told))


def commit(made: MemoryScheduler, name: str, from_len: int, *token_ids: int, **fields: Any) -> list[Action]:
    told: dict[str, Any] = {"accepts_hints": True, "is_finished": False, **fields}
    return made.handle(CommitReceived(name, from_len, list(token_ids), **told))


def tokens(actions: list[Action]) -> list[int]:
    """The tokens of the hints that are sent."""
    return [hint.token_id for action in actions if isinstance(action, SendHints) for hint in action.hints]


def test_what_a_session_generated_is_hinted_at_in_the_next_from_its_first_token_on() -> None:
    made = scheduler()
    assert attach(made, "a")[:2] == [AttachmentAccepted("a"), Subscribe("t:1", "a", 1, 3, is_memory=True)]
    commit(made, "a", 3, *OUTPUT)
    assert commit(made, "a", 33, is_finished=True) == [AttachmentEnded("a", True)]
    assert tokens(attach(made, "b")) == OUTPUT[: len(tokens(attach(made, "c")))]
    assert made.counts.num_hits


def test_sessions_that_run_at_the_same_time_see_each_others_tokens() -> None:
    made = scheduler()
    attach(made, "a")
    attach(made, "b")
    assert not tokens(commit(made, "a", 3, 10, 11, 12, 13))
    assert tokens(commit(made, "b", 3, 10)) == [11, 12, 13]


@pytest.mark.parametrize("field", ["owner", "cache_salt"])
def test_tenants_and_salts_are_kept_apart(field: str) -> None:
    made, told = scheduler(), {field: "x"}
    attach(made, "a", PROMPT, **told)
    commit(made, "a", 3, *OUTPUT)
    assert not tokens(attach(made, "b"))
    assert tokens(attach(made, "c", PROMPT, **told))


def test_hints_that_are_not_used_up_are_not_sent_again() -> None:
    made = scheduler(max_lookahead=8)
    attach(made, "a")
    commit(made, "a", 3, *OUTPUT)
    assert len(tokens(attach(made, "b"))) > 4
    assert not commit(made, "b", 3, OUTPUT[0])
    assert tokens(commit(made, "b", 4, *OUTPUT[1:6]))[:1] == OUTPUT[6:7]


def test_a_session_that_leaves_its_tree_gets_a_new_one_below_a_newer_root() -> None:
    made = scheduler()
    attach(made, "a")
    commit(made, "a", 3, *OUTPUT)
    attach(made, "b")
    assert not tokens(commit(made, "b", 3, 99))
    (sent,) = commit(made, "b", 4, *OUTPUT[:5])
    assert isinstance(sent, SendHints)
    assert (sent.base_len, sent.hints[0].token_id) == (9, OUTPUT[5])
    assert sent.match_len == 4, "five tokens agree, which count as four"


def test_a_paused_session_is_remembered_and_gets_no_hints() -> None:
    made = scheduler()
    attach(made, "a")
    commit(made, "a", 3, *OUTPUT)
    attach(made, "b")
    assert not commit(made, "b", 3, 50, accepts_hints=False)
    assert commit(made, "b", 4, 51, 52, 53, 54, is_finished=True, accepts_hints=False) == [AttachmentEnded("b", True)]
    attach(made, "c")
    assert tokens(commit(made, "c", 3, 50, 51, 52))[:2] == [53, 54]


def test_a_target_that_accepts_hints_again_gets_the_tree_again() -> None:
    made = scheduler()
    attach(made, "a")
    commit(made, "a", 3, *OUTPUT)
    attach(made, "b")
    commit(made, "b", 3, accepts_hints=False)
    assert tokens(commit(made, "b", 3))[:1] == OUTPUT[:1]


def test_a_reopened_stream_gets_subscriptions_and_trees_again() -> None:
    made = scheduler()
    attach(made, "a")
    commit(made, "a", 3, *OUTPUT)
    attach(made, "b")
    actions = made.handle(LinkOpened("t:1"))
    assert [action.session_id for action in actions if isinstance(action, Subscribe)] == ["a", "b"]
    assert tokens(actions)[:1] == OUTPUT[:1]
    assert made.handle(LinkOpened("t:2")) == []


def test_a_missed_commit_is_asked_for() -> None:
    made = scheduler()
    attach(made, "a")
    assert commit(made, "a", 5, 1, 2) == [Subscribe("t:1", "a", 1, 3, is_memory=True)]
    commit(made, "a", 3, 10, 11, 1, 2)
    assert not commit(made, "a", 5, 1, 2), "told twice, remembered once"
    assert made.memory.num_tokens == 4 + 32


def test_a_session_attached_again_is_not_remembered_twice() -> None:
    made = scheduler()
    attach(made, "a")
    commit(made, "a", 3, *OUTPUT[:10])
    assert made.handle(DetachSession("a", 1)) == [Unsubscribe("t:1", "a")]
    attach(made, "a", PROMPT + OUTPUT[:12])
    assert made.memory.num_tokens == 12 + 32


def test_many_tokens_at_once_are_remembered_bit_by_bit() -> None:
    made = scheduler()
    attach(made, "a")
    text = [i % 5000 + 100 for i in range(2 * MAX_READ + 10)]
    commit(made, "a", 3, *text)
    assert made.memory.num_tokens == 0
    for left in (True, True, False):
        made.read_backlog()
        assert made.has_backlog is left
    attach(made, "b")
    assert tokens(commit(made, "b", 3, *text[:4]))[:3] == text[4:7]


def test_a_backlog_beyond_the_memory_is_skipped_not_kept() -> None:
    made = scheduler(max_memory_tokens=4096, max_model_len=100_000)
    for name in "abc":
        attach(made, name)
        commit(made, name, 3, *range(3000))
    assert made._num_unread == sum(len(unread) for _, unread in made._backlog.values()) <= 4096
    skipped = made.progress("a")
    assert skipped is not None
    assert (skipped.committed_len, skipped.num_unread) == (3003, 0)
    while made.has_backlog:
        made.read_backlog()
    assert made.memory.num_tokens <= 4096


def test_a_tenants_backlog_costs_no_other_its_own() -> None:
    made = scheduler(max_memory_tokens=4096, max_model_len=100_000)
    attach(made, "quiet", owner="quiet")
    commit(made, "quiet", 3, *range(2048 + 10))
    for number in range(8):
        attach(made, f"loud-{number}", owner="loud", cache_salt=f"{number}")
        commit(made, f"loud-{number}", 3, *range(3000))
    assert made._num_unread <= 4096
    quiet = made.progress("quiet")
    assert quiet is not None
    assert quiet.num_unread == 2048 + 10, "it waits to be remembered"


def test_sequences_of_a_tenant_that_have_left_push_out_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_scheduler, "SEQUENCES_KEPT", 4)
    made = scheduler()
    for number, owner in enumerate(["quiet", *["loud"] * 10]):
        attach(made, f"{number}", owner=owner, cache_salt=f"{number}")
        commit(made, f"{number}", 3, *OUTPUT[:10])
        made.handle(DetachSession(f"{number}", 1))
    assert len(made._left) == made._num_left.total() == 4
    before = made.memory.num_tokens
    attach(made, "0", PROMPT + OUTPUT[:12], owner="quiet", cache_salt="0")
    assert made.memory.num_tokens == before + 2, "it goes on where it was left"


def test_what_cannot_be_followed_is_refused_or_let_go_by_name() -> None:
    made = scheduler(max_num_seqs=1, max_model_len=10)
    (refused,) = attach(made, "long", list(range(10)))
    assert isinstance(refused, AttachmentRefused)
    assert isinstance(refused.error, InvalidRequest)
    assert "--max-model-len 10" in refused.error.message
    (refused,) = attach(made, "odd", [1 << 31])
    assert isinstance(refused, AttachmentRefused)
    attach(made, "a")
    (refused,) = attach(made, "b")
    assert isinstance(refused, AttachmentRefused)
    assert isinstance(refused.error, Overloaded)
    assert commit(made, "a", 3, *range(7)) == [Unsubscribe("t:1", "a"), AttachmentEnded("a", False)]
    attach(made, "b")
    assert commit(made, "b", 3, 1 << 31) == [Unsubscribe("t:1", "b"), AttachmentEnded("b", False)]


def test_a_session_in_the_background_gives_its_slot_to_another() -> None:
    made = scheduler(max_num_seqs=1)
    attach(made, "a", is_background=True)
    assert made.num_background == 1
    commit(made, "a", 3, *OUTPUT)
    let_go, refused, accepted, *_ = attach(made, "b")
    assert (let_go, accepted) == (Unsubscribe("t:1", "a"), AttachmentAccepted("b"))
    assert isinstance(refused, AttachmentRefused)
    assert isinstance(refused.error, Overloaded)
    (refused,) = attach(made, "c", is_background=True)
    assert isinstance(refused, AttachmentRefused)
    assert tokens(commit(made, "b", 3, *OUTPUT[:4]))[:1] == OUTPUT[4:5], "what it generated stays"


def test_hints_stop_where_the_output_must_end() -> None:
    made = scheduler()
    attach(made, "a")
    commit(made, "a", 3, *OUTPUT)
    short = SamplingParams(temperature=0.0, max_tokens=2)
    assert tokens(made.handle(AttachSession("b", 1, "t:1", PROMPT, short, 0))) == OUTPUT[:2]
