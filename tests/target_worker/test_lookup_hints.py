"""Hints found in texts, as the scheduler uses them: with and without a draft worker, never at the text's expense."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.hints.hint_tree import ROOT_ID, Hint, HintTree
from outrider.sampling_params import SamplingParams, SpeculationSettings
from target_worker.hints.choices import CERTAIN_MATCH
from target_worker.hints.hint_path import HintSources, choose_path, is_local
from target_worker.hints.lookup import LookupHints
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Action,
    HintsArrived,
    SessionEnded,
    StartSession,
    Step,
    StepResult,
    SubscribeDraft,
    TokensCommitted,
    WaitForHints,
)
from target_worker.scheduling.scheduler import Scheduler
from tests.engine.one_by_one import verify_choices

VOCAB_SIZE = 50


def next_token(text: Sequence[int]) -> int:
    """A target that repeats itself with a period of 12, with a slip now and then."""
    if len(text) % 17 == 0:
        return (text[-1] + len(text)) % VOCAB_SIZE
    return text[-12] if len(text) >= 12 else (7 * len(text)) % VOCAB_SIZE


class World:
    """One scheduler and a target that answers from `next_token`; each step takes 10 ms."""

    def __init__(self, **limits: int) -> None:
        values = {"max_model_len": 400, "may_pause": False, "max_lookup_tokens": 65536, **limits}
        self.scheduler = Scheduler(SchedulerLimits(**values), BlockAllocator(400, 16), VOCAB_SIZE)  # type: ignore[arg-type]
        self.now = 0.0
        self.texts: dict[str, list[int]] = {}
        self.ended: dict[str, SessionEnded] = {}
        self.num_steps = self.num_waits = 0

    def start(
        self,
        name: str,
        prompt: list[int],
        *,
        speculation: SpeculationSettings | None = None,
        salt: str = "",
    ) -> None:
        self.texts[name] = list(prompt)
        params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
        settings = speculation or SpeculationSettings(enabled=True)
        event = StartSession(name, list(prompt), len(prompt), params, settings, 1, cache_salt=salt)
        self.scheduler.handle(event, self.now)

    def turn(self) -> bool:
        decision = self.scheduler.next_step(self.now)
        if decision is None:
            return False
        if isinstance(decision, WaitForHints):
            self.num_waits += 1
            self.now = decision.until
            return True
        assert isinstance(decision, Step)
        verdicts = []
        for item in decision.items:
            rows, text = [], self.texts[item.session_id]
            for row in range(item.num_decided):
                rows.append(next_token([*text, *(hint.token_id for hint in item.hints[:row])]))
            verdicts.append(verify_choices(rows, item.hints) if item.num_decided else None)
        self.now += 0.01
        self.num_steps += 1
        for action in self.finish_step(decision, StepResult(verdicts, 10.0)):
            if isinstance(action, TokensCommitted):
                self.texts[action.session_id] += action.token_ids
            elif isinstance(action, SessionEnded):
                self.ended[action.session_id] = action
        return True

    def finish_step(self, step: Step, result: StepResult) -> list[Action]:
        return self.scheduler.finish_step(step, result, self.now)

    def run(self) -> None:
        while self.turn():
            pass


def expected(prompt: list[int]) -> list[int]:
    text = list(prompt)
    for _ in range(120):
        text.append(next_token(text))
    return text


PROMPT = [3, 1, 4, 1, 5]


def test_a_repetitive_text_takes_fewer_steps_and_is_the_same() -> None:
    plain, world = World(has_lookup=False), World()
    for one in (plain, world):
        one.start("a", PROMPT)
        one.run()
        assert one.texts["a"] == expected(PROMPT)
    assert plain.num_steps == 120
    assert world.num_steps < 60
    stats = world.ended["a"].stats
    assert stats.num_lookup_tokens == 120 - world.num_steps
    assert stats.num_draft_tokens == stats.num_accepted_draft_tokens == 0, "no draft worker had a part in it"


def test_a_later_session_finds_what_an_earlier_one_said() -> None:
    world = World()
    world.start("a", PROMPT)
    world.run()
    first = world.num_steps
    world.start("b", PROMPT)
    world.run()
    assert world.texts["b"] == expected(PROMPT)
    assert world.num_steps - first < first


def test_nobody_is_faster_for_what_a_session_of_another_salt_said() -> None:
    world = World()
    world.start("a", PROMPT, salt="search")
    world.run()
    num_steps = [world.num_steps]
    for name, salt in (("b", "ads"), ("c", ""), ("d", "search")):
        world.start(name, PROMPT, salt=salt)
        world.run()
        assert world.texts[name] == expected(PROMPT)
        num_steps.append(world.num_steps - sum(num_steps))
    assert num_steps[0] == num_steps[1] == num_steps[2] > num_steps[3]


def test_a_request_that_wants_plain_decoding_gets_it() -> None:
    world = World()
    world.start("a", PROMPT, speculation=SpeculationSettings(enabled=False, is_plain=True))
    world.run()
    assert world.num_steps == 120
    assert world.ended["a"].stats.num_lookup_tokens == 0


def test_lookup_goes_on_while_the_draft_worker_is_not_listened_to() -> None:
    world = World()
    world.start("a", PROMPT, speculation=SpeculationSettings(enabled=False))
    world.run()
    assert world.num_steps < 60


def test_hints_of_a_draft_worker_are_counted_apart() -> None:
    world = World(hint_wait_ms_max=0)
    world.start("a", PROMPT)
    world.scheduler.handle(SubscribeDraft(1, "a", len(PROMPT)), world.now)
    text = expected(PROMPT)
    hints = [Hint(i + 1, i, token_id) for i, token_id in enumerate(text[len(PROMPT) : len(PROMPT) + 4])]
    world.scheduler.handle(HintsArrived("a", 1, len(PROMPT), hints, world.now), world.now)
    world.run()
    stats = world.ended["a"].stats
    assert world.texts["a"] == text
    assert 0 < stats.num_accepted_draft_tokens <= 4
    assert stats.num_lookup_tokens > 4


@pytest.mark.parametrize("limits", [{"has_lookup": False}, {"max_lookup_tokens": 0}, {"max_lookup_tokens": 65536}])
def test_nobody_is_waited_for_after_a_long_match(limits: dict[str, int]) -> None:
    world = World(**limits, wait_for_num_hints=2)
    world.start("a", [*range(20, 32), *range(20, 32)])
    world.scheduler.handle(SubscribeDraft(1, "a", 24), world.now)
    assert world.turn(), "the prompt"
    assert isinstance(world.scheduler.next_step(world.now), Step if limits.get("has_lookup", True) else WaitForHints)


def local(text: list[int]) -> LookupHints:
    hints = LookupHints()
    hints.read(text)
    return hints


def sources(hints: list[Hint], text: list[int], acceptance: float) -> HintSources:
    tree = HintTree()
    tree.add(text, 1, len(text), hints)
    return HintSources(tree, [acceptance] * 9, [local(text)], None)


def chain(token_ids: list[int]) -> list[Hint]:
    return [Hint(i + 1, i or ROOT_ID, token_id) for i, token_id in enumerate(token_ids)]


TEXT = [*range(20, 40), 1, 2, *range(20, 20 + CERTAIN_MATCH + 2)]  # the last ten were said before


class TestPaths:
    def test_lookup_goes_on_where_the_draft_ends(self) -> None:
        text = [*range(10), 30, 31, 0, 1]
        path = choose_path(sources(chain([2, 3]), text, 0.8), text, frozenset(), 6)
        assert [hint.token_id for hint in path.hints] == [2, 3, 4, 5, 6, 7, 8]
        assert [is_local(hint) for hint in path.hints] == [False] * 2 + [True] * 5
        gains = path.gains()
        assert gains[:2] == pytest.approx([0.8, 0.64])
        assert gains == sorted(gains, reverse=True)

    def test_a_long_match_takes_the_place_of_a_doubtful_draft(self) -> None:
        path = choose_path(sources(chain([5, 5]), TEXT, 0.3), TEXT, frozenset(), 4)
        assert [hint.token_id for hint in path.hints] == [30, 31, 32, 33, 34]
        assert all(map(is_local, path.hints))

    @pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.99])
    def test_which_source_is_taken_does_not_depend_on_what_the_draft_says(self, acceptance: float) -> None:
        """I4: otherwise likely tokens would be verified more often than others."""
        rng, taken = random.Random(0), set()
        for _ in range(200):
            said = [rng.randrange(VOCAB_SIZE) for _ in range(3)]
            path = choose_path(sources(chain(said), TEXT, acceptance), TEXT, frozenset(), 4)
            taken.add(is_local(path.hints[0]))
        assert len(taken) == 1

    def test_what_became_of_a_tail_counts_only_if_all_before_it_held(self) -> None:
        text = [*range(10), 30, 31, 0, 1]
        path = choose_path(sources(chain([2, 3]), text, 0.8), text, frozenset(), 6)
        assert path.tried_locally(num_verified=7, num_matched=1) is None
        assert path.tried_locally(num_verified=7, num_matched=2) == (5, 0)
        assert path.tried_locally(num_verified=7, num_matched=6) == (5, 4)
        assert path.tried_locally(num_verified=2, num_matched=2) is None
