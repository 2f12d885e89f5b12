"""The scheduler in a simulated world, where sessions listen to draft workers while that pays.

The clock is ours, a step costs what we say, drafts guess as well as we say.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import pytest

from outrider.engine.kv_cache import BlockAllocator
from outrider.engine.verification import Verdict
from outrider.hint_tree import ROOT_ID, Hint
from outrider.randomness import mix
from outrider.sampling_params import SpeculationSettings
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Action,
    CommitPublished,
    HintsArrived,
    SessionEnded,
    SessionRefused,
    Step,
    StepResult,
    SubscribeDraft,
    TokensCommitted,
    WaitForHints,
)
from target_worker.scheduler import Scheduler
from tests.target_worker.fakes import start

VOCAB_SIZE = 1000
LOOKAHEAD = 20


def token_of(number: int, position: int) -> int:
    """What session `number` says at a position, whatever stands before it."""
    return mix(number * 1_000_003 + position) % (VOCAB_SIZE - 1)


@dataclass(frozen=True)
class DraftQuality:
    alignment: float  # share of guesses that hold
    token_s: float  # for a guess
    delay_s: float  # until it notices that it was wrong, or is heard again


PERFECT = DraftQuality(1.0, 0.0002, 0.001)
USELESS = DraftQuality(0.0, 0.0002, 0.001)
SLOW = DraftQuality(0.9, 0.020, 0.010)
GOOD = DraftQuality(0.8, 0.0005, 0.002)


class SimulatedDraft:
    """Guesses ahead of what it knows, one token after the other; a new root where it was wrong."""

    def __init__(
        self, number: int, known_len: int, quality: DraftQuality, now: float, error: int = 1
    ) -> None:
        self.number, self.quality, self.error = number, quality, error
        self.is_heard = True
        self.known_len = known_len
        self._plant(now)

    def _plant(self, now: float) -> None:
        self.base_len = self.said_len = self.known_len
        self.next_id = 1
        self.ready_at = now + self.quality.delay_s

    def guess(self, position: int) -> int:
        right = token_of(self.number, position)
        holds = mix(self.number * 7919 + position * 31 + 5) % 10_000 < self.quality.alignment * 10_000
        return right if holds else (right + self.error) % (VOCAB_SIZE - 1)

    def hear(self, known_len: int, is_listening: bool, now: float) -> None:
        """All commits come in order and at once."""
        first, was_full = self.known_len, self.said_len - self.known_len >= LOOKAHEAD
        is_lost = known_len > self.said_len or any(
            self.guess(position) != token_of(self.number, position) for position in range(first, known_len)
        )
        is_back = is_listening and not self.is_heard
        self.known_len, self.is_heard = known_len, is_listening
        if is_lost or is_back:
            self._plant(now)
        elif was_full:
            self.ready_at = max(self.ready_at, now)

    @property
    def next_at(self) -> float:
        is_full = self.said_len - self.known_len >= LOOKAHEAD
        return self.ready_at + self.quality.token_s if self.is_heard and not is_full else float("inf")

    def say(self, now: float) -> HintsArrived | None:
        """All that it has said by now, as one message."""
        hints: list[Hint] = []
        while self.next_at <= now:
            self.ready_at = self.next_at
            parent = ROOT_ID if self.next_id == 1 else self.next_id - 1
            hints.append(Hint(self.next_id, parent, self.guess(self.said_len)))
            self.next_id, self.said_len = self.next_id + 1, self.said_len + 1
        if not hints:
            return None
        return HintsArrived(f"s{self.number}", 1, self.base_len, hints, self.ready_at)


@dataclass(frozen=True)
class Machine:
    """What a step takes, milliseconds."""

    fixed_ms: float = 4.0
    token_ms: float = 0.2
    listener_ms: float = 0.05  # for every session that is listened to, between steps
    noise: float = 0.05


@dataclass(frozen=True)
class Outcome:
    tokens_per_s: float
    listening_share: float  # of all steps and sessions


class Simulation:
    """Sessions that follow one another; each has a draft of `qualities[i % len(qualities)]`."""

    def __init__(
        self,
        batch: int,
        qualities: list[DraftQuality],
        machine: Machine | None = None,
        *,
        may_rest: bool = True,
        max_tokens: int = 20_000,
        seed: int = 0,
        error: int = 1,
        insisting: Collection[int] = (),
    ) -> None:
        """`insisting`: numbers of sessions that ask for speculation always."""
        limits = SchedulerLimits(
            max_num_seqs=batch,
            max_model_len=max_tokens + 1,
            may_rest=may_rest,
            has_lookup=False,
            enable_prefix_caching=False,
        )
        allocator = BlockAllocator(batch * (max_tokens // 64 + 6) + 1, 64)
        self.scheduler = Scheduler(limits, allocator, VOCAB_SIZE)
        self.machine, self.qualities = machine or Machine(), qualities
        self.rng = random.Random(seed)
        self.max_tokens, self.error, self.insisting = max_tokens, error, insisting
        self.now = 100.0
        self.num_started = self.num_tokens = 0
        self.drafts: dict[str, SimulatedDraft] = {}
        self.num_listening = 0.0
        self.num_verified: Counter[str] = Counter()  # hints, by session
        for _ in range(batch):
            self.start_one(self.rng.randint(max_tokens // 2, max_tokens))

    def start_one(self, max_tokens: int) -> None:
        number = self.num_started
        self.num_started += 1
        speculation = SpeculationSettings(is_always=number in self.insisting)
        event = start(f"s{number}", (1,), max_tokens=max_tokens, speculation=speculation)
        self.hear(self.scheduler.handle(event, self.now))
        if self.qualities:
            quality = self.qualities[number % len(self.qualities)]
            self.drafts[f"s{number}"] = SimulatedDraft(number, 1, quality, self.now, self.error)
            self.hear(self.scheduler.handle(SubscribeDraft(1, f"s{number}", 1, 1), self.now))

    def hear(self, actions: list[Action]) -> None:
        num_ended = 0
        for action in actions:
            match action:
                case TokensCommitted():
                    self.num_tokens += len(action.token_ids)
                case CommitPublished():
                    known_len = action.from_len + len(action.token_ids)
                    self.drafts[action.session_id].hear(known_len, action.is_listening, self.now)
                case SessionEnded():
                    self.drafts.pop(action.session_id, None)
                    num_ended += 1
                case SessionRefused():
                    raise action.error
        for _ in range(num_ended):
            self.start_one(self.max_tokens)

    def turn(self) -> None:
        """Waits as long as the scheduler wants, then runs a step."""
        self.deliver(self.said_by_now())
        decision = self.scheduler.next_step(self.now)
        while isinstance(decision, WaitForHints):
            next_at = min((draft.next_at for draft in self.drafts.values()), default=float("inf"))
            self.now = max(min(decision.until, next_at), self.now + 1e-6)
            self.deliver(self.said_by_now())
            decision = self.scheduler.next_step(self.now)
        assert decision is not None
        machine, num_heard = self.machine, sum(draft.is_heard for draft in self.drafts.values())
        step_ms = machine.fixed_ms + machine.token_ms * decision.num_tokens
        step_ms *= self.rng.lognormvariate(0.0, machine.noise)
        self.now += (step_ms + machine.listener_ms * num_heard) / 1e3
        self.num_listening += num_heard / len(decision.items)
        said = self.said_by_now()  # before its drafts know what the step decided
        result = StepResult(self.verdicts(decision), step_ms)
        self.hear(self.scheduler.finish_step(decision, result, self.now))
        self.deliver(said)

    def said_by_now(self) -> list[HintsArrived]:
        said = [draft.say(self.now) for draft in self.drafts.values()]
        return [event for event in said if event is not None]

    def deliver(self, events: list[HintsArrived]) -> None:
        for event in events:
            self.hear(self.scheduler.handle(event, self.now))

    def verdicts(self, step: Step) -> list[Verdict | None]:
        found: list[Verdict | None] = []
        for item in step.items:
            number, position = int(item.session_id[1:]), len(item.text.token_ids)
            choices = [token_of(number, position + i) for i in range(item.num_decided)]
            held = 0
            while (
                held < len(item.hints) and held < len(choices) and item.hints[held].token_id == choices[held]
            ):
                held += 1
            accepted = min(held, item.num_fed_hints)
            self.num_verified[item.session_id] += len(item.hints)
            found.append(Verdict(choices[: accepted + 1], accepted, held))
        return found

    def run(self, num_steps: int) -> Outcome:
        began, tokens, listening = self.now, self.num_tokens, self.num_listening
        for _ in range(num_steps):
            self.turn()
        return Outcome(
            (self.num_tokens - tokens) / (self.now - began), (self.num_listening - listening) / num_steps
        )


def best_of_both(
    batch: int, qualities: list[DraftQuality], machine: Machine | None = None, max_tokens: int = 20_000
) -> float:
    """Tokens a second of plain decoding or of always listening, whichever are more."""
    plain = Simulation(batch, [], machine, max_tokens=max_tokens)
    always = Simulation(batch, qualities, machine, may_rest=False, max_tokens=max_tokens)
    for simulation in (plain, always):
        simulation.run(60)
    num_steps = (600 if max_tokens > 1000 else 2000) // batch + 150
    return max(plain.run(num_steps).tokens_per_s, always.run(num_steps).tokens_per_s)


NUM_STEPS = {1: (2500, 2500), 8: (1000, 1000), 32: (370, 500)}  # to learn, to be measured
QUALITIES = {"perfect": PERFECT, "useless": USELESS, "good": GOOD, "slow": SLOW}


class TestThroughput:
    @pytest.mark.parametrize(
        ("batch", "quality"), [(b, q) for b in NUM_STEPS for q in QUALITIES if (b, q) != (32, "slow")]
    )
    def test_it_is_within_3_percent_of_the_better_way(self, batch: int, quality: str) -> None:
        num_learning, num_measured = NUM_STEPS[batch]
        best = best_of_both(batch, [QUALITIES[quality]])
        simulation = Simulation(batch, [QUALITIES[quality]])
        simulation.run(num_learning)
        outcome = simulation.run(num_measured)
        assert outcome.tokens_per_s >= 0.97 * best, f"{outcome}, the better way has {best:.0f}"

    @pytest.mark.parametrize(
        ("batch", "qualities", "max_tokens", "noise"),
        [
            (8, [GOOD, USELESS], 20_000, 0.05),
            (8, [PERFECT, USELESS, USELESS, USELESS], 20_000, 0.05),
            (1, [GOOD], 100, 0.05),
            (1, [USELESS], 100, 0.05),
            (8, [GOOD], 200, 0.05),
            (8, [GOOD], 20_000, 0.4),
        ],
        ids=["half are good", "one in four is perfect", "short", "short, useless", "short, eight", "noisy"],
    )
    def test_so_it_is_for_mixed_drafts_short_sessions_and_noisy_machines(
        self, batch: int, qualities: list[DraftQuality], max_tokens: int, noise: float
    ) -> None:
        machine = Machine(noise=noise)
        best = best_of_both(batch, qualities, machine, max_tokens)
        simulation = Simulation(batch, qualities, machine, max_tokens=max_tokens)
        simulation.run(2500 if batch == 1 else 1000)
        outcome = simulation.run(2000 if batch == 1 else 800)
        assert outcome.tokens_per_s >= 0.97 * best, f"{outcome}, the better way has {best:.0f}"

    def test_of_mixed_drafts_only_the_good_ones_are_heard(self) -> None:
        simulation = Simulation(8, [GOOD, USELESS])
        simulation.run(800)
        heard = [0, 0]
        for _ in range(400):
            simulation.turn()
            for draft in simulation.drafts.values():
                heard[draft.number % 2] += draft.is_heard
        assert heard[0] > 0.9 * 4 * 400
        assert heard[1] < 0.15 * 4 * 400

    def test_while_listening_does_not_pay_draft_workers_are_told_to_pause(self) -> None:
        simulation = Simulation(32, [USELESS])
        simulation.run(350)
        assert simulation.run(300).listening_share < 0.1

    def test_nothing_depends_on_what_a_hint_says(self) -> None:
        """I4: wrong guesses of other tokens, everything else the same: the same steps at the same times."""
        runs = [Simulation(4, [GOOD, USELESS], error=error) for error in (1, 77)]
        for _ in range(600):
            for simulation in runs:
                simulation.turn()
            assert runs[0].now == runs[1].now
            heard = [[draft.is_heard for draft in run.drafts.values()] for run in runs]
            assert heard[0] == heard[1]
        assert runs[0].num_tokens == runs[1].num_tokens


class TestSpeculationAlways:
    def test_it_is_listened_to_and_all_its_hints_are_verified_whatever_that_costs(self) -> None:
        """On a machine where a hint costs as much as a step does, and none would be verified."""
        simulation = Simulation(4, [PERFECT], Machine(token_ms=4.0), insisting=[0])
        simulation.run(100)
        before = simulation.num_verified["s0"]
        outcome = simulation.run(400)
        assert outcome.listening_share == pytest.approx(0.25), "this one and no other"
        assert simulation.num_verified["s0"] - before > 400 * SchedulerLimits().num_speculative_tokens

    def test_a_step_with_such_a_session_says_nothing_about_what_pays(self) -> None:
        """Once it has ended the others listen as soon as they would have without it."""
        simulation = Simulation(2, [PERFECT], insisting=[0], max_tokens=3000)
        while "s0" in simulation.drafts:
            assert not simulation.drafts["s1"].is_heard
            simulation.turn()
        simulation.run(300)
        assert simulation.run(200).listening_share > 0.9
