"""Hints of a memory worker at a target: beside a draft worker's, and not mixed with what is known of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outrider.hints.confidence import Calibration
from outrider.hints.hint_tree import ROOT_ID, DraftDistribution, Hint, HintTree
from outrider.sampling_params import SpeculationSettings
from target_worker.hints.choices import CERTAIN_MATCH
from target_worker.hints.hint_path import HintPath, HintSources, choose_path
from target_worker.hints.local_source import HintKind
from target_worker.hints.memory import MemoryHints
from target_worker.messages import (
    Action,
    ChangeSpeculation,
    CloseStream,
    CommitPublished,
    HintsArrived,
    Step,
    StepResult,
    SubscribeDraft,
    UnsubscribeDraft,
    WaitForHints,
)
from target_worker.scheduling.session import Session
from tests.target_worker.test_lookup_hints import PROMPT, World, chain, expected
from tests.target_worker.test_prediction import FixedSource

TEXT = [1, 2, 3]
DRAFT, MEMORY = 1, 2  # streams


def arrived(
    hints: Sequence[Hint], match_len: int = 3, base_len: int = len(TEXT), *, attachment: int = 1, name: str = "a"
) -> HintsArrived:
    return HintsArrived(name, attachment, base_len, list(hints), 0.0, 7, is_memory=True, match_len=match_len)


def memory_of(*messages: HintsArrived, calibration: Calibration | None = None) -> MemoryHints:
    memory = MemoryHints(len(TEXT), calibration)
    for message in messages:
        memory.add(TEXT, message)
    return memory


def proposed(memory: MemoryHints, committed: Sequence[int] = TEXT, suffix: Sequence[int] = ()) -> tuple[list[int], int]:
    """Tokens, and the match before them."""
    proposal = memory.propose(committed, suffix, 10)
    return proposal.token_ids, proposal.match_len


class TestProposals:
    def test_the_primary_path_below_the_committed_tokens_is_proposed(self) -> None:
        memory = memory_of(arrived(chain([4, 5, 6])))
        assert proposed(memory) == ([4, 5, 6], 3)
        assert memory.propose(TEXT, [], 2).token_ids == [4, 5]
        assert memory.propose(TEXT, [], 0).token_ids == []

    def test_a_match_grows_with_every_token_that_agrees(self) -> None:
        memory = memory_of(arrived(chain([4, 5, 6]), match_len=12))
        assert proposed(memory, [*TEXT, 4]) == ([5, 6], 13)
        assert proposed(memory, [*TEXT, 4], [5]) == ([6], 14)

    def test_a_draft_that_says_something_else_is_not_continued(self) -> None:
        memory = memory_of(arrived(chain([4, 5, 6])))
        assert proposed(memory, suffix=[4, 9]) == ([], 0)
        assert proposed(memory, suffix=[4]) == ([5, 6], 4)

    def test_an_alternative_that_was_generated_is_continued(self) -> None:
        memory = memory_of(arrived([*chain([4, 5]), Hint(3, ROOT_ID, 7), Hint(4, 3, 8)]))
        assert proposed(memory, suffix=[7]) == ([8], 4)
        assert proposed(memory, [*TEXT, 7]) == ([8], 4)

    def test_nothing_is_proposed_once_the_output_has_left_the_tree(self) -> None:
        memory = memory_of(arrived(chain([4, 5, 6])))
        assert proposed(memory, [*TEXT, 9]) == ([], 0)
        memory.add([*TEXT, 9], arrived(chain([5]), base_len=4, match_len=6))
        assert proposed(memory, [*TEXT, 9]) == ([5], 6)

    def test_hints_that_come_late_continue_where_the_output_is(self) -> None:
        memory = MemoryHints(len(TEXT), None)
        memory.add([*TEXT, 4], arrived(chain([4, 5, 6]), match_len=8))
        assert proposed(memory, [*TEXT, 4]) == ([5, 6], 9)

    def test_an_older_tree_does_not_change_the_match_of_a_newer_one(self) -> None:
        memory = memory_of(arrived(chain([4, 5]), 12, attachment=2), arrived(chain([9]), 24, attachment=1))
        assert proposed(memory) == ([4, 5], 12)
        memory.add(TEXT, arrived([Hint(3, 2, 6)], match_len=24, attachment=2))
        assert proposed(memory) == ([4, 5, 6], 12), "more of the same tree"

    def test_a_distribution_is_not_taken_over(self) -> None:
        """A memory's hint is certain for verification, whatever came with it."""
        memory = memory_of(arrived([chain([4])[0]._replace(distribution=DraftDistribution((4, 5), (1, 1)))]))
        path = choose_path(HintSources(None, (), [memory], None), TEXT, frozenset(), 4)
        assert path.hints == [Hint(HintKind.MEMORY, HintKind.MEMORY, 4)]


class TestChances:
    def chances(self, hints: Sequence[Hint], calibration: Calibration | None, match_len: int = 6) -> list[float]:
        memory = memory_of(arrived(hints, match_len), calibration=calibration)
        return memory.chances(memory.propose(TEXT, [], 10))

    def test_they_rise_with_the_match(self) -> None:
        found = self.chances(chain([4, 5, 6, 7, 8, 9]), None)
        assert found == sorted(found)
        assert found[0] < found[-1]

    def test_under_rejection_sampling_neither_tokens_nor_confidence_matter(self) -> None:
        """I4: match lengths and earlier outcomes alone."""
        sure = [hint._replace(confidence=127) for hint in chain([4, 5, 6])]
        doubtful = [hint._replace(confidence=1) for hint in chain([7, 8, 9])]
        assert self.chances(sure, None) == self.chances(doubtful, None) == self.chances(chain([1, 1, 1]), None)
        memory = memory_of(arrived(sure))
        assert memory.propose(TEXT, [], 10).confidences == []

    def test_otherwise_the_memorys_confidence_counts(self) -> None:
        sure, doubtful = (
            self.chances([hint._replace(confidence=level) for hint in chain([4, 5])], Calibration())
            for level in (120, 10)
        )
        assert all(high > low for high, low in zip(sure, doubtful, strict=True))
        assert self.chances(chain([4, 5]), Calibration()) == self.chances(chain([4, 5]), None), "unknown"

    def test_outcomes_teach_the_match_and_the_calibration(self) -> None:
        calibration = Calibration()
        memory = memory_of(arrived([hint._replace(confidence=100) for hint in chain([4, 5])]), calibration=calibration)
        proposal = memory.propose(TEXT, [], 10)
        before, bias = memory.chances(proposal), calibration.bias
        memory.observe(proposal, num_matched=0, num_verified=2)
        assert memory.chances(proposal)[0] < before[0]
        assert calibration.bias < bias
        assert memory.take_outcome() == (2, 0)
        assert memory.take_outcome() == (0, 0)


class TestPaths:
    def path(
        self,
        drafted: Sequence[int],
        memory: MemoryHints,
        rate: float = 0.7,
        *others: FixedSource,
        calibration: Calibration | None = None,
    ) -> HintPath:
        """calibration: None under rejection sampling."""
        tree = HintTree()
        tree.add(TEXT, 1, len(TEXT), chain([*drafted]))
        sources = HintSources(tree, [rate] * 9, [*others, memory], None, calibration)
        return choose_path(sources, TEXT, frozenset(), 6)

    def test_a_memory_continues_a_drafts_path(self) -> None:
        path = self.path([4, 5], memory_of(arrived(chain([4, 5, 6, 7]))))
        assert [hint.token_id for hint in path.hints] == [4, 5, 6, 7]
        assert [hint.node_id for hint in path.hints] == [1, 2, HintKind.MEMORY, HintKind.MEMORY]

    @pytest.mark.parametrize(("match_len", "is_taken"), [(CERTAIN_MATCH - 1, False), (24, True)])
    def test_after_a_long_match_it_replaces_a_draft_that_promises_less(self, match_len: int, is_taken: bool) -> None:
        memory = memory_of(arrived(chain([20, 21, 22, 23, 24]), match_len))
        path = self.path([4, 5, 6, 7, 8, 9, 10], memory, 0.5, calibration=Calibration())
        assert (path.hints[0].node_id == HintKind.MEMORY) is is_taken

    def test_it_does_not_replace_what_was_drawn(self) -> None:
        """When it comes, a step may have waited for, and for how long follows from the values that were drawn (I4)."""
        path = self.path([4, 5], memory_of(arrived(chain([20, 21, 22, 23, 24]), 24)), 0.1)
        assert [hint.token_id for hint in path.hints[:2]] == [4, 5]

    def test_it_does_not_keep_another_source_from_replacing_what_was_drawn(self) -> None:
        """Whether it is there may follow from the drawn values as well."""
        lookup = FixedSource(HintKind.LOOKUP, [9] * 4, 0.9, match_len=CERTAIN_MATCH)
        memory = memory_of(arrived(chain([20, 21, 22, 23, 24]), 24))
        path = self.path([4, 5], memory, 0.1, lookup)
        assert [hint.node_id for hint in path.hints] == [HintKind.LOOKUP] * 4
        assert self.path([], memory, 0.1, lookup).hints[0].node_id == HintKind.MEMORY

    def test_a_draft_that_promises_more_stays(self) -> None:
        path = self.path([4, 5, 6, 7, 8, 9, 10], memory_of(arrived(chain([20]), 24)), 0.9)
        assert [hint.token_id for hint in path.hints] == [4, 5, 6, 7, 8, 9, 10]

    @pytest.mark.parametrize(("chance", "kind"), [(0.99, HintKind.LOOKUP), (0.1, HintKind.MEMORY)])
    def test_it_competes_with_other_sources_by_expected_tokens(self, chance: float, kind: HintKind) -> None:
        lookup = FixedSource(HintKind.LOOKUP, [9] * 4, chance)
        path = self.path([], memory_of(arrived(chain([4, 5, 6, 7]))), 0.7, lookup)
        assert {hint.node_id for hint in path.hints} == {kind}


class Pair(World):
    """A target without lookup whose session `a` may have a draft and a memory worker; both know what it generates."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(has_lookup=False, hint_wait_ms_max=0, **limits)
        self.start("a", PROMPT)
        self.told: dict[int, list[CommitPublished]] = {DRAFT: [], MEMORY: []}
        self.right = expected(PROMPT)

    @property
    def session(self) -> Session:
        return self.scheduler._sessions["a"]

    def tell(self, event: Any) -> list[Action]:
        actions = self.scheduler.handle(event, self.now)
        self.hear(actions)
        return actions

    def hear(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, CommitPublished):
                self.told[action.stream_id].append(action)

    def subscribe(self, *streams: int) -> None:
        for stream in streams:
            self.tell(SubscribeDraft(stream, "a", len(PROMPT), is_memory=stream == MEMORY))

    def hint(self, stream: int, count: int, *, is_right: bool = True, match_len: int = 4) -> None:
        """Hints at the next tokens, or at others, below a newer root."""
        base_len = len(self.texts["a"])
        tokens = self.right[base_len : base_len + count] if is_right else [49] * count
        is_memory = stream == MEMORY
        self.tell(HintsArrived("a", 1, base_len, chain(tokens), self.now, 5, is_memory, match_len if is_memory else 0))

    def finish_step(self, step: Step, result: StepResult) -> list[Action]:
        actions = super().finish_step(step, result)
        self.hear(actions)
        return actions

    def finish(self) -> Any:
        self.run()
        assert self.texts["a"] == self.right
        return self.ended["a"].stats


class TestSessions:
    def test_both_at_once_are_counted_apart(self) -> None:
        pair = Pair()
        pair.subscribe(DRAFT, MEMORY)
        pair.turn()
        pair.hint(DRAFT, 2)
        pair.hint(MEMORY, 5)
        pair.turn()
        assert pair.texts["a"] == pair.right[: len(pair.texts["a"])]
        stats = pair.finish()
        assert stats.num_accepted_draft_tokens == 2
        assert stats.num_memory_tokens >= 2
        assert stats.num_lookup_tokens == 0
        assert stats.num_hint_bytes == 10

    def test_each_hears_what_became_of_its_own_hints(self) -> None:
        pair = Pair()
        pair.subscribe(DRAFT, MEMORY)
        pair.turn()
        pair.hint(DRAFT, 2)
        pair.hint(MEMORY, 4)
        pair.turn()
        draft, memory = pair.told[DRAFT][-1], pair.told[MEMORY][-1]
        assert (draft.from_len, draft.token_ids) == (memory.from_len, memory.token_ids)
        assert (draft.num_verified, draft.num_matched) == (2, 2)
        assert (memory.num_verified, memory.num_matched) == (2, 2)
        pair.turn()
        assert (pair.told[MEMORY][-1].num_verified, pair.told[MEMORY][-1].num_matched) == (0, 0)

    def test_wrong_hints_of_a_memory_say_nothing_about_the_draft(self) -> None:
        pair = Pair()
        pair.subscribe(DRAFT, MEMORY)
        before = pair.session.acceptance.rate
        for _ in range(10):
            pair.hint(MEMORY, 3, is_right=False, match_len=24)
            pair.turn()
        assert pair.session.acceptance.rate == before
        assert pair.session.intake.worth.weight == 0.0
        assert pair.session.timing.has_received is False
        assert pair.finish().num_draft_tokens == 0

    def test_a_memory_worker_that_comes_resets_nothing_of_the_draft(self) -> None:
        pair = Pair()
        pair.subscribe(DRAFT)
        pair.turn()
        for _ in range(3):
            pair.hint(DRAFT, 2)
            pair.turn()
        acceptance = pair.session.acceptance
        pair.subscribe(MEMORY)
        assert pair.session.acceptance is acceptance
        pair.tell(UnsubscribeDraft(DRAFT, "a"))
        pair.subscribe(DRAFT)
        assert pair.session.acceptance is not acceptance, "another draft worker"
        pair.finish()

    def test_a_memory_is_not_waited_for(self) -> None:
        for stream, is_waited_for in ((DRAFT, True), (MEMORY, False)):
            world = World(has_lookup=False, wait_for_num_hints=2)
            world.start("a", PROMPT)
            world.scheduler.handle(SubscribeDraft(stream, "a", 5, is_memory=stream == MEMORY), world.now)
            assert world.turn(), "the prompt"
            assert isinstance(world.scheduler.next_step(world.now), WaitForHints if is_waited_for else Step)

    def test_no_draft_is_waited_for_after_a_long_match(self) -> None:
        for match_len, wanted in ((4, WaitForHints), (24, Step)):
            world = World(has_lookup=False, wait_for_num_hints=2)
            world.start("a", PROMPT)
            for stream in (DRAFT, MEMORY):
                world.scheduler.handle(SubscribeDraft(stream, "a", 5, is_memory=stream == MEMORY), world.now)
            assert world.turn(), "the prompt"
            base_len = len(world.texts["a"])
            world.scheduler.handle(arrived(chain([9, 9]), match_len, base_len), world.now)
            assert isinstance(world.scheduler.next_step(world.now), wanted)

    def test_a_memory_goes_on_while_the_draft_is_paused(self) -> None:
        pair = Pair()
        pair.subscribe(DRAFT, MEMORY)
        pair.turn()
        pair.tell(ChangeSpeculation("a", SpeculationSettings(enabled=False)))
        num_told = len(pair.told[DRAFT])
        pair.hint(DRAFT, 2)
        pair.hint(MEMORY, 4)
        pair.turn()
        assert len(pair.told[DRAFT]) == num_told
        assert pair.told[MEMORY][-1].accepts_hints
        stats = pair.finish()
        assert (stats.num_draft_tokens, stats.num_stale_hints) == (0, 2)
        assert stats.num_memory_tokens >= 3
        assert sum(len(each.token_ids) for each in pair.told[MEMORY]) == 120, "it was told all of them"

    def test_a_worker_that_may_not_accept_hints_yet_accepts_a_memorys(self) -> None:
        """The first steps of a worker measure plain decoding, without drafts."""
        pair = Pair(may_pause=True)
        pair.subscribe(DRAFT, MEMORY)
        assert not pair.told[DRAFT][-1].accepts_hints
        assert pair.told[MEMORY][-1].accepts_hints
        pair.turn()
        pair.hint(MEMORY, 4)
        pair.turn()
        assert pair.finish().num_memory_tokens >= 3

    @pytest.mark.parametrize("end", [CloseStream(MEMORY), UnsubscribeDraft(MEMORY, "a")])
    def test_the_loss_of_the_memory_leaves_the_draft(self, end: Any) -> None:
        pair = Pair()
        pair.subscribe(DRAFT, MEMORY)
        pair.turn()
        acceptance = pair.session.acceptance
        pair.tell(end)
        assert list(pair.session.subscribers) == [DRAFT]
        pair.hint(DRAFT, 3)
        assert pair.session.can_expect_hints()
        pair.turn()
        assert pair.session.acceptance is acceptance
        assert pair.finish().num_accepted_draft_tokens == 3

    @pytest.mark.parametrize("end", [CloseStream(DRAFT), UnsubscribeDraft(DRAFT, "a")])
    def test_the_loss_of_the_draft_leaves_the_memory(self, end: Any) -> None:
        pair = Pair()
        pair.subscribe(DRAFT, MEMORY)
        pair.turn()
        pair.tell(end)
        assert not pair.session.can_expect_hints()
        pair.hint(MEMORY, 3)
        pair.turn()
        assert pair.told[MEMORY][-1].num_matched == 3
        assert pair.finish().num_memory_tokens >= 2

    def test_what_comes_before_the_session_is_kept_for_it(self) -> None:
        world = World(has_lookup=False)
        right = expected(PROMPT)
        world.scheduler.handle(SubscribeDraft(MEMORY, "a", len(PROMPT), is_memory=True), 0.0)
        hints = chain(right[len(PROMPT) : len(PROMPT) + 4])
        world.scheduler.handle(HintsArrived("a", 1, len(PROMPT), hints, 0.0, 5, is_memory=True, match_len=8), 0.0)
        world.start("a", PROMPT)
        world.run()
        assert world.texts["a"] == right
        assert world.ended["a"].stats.num_memory_tokens >= 3

    def test_plain_decoding_takes_no_hints_of_a_memory(self) -> None:
        world = World(has_lookup=False)
        world.start("a", PROMPT, speculation=SpeculationSettings(enabled=False, is_plain=True))
        world.scheduler.handle(SubscribeDraft(MEMORY, "a", len(PROMPT), is_memory=True), 0.0)
        world.scheduler.handle(arrived(chain(expected(PROMPT)[5:9]), base_len=5), 0.0)
        world.run()
        assert world.num_steps == 120
        assert world.ended["a"].stats.num_memory_tokens == 0

    def test_a_memory_that_finds_nothing_costs_nothing(self) -> None:
        pair = Pair()
        pair.subscribe(MEMORY)
        pair.turn()
        assert pair.session.memory is None
        assert pair.finish().num_memory_tokens == 0
