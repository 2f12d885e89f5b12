"""Prompts go by turns of their owners, and an owner's short ones do not wait for all of its long ones."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from outrider.engine import prompt_queue
from outrider.engine.chunk_cost import Chunk, ChunkCost
from outrider.engine.prompt_queue import OWNERS_MAX, PromptQueue

BUDGET = 512


@dataclass(eq=False)
class Prompt:
    owner: str
    num_pending: int
    name: str = ""
    priority: int = 0
    may_be_passed: bool = True
    num_computed: int = field(default=0, init=False)


class Worker:
    """Computes prompts in steps of at most BUDGET tokens."""

    def __init__(self, cost: ChunkCost | None = None) -> None:
        self.queue = PromptQueue(cost or ChunkCost())
        self.waiting: list[Prompt] = []
        self.finished: list[str] = []
        self.tokens: list[Counter[str]] = []  # by owner, for each step
        self.num_chunks = 0

    def ask(
        self, owner: str, num_tokens: int, name: str = "", priority: int = 0, *, may_be_passed: bool = True
    ) -> Prompt:
        self.waiting.append(Prompt(owner, num_tokens, name or owner, priority, may_be_passed))
        return self.waiting[-1]

    def step(self, budget: int = BUDGET) -> None:
        self.tokens.append(Counter())
        for prompt in self.queue.turns(self.waiting):
            num_tokens = min(prompt.num_pending, budget)
            if not num_tokens:
                break
            self.queue.charge(prompt.owner, Chunk(prompt.num_computed, num_tokens))
            self.num_chunks += 1
            self.tokens[-1][prompt.owner] += num_tokens
            prompt.num_pending -= num_tokens
            prompt.num_computed += num_tokens
            budget -= num_tokens
            if not prompt.num_pending:
                self.finished.append(prompt.name)
        self.waiting = [prompt for prompt in self.waiting if prompt.num_pending]

    def steps_until(self, name: str) -> int:
        first = len(self.tokens)
        while name not in self.finished:
            self.step()
        return len(self.tokens) - first

    def shares(self, last: int) -> Counter[str]:
        return sum(self.tokens[-last:], Counter())


class TestOwners:
    def test_a_short_prompt_waits_for_nobody_elses_long_ones(self) -> None:
        worker = Worker()
        for number in range(12):
            worker.ask("a", 1000, f"a{number}")
        worker.step()
        worker.ask("b", 3)
        assert worker.steps_until("b") == 1

    def test_owners_have_equal_shares_however_many_prompts_they_have(self) -> None:
        worker = Worker()
        for owner, num_prompts in (("a", 40), ("b", 1), ("c", 8)):
            for _ in range(num_prompts):
                worker.ask(owner, 20_000 // num_prompts)
        for _ in range(90):
            worker.step()
        shares = worker.shares(90)
        assert max(shares.values()) - min(shares.values()) <= 2 * BUDGET

    def test_a_newcomer_among_many_owners_waits_for_one_step_of_each_that_came_with_it(self) -> None:
        worker = Worker()
        for number in range(11):
            worker.ask(f"a{number}", 5000)
        for _ in range(7):
            worker.step()
        worker.ask("b", 600)
        worker.ask("c", 2)
        assert worker.steps_until("c") == 1
        assert worker.steps_until("b") <= 12

    def test_one_that_comes_and_goes_has_no_more_than_its_share(self) -> None:
        """It asks again as soon as its prompt is done, and three others always have some."""
        worker = Worker()
        for owner in "abc":
            worker.ask(owner, 100_000)
        for _ in range(200):
            if not any(prompt.owner == "d" for prompt in worker.waiting):
                worker.ask("d", 500)
            worker.step()
        shares = worker.shares(160)
        assert max(shares.values()) - min(shares.values()) <= 2 * BUDGET

    def test_nobody_saves_up(self) -> None:
        worker = Worker()
        worker.ask("idle", 1)
        worker.ask("busy", 50_000)
        for _ in range(40):
            worker.step()
        worker.ask("idle", 50_000)
        for _ in range(10):
            worker.step()
        assert worker.shares(10) == {"busy": 5 * BUDGET, "idle": 5 * BUDGET}

    def test_tokens_late_in_a_long_prompt_count_by_their_cost(self) -> None:
        worker = Worker(ChunkCost(token_ms=0.1, read_ms=0.1))
        late = worker.ask("late", 50_000)
        late.num_computed = 9_000  # where a token costs ten that begin a prompt
        for _ in range(40):
            worker.ask("early", BUDGET)
        for _ in range(33):
            worker.step()
        assert 3 <= worker.shares(33)["late"] / BUDGET <= 5

    def test_a_lower_priority_number_goes_first(self) -> None:
        worker = Worker()
        worker.ask("a", 600, "later", priority=1)
        worker.ask("b", 600, "first", priority=0)
        worker.steps_until("later")
        assert worker.finished == ["first", "later"]

    def test_counters_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prompt_queue, "OWNERS_MAX", 20)
        worker = Worker()
        worker.ask("stays", 1_000_000)
        for number in range(100):
            worker.ask(f"{number}", 1)
            worker.step()
            assert len(worker.queue._accounts) <= 20 + 2
        assert OWNERS_MAX > 20


class TestOneOwnersPrompts:
    def test_a_short_one_does_not_wait_for_all_long_ones(self) -> None:
        worker = Worker()
        for number in range(12):
            worker.ask("a", 1000, f"long {number}")
        worker.step()
        worker.ask("a", 3, "short")
        assert worker.steps_until("short") == 1

    def test_equal_ones_finish_in_the_order_of_arrival(self) -> None:
        worker = Worker()
        for number in range(12):
            worker.ask("a", 1000, f"{number}")
        worker.steps_until("11")
        assert worker.finished == [f"{number}" for number in range(12)]

    def test_a_long_one_gets_on_beside_a_stream_of_short_ones(self) -> None:
        """While it is the first, those that pass it take no more than it does."""
        chance = random.Random(1)
        for length in (700, 5_000, 40_000):
            worker = Worker()
            worker.ask("a", length, "long")
            num_steps = 0
            while "long" not in worker.finished:
                for _ in range(12):  # more than a step computes
                    worker.ask("a", chance.randint(40, 80), "short")
                worker.step()
                num_steps += 1
            assert num_steps <= 2 * length / BUDGET + 2

    def test_what_prompts_took_that_nobody_may_pass_is_no_lead_of_later_ones(self) -> None:
        """Prompts with an objective, or of preempted sequences, are the first without being the shortest."""
        worker = Worker()
        worker.ask("a", 20_000, "urgent", may_be_passed=False)
        worker.ask("a", 10_000, "long")
        while "long" not in worker.finished:
            for _ in range(12):  # more than a step computes
                worker.ask("a", 60, "short")
            worker.step()
        num_short = worker.finished.count("short")
        assert num_short * 60 <= 10_000 + 2 * BUDGET

    def test_many_chunks_are_not_made_of_few(self) -> None:
        """Each step begins or continues one long prompt, and all others that it computes end in it."""
        worker = Worker()
        for owner in "abcdef":
            for _ in range(3):
                worker.ask(owner, 1000)
        while worker.waiting:
            num_chunks, num_finished = worker.num_chunks, len(worker.finished)
            worker.step()
            assert worker.num_chunks - num_chunks <= 1 + len(worker.finished) - num_finished
        assert len(worker.tokens) == -(-18_000 // BUDGET), "no step has room left while there are prompts"
