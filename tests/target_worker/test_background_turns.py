"""Background sessions beside others: few steps, but never none, and the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.hints.step_cost import StepCost
from outrider.sampling_params import BACKGROUND_PRIORITY
from target_worker.messages import StartSession, Step
from target_worker.scheduling import background_turns
from target_worker.scheduling.background_turns import TURN_STEPS, BackgroundTurns
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


class TestSlots:
    def test_of_sessions_in_the_background_are_given_to_others_and_come_back(self) -> None:
        world = World(replace(LIMITS, max_model_len=64), 97)
        for number in range(LIMITS.max_num_seqs):
            world.tell(background(f"batch {number}"))
            fed_in(world)
        assert fed_in(world) == {"batch 0", "batch 1", "batch 2"}
        assert world.scheduler.wait_ms == 0
        world.tell(start("chat", PROMPT))
        assert fed_in(world) == {"chat"}
        assert world.scheduler.num_waiting == 1
        while len(world.ended) < 4:
            assert world.turn() is not None
        assert list(world.ended).index("chat") < list(world.ended).index("batch 2")
        assert world.ended["batch 2"].num_preemptions == 1
        assert world.ended["chat"].num_preemptions == 0
        world.check()

    def test_are_not_taken_from_others(self) -> None:
        world = World()
        for number in range(LIMITS.max_num_seqs):
            world.tell(start(f"chat {number}", PROMPT))
            world.turn()
        world.tell(background("batch"))
        world.tell(start("chat 3", PROMPT))
        fed_in(world)
        assert world.scheduler.num_running == LIMITS.max_num_seqs
        assert world.scheduler.num_preemptions == 0
        assert world.scheduler.num_background == 1

    def test_a_session_that_needs_blocks_gets_those_of_the_background(self) -> None:
        world = World(num_blocks=14)  # of four tokens; one is nobody's
        world.tell(replace(start("batch", PROMPT * 6, max_tokens=10), priority=BACKGROUND_PRIORITY))
        fed_in(world), fed_in(world)
        world.tell(start("chat", (3, 2, 1) * 7, max_tokens=15))
        assert fed_in(world) == {"chat"}
        while len(world.ended) < 2:
            assert world.turn() is not None
        assert list(world.ended) == ["chat", "batch"]
        world.check()

    def test_nobody_waits_for_a_prompt_that_is_held_back(self) -> None:
        """Its blocks would be shared, but come only in a turn."""
        world = World(replace(LIMITS, max_model_len=64), 97)
        world.tell(start("chat 0", PROMPT, max_tokens=40))
        world.turn()
        shared = (3, 2, 1) * 6
        world.tell(replace(background("batch"), token_ids=list(shared), num_prompt_tokens=len(shared)))
        world.turn()
        world.tell(start("chat 1", shared))
        assert "chat 1" in fed_in(world)

    def test_those_that_wait_in_the_background_are_no_reason_to_refuse_another(self) -> None:
        world = World()
        for number in range(LIMITS.max_num_seqs + LIMITS.max_num_waiting):
            world.tell(background(f"batch {number}"))
            if number < LIMITS.max_num_seqs:
                world.turn()
        world.tell(background("one too many"))
        assert [refused.session_id for refused in world.refused] == ["one too many"]
        for number in range(LIMITS.max_num_waiting):
            world.tell(start(f"chat {number}", PROMPT))
        assert len(world.refused) == 1


class TestTurns:
    def turns(self, step_ms: float, token_ms: float) -> tuple[World, BackgroundTurns, StepCost]:
        world = World()
        world.tell(background("batch"))
        world.turn()
        world.tell(start("chat", PROMPT))
        world.turn()
        cost = StepCost()
        cost.coefficients = step_ms, token_ms, 0.0, 0.0
        return world, BackgroundTurns(4), cost

    def test_come_in_few_steps(self) -> None:
        world, turns, cost = self.turns(20.0, 5.0)
        running = world.scheduler._slots.running

        def is_turn() -> bool:
            turns.hold(running.values(), cost)
            assert turns.is_held(running["batch"])
            assert not turns.is_held(running["chat"])
            turns.begin_step()
            return turns.is_turn

        for _ in range(2):
            assert [is_turn() for _ in range(TURN_STEPS)] == [False] * (TURN_STEPS - 1) + [True]

    @pytest.mark.parametrize(("token_ms", "is_held"), [(0.1, False), (0.2, True)])
    def test_are_not_needed_where_a_row_is_nearly_free(self, token_ms: float, is_held: bool) -> None:
        """Five tokens of 0.1 ms take 2.5 % of the step."""
        world, turns, cost = self.turns(20.0, token_ms)
        running = world.scheduler._slots.running
        turns.hold(running.values(), cost)
        assert turns.is_held(running["batch"]) is is_held
        turns.begin_step()
        assert not turns.is_turn
