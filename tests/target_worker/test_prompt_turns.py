"""A target's prompts and slots go by turns of tenants: nobody's long prompts hold others up."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.objective import Objective
from target_worker.limits import SchedulerLimits
from target_worker.messages import SessionAborted, SessionAdmitted, SessionEnded, Step, TokensCommitted
from target_worker.objectives import Aim
from target_worker.scheduling.scheduler import Scheduler
from tests.target_worker.fakes import VOCAB_SIZE, FakeModel, greedy_text, start

BLOCK_SIZE = 16
LIMITS = SchedulerLimits(
    max_num_seqs=32, max_num_batched_tokens=128, max_model_len=4000, hint_wait_ms_max=0.0, has_lookup=False
)


class Serving:
    """A scheduler and what its sessions have got: each step takes one millisecond."""

    def __init__(self, limits: SchedulerLimits = LIMITS, num_blocks: int = 2000) -> None:
        self.allocator = BlockAllocator(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(limits, self.allocator, VOCAB_SIZE)
        self.model = FakeModel(num_blocks * BLOCK_SIZE)
        self.now = 0.0
        self.texts: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        self.begun: list[str] = []  # in the order of their first tokens
        self.ended: list[str] = []
        self.num_prompt_tokens: list[int] = []  # of each step
        self.chance = random.Random(1)

    def ask(
        self, name: str, length: int, *, owner: str = "", max_tokens: int = 1, priority: int = 0,
        objective: Objective | None = None, deadline_s: float | None = None,
    ) -> None:  # fmt: skip
        prompt = self.chance.choices(range(VOCAB_SIZE - 1), k=length)
        event = start(name, prompt, max_tokens=max_tokens, ignore_eos=True)
        event = replace(event, aim=Aim(objective or Objective(), owner=owner), priority=priority)
        if deadline_s is not None:
            event = replace(event, deadline_at=self.now + deadline_s)
        actions = self.scheduler.handle(event, self.now)
        assert isinstance(actions[0], SessionAdmitted), actions
        self.texts[name] = prompt
        self.expected[name] = greedy_text(prompt, length + max_tokens, frozenset())[0]

    def turn(self) -> bool:
        step = self.scheduler.next_step(self.now)
        if step is None:
            return False
        assert isinstance(step, Step)
        assert step.items, "a step without anything to do would never end"
        self.num_prompt_tokens.append(sum(chunk.num_tokens for item in step.items if (chunk := item.chunk) is not None))
        self.now += 1e-3
        for action in self.scheduler.finish_step(step, self.model.run(step), self.now):
            assert not isinstance(action, SessionAborted), action
            if isinstance(action, TokensCommitted):
                if action.session_id not in self.begun:
                    self.begun.append(action.session_id)
                self.texts[action.session_id] += action.token_ids
            elif isinstance(action, SessionEnded):
                self.ended.append(action.session_id)
                assert self.texts[action.session_id] == self.expected[action.session_id]
        return True

    def steps_until(self, name: str) -> int:
        """Steps until its first token."""
        num_steps = 0
        while name not in self.begun:
            assert self.turn()
            num_steps += 1
        return num_steps

    def run(self) -> None:
        while self.turn():
            pass


def behind_long_prompts(owner: str, num_owners: int = 1) -> Serving:
    """A prompt of three tokens comes when twelve prompts of 1,000 tokens are being computed."""
    serving = Serving()
    for number in range(12):
        serving.ask(f"long {number}", 1000, owner=f"a{number % num_owners}")
    serving.turn()
    serving.ask("short", 3, owner=owner)
    return serving


class TestPrompts:
    @pytest.mark.parametrize(("owner", "num_owners"), [("b", 1), ("a0", 1), ("b", 12), ("a3", 12)])
    def test_a_short_one_does_not_wait_for_long_ones(self, owner: str, num_owners: int) -> None:
        serving = behind_long_prompts(owner, num_owners)
        assert serving.steps_until("short") == 1

    def test_the_others_lose_no_more_than_its_tokens(self) -> None:
        serving = behind_long_prompts("b")
        serving.run()
        assert serving.begun == ["short", *(f"long {number}" for number in range(12))]
        total = sum(serving.num_prompt_tokens)
        assert len([num for num in serving.num_prompt_tokens if num]) <= -(-total // LIMITS.max_num_batched_tokens) + 1

    def test_two_tenants_share_steps_whatever_they_send(self) -> None:
        serving = Serving()
        for number in range(10):
            serving.ask(f"a{number}", 1000, owner="a")
        serving.ask("b0", 1000, owner="b")
        serving.run()
        assert serving.begun.index("b0") <= 2

    def test_a_long_one_gets_on_beside_a_stream_of_short_ones(self) -> None:
        serving = Serving()
        serving.ask("long", 1500)
        num_steps = 0
        while "long" not in serving.begun:
            for number in range(4):
                if serving.scheduler.num_running + serving.scheduler.num_waiting < 28:
                    serving.ask(f"short {num_steps} {number}", 60)
            assert serving.turn()
            num_steps += 1
        assert num_steps <= 2 * 1500 / LIMITS.max_num_batched_tokens + 4

    def test_the_one_that_is_due_goes_first_among_its_tenants(self) -> None:
        serving = Serving()
        for number in range(3):
            serving.ask(f"plain {number}", 400, owner="a")
        serving.ask("due", 900, owner="a", objective=Objective(ttft_ms=500.0))
        serving.run()
        assert serving.begun[0] == "due"

    def test_prompts_with_a_lower_priority_number_go_first(self) -> None:
        serving = Serving()
        serving.ask("later", 50, owner="a", priority=1)
        serving.ask("first", 700, owner="b")
        serving.run()
        assert serving.begun == ["first", "later"]


class TestSlots:
    def test_kv_that_becomes_free_goes_to_the_tenant_with_less(self) -> None:
        serving = Serving(num_blocks=1 + 2 * 65)
        for number in range(6):
            serving.ask(f"a{number}", 1000, owner="a", max_tokens=20)
        serving.turn()
        serving.ask("b", 3, owner="b", max_tokens=20)
        serving.run()
        assert serving.begun.index("b") <= 2  # behind those that had slots when it came
        assert serving.ended.index("b") <= 3

    def test_slots_that_become_free_go_to_the_tenant_with_less(self) -> None:
        serving = Serving(replace(LIMITS, max_num_seqs=2))
        for number in range(6):
            serving.ask(f"a{number}", 10, owner="a", max_tokens=20)
        serving.turn()
        for number in range(2):
            serving.ask(f"b{number}", 10, owner="b", max_tokens=20)
        serving.run()
        assert set(serving.begun[2:4]) == {"b0", "a2"}

    def test_a_tenant_that_holds_less_keeps_no_other_waiting_for_ever(self) -> None:
        serving = Serving(num_blocks=1 + 70)
        serving.ask("first", 1000, owner="a", max_tokens=30)
        serving.turn()
        serving.ask("long", 1000, owner="a", max_tokens=2)
        for number in range(300):
            if "long" in serving.begun:
                break
            if serving.scheduler.num_running + serving.scheduler.num_waiting < 12:
                serving.ask(f"short {number}", 40, owner="b", max_tokens=20)
            assert serving.turn()
        assert "long" in serving.begun

    def test_a_deadline_that_another_tenants_turn_could_meet_is_no_reason_to_refuse(self) -> None:
        serving = Serving(replace(LIMITS, max_num_seqs=1))
        for number in range(4):  # which teach how long a session stays
            serving.ask(f"before {number}", 10, owner="a", max_tokens=100)
        serving.run()
        for number in range(20):
            serving.ask(f"a{number}", 10, owner="a", max_tokens=100)
        serving.turn()
        serving.ask("b", 10, owner="b", max_tokens=2, deadline_s=0.3)
        serving.steps_until("b")


@pytest.mark.parametrize("seed", range(30))
def test_texts_are_right_and_no_block_is_lost_however_scarce_kv_is(seed: int) -> None:
    """Prompts of many tenants, with and without shared beginnings, in a cache that holds few of them."""
    chance = random.Random(seed)
    serving = Serving(replace(LIMITS, max_num_seqs=6, max_num_batched_tokens=24), num_blocks=1 + 24)
    num_left = 25
    while num_left or serving.scheduler.num_running or serving.scheduler.num_waiting:
        if num_left and chance.random() < 0.4:
            num_left -= 1
            length, priority = chance.choice([2, 5, 40, 150]), chance.choice([0, 0, 0, -1])
            max_tokens = chance.choice([1, 20, 60])
            serving.ask(f"{num_left}", length, owner=chance.choice("abc"), max_tokens=max_tokens, priority=priority)
        serving.turn()
        running = [session.kv for session in serving.scheduler._slots.running.values()]
        serving.allocator.check_integrity(running)
    assert len(serving.ended) == 25
