"""Background sessions beside others: few steps, but never none, and the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.sampling_params import BACKGROUND_PRIORITY
from target_worker.hints.step_cost import StepLine
from target_worker.messages import StartSession, Step
from target_worker.scheduling import background_turns
from target_worker.scheduling.background_turns import TURN_S, TURN_STEPS, BackgroundTurns
from target_worker.scheduling.batch_slots import StepRoom
from tests.target_worker.fakes import start
from tests.target_worker.test_scheduler import LIMITS, World

PROMPT = (1, 2, 3)


def background(name: str, num_tokens: int = 20) -> StartSession:
    return replace(start(name, PROMPT, max_tokens=num_tokens), priority=BACKGROUND_PRIORITY)


def fed_in(world: World) -> set[str]:
    """The sessions of the next step, which is run."""
    decision = world.turn()
    return {item.session_id for item in decision.items} if isinstance(decision, Step) else set()


class TestSessions:
    def test_in_the_background_have_few_steps_beside_others_and_all_steps_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(background_turns, "TURN_STEPS", 8)
        world = World(replace(LIMITS, max_model_len=64), 97)
        world.tell(background("batch", 40))
        for _ in range(3):
            assert fed_in(world) == {"batch"}
        world.tell(start("chat", PROMPT, max_tokens=40))
        steps = []
        while "chat" not in world.ended:
            steps.append(fed_in(world))
        assert all("chat" in fed for fed in steps)
        num_shared = sum("batch" in fed for fed in steps)
        assert 0 < num_shared <= len(steps) / 8 + 1
        while "batch" not in world.ended:
            assert fed_in(world) == {"batch"}
        world.check()

    def test_of_equal_kind_share_every_step(self) -> None:
        for make in (background, lambda name: start(name, PROMPT)):
            world = World()
            world.tell(make("a"))
            world.tell(make("b"))
            world.turn()
            assert fed_in(world) == {"a", "b"}


class TestTurns:
    def test_come_after_some_time_even_where_steps_are_long(self) -> None:
        world = World()
        world.tell(background("batch"))
        world.tell(start("chat", PROMPT))
        world.turn()
        slots = world.scheduler._slots
        decoding = sorted(slots.running.values(), key=lambda each: each.rank)
        room, line, turns = StepRoom(decoding, [], None), StepLine(20.0, 5.0), BackgroundTurns(4)

        def names(now: float) -> list[str]:
            return [each.session_id for each in turns.limit(room, line, now).decoding]

        assert names(0.0) == ["chat"]
        assert turns.holds(slots.running["batch"])
        assert not turns.holds(slots.running["chat"])
        assert names(TURN_S - 0.1) == ["chat"]
        assert names(TURN_S) == ["chat", "batch"]
        assert not turns.holds(slots.running["batch"])
        for _ in range(TURN_STEPS - 1):
            assert names(TURN_S) == ["chat"]
        assert names(TURN_S) == ["chat", "batch"]

    def test_are_not_needed_where_a_row_is_nearly_free(self) -> None:
        world = World()
        world.tell(background("batch"))
        world.tell(start("chat", PROMPT))
        world.turn()
        decoding = sorted(world.scheduler._slots.running.values(), key=lambda each: each.rank)
        turns, room = BackgroundTurns(4), StepRoom(decoding, [], None)
        # Five tokens take 2.5 % of the step.
        assert len(turns.limit(room, StepLine(20.0, 0.1), 0.0).decoding) == 2
        assert len(turns.limit(room, StepLine(20.0, 0.2), 0.0).decoding) == 1
