"""Traces of the coordinator's pure cores: short runs that show what each decides (`traces/*.txt`).

`test_sequence.py` writes those of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from coordinator.intake.run_identity import WorkerLife
from coordinator.placement.fair_queue import URGENT, FairQueue, Ticket
from coordinator.placement.placement_request import PlacementRequest
from coordinator.placement.routing import Router
from coordinator.placement.slot_queue import Round, Slot, SlotQueue
from coordinator.recovery.poison import PoisonRecord
from coordinator.speculation.fallback import FallbackController, FallbackPolicy
from outrider.errors import OutriderError
from outrider.registry.worker_record import WorkerRecord
from tests.coordinator.fakes import record_of
from tests.golden import Trace

TRACES = Path(__file__).parent / "traces"


class Fallback(Trace):
    """One request's controller."""

    def __init__(self, title: str) -> None:
        super().__init__(title, width=70)
        self._core = FallbackController(FallbackPolicy(), is_enabled=True)
        self.add("the session starts", *self._told(self._core.start()))

    def steps(
        self,
        num_tokens: int,
        num_hints: int,
        *,
        gap_s: float = 0.05,
        is_paused: bool = False,
        most: int = 200,
    ) -> None:
        """Steps alike, until the state changes or there were `most`; all tokens but the last of each were hints."""
        before, num, accepted = self._core.state, 0, num_tokens - 1 if num_hints else 0
        while self._core.state is before and num < most:
            num += 1
            done = self._core.on_step(num_tokens, num_hints, accepted, gap_s=gap_s, is_paused=is_paused)
        hints = f"{accepted} of {num_hints} hints accepted" if num_hints else "no hints"
        rest = " (the target accepts none)" if is_paused else ""
        tokens = f"{num_tokens} token{'s' * (num_tokens > 1)}"
        event = f"{num} steps in {gap_s * 1e3:.0f} ms each: {tokens}, {hints}{rest}"
        self.add(event, *self._told(done, is_changed=self._core.state is not before))

    def lose_draft(self) -> None:
        self.add("no draft worker takes the session", *self._told(self._core.on_no_draft(), is_changed=True))

    def _told(self, actions: tuple[object, ...], *, is_changed: bool = False) -> list[str]:
        why = f", {self._core.last_trigger.name}" if is_changed and self._core.last_trigger else ""
        return [self._core.state.name + why, *(getattr(each, "name", "") for each in actions)]


class TestFallback:
    def test_hints_that_are_refused_are_given_up_and_tried_again_ever_later(self) -> None:
        run = Fallback("The draft guesses nothing right: it is paused, probed, and paused for twice as long.")
        for _ in range(3):
            run.steps(1, 6)
            run.steps(1, 0, most=600)
        run.check(TRACES / "fallback_poor_draft.txt")

    def test_a_draft_that_became_good_is_kept_after_a_probe(self) -> None:
        run = Fallback("The output became easier to guess during the pause: the probe ends it.")
        run.steps(1, 6)
        run.steps(1, 0)
        run.steps(4, 6)
        run.steps(4, 6, most=20)
        run.check(TRACES / "fallback_good_again.txt")

    def test_hints_that_are_accepted_may_still_cost_more_than_they_save(self) -> None:
        run = Fallback("A third of the hints is accepted, but steps with hints take more than three times as long.")
        run.steps(1, 6)
        run.steps(1, 0, gap_s=0.02)
        run.steps(3, 6, gap_s=0.07)
        run.check(TRACES / "fallback_slower.txt")

    def test_without_a_draft_worker_it_pauses_and_asks_for_another(self) -> None:
        run = Fallback("The draft worker goes away, and another one sends no hints.")
        run.steps(2, 6, most=3)
        run.lose_draft()
        run.steps(1, 0)
        run.steps(1, 0, is_paused=True)
        run.steps(1, 0)
        run.check(TRACES / "fallback_no_draft.txt")


class Fair(Trace):
    """A queue, told by the order in which those that wait would be given slots."""

    def __init__(self, title: str, **weights: float) -> None:
        super().__init__(title, width=52)
        self._queue, self._names = FairQueue(weights), dict[Ticket, str]()

    def push(self, name: str, priority: int = 0, num_prompt_tokens: int = 0) -> None:
        """`name`: the tenant, and a number."""
        ticket = Ticket(priority, name.rstrip("0123456789"), num_prompt_tokens)
        self._names[ticket] = name
        self._queue.push(ticket)
        how = "has begun" if priority == URGENT else f"priority {priority}, {num_prompt_tokens} prompt tokens"
        self._add(f"{name} comes: {how}")

    def serve(self, num_tokens: int = 0, *, leaves: bool = True) -> None:
        """Gives the first one a slot, and counts its output."""
        (ticket,) = self._queue.in_order(1)
        self._queue.remove(ticket)
        self._queue.begin(ticket)
        self._queue.take_slot(ticket.tenant)
        self._queue.count_output(ticket.tenant, num_tokens)
        if leaves:
            self._queue.leave_slot(ticket.tenant)
        self._add(f"{self._names[ticket]} has a slot{f', {num_tokens} tokens and leaves' if leaves else ''}")

    def ask_whom_to_refuse(self, tenant: str, priority: int = 0) -> None:
        ticket = self._queue.less_entitled_than(Ticket(priority, tenant))
        name = "the newcomer" if ticket is None else self._names[ticket]
        self.add(f"no room for a newcomer of {tenant}, priority {priority}", f"{name} is refused")

    def _add(self, event: str) -> None:
        self.add(event, f"next: {' '.join(self._names[ticket] for ticket in self._queue.in_order())}")


class TestFairQueue:
    def test_lower_priorities_come_first(self) -> None:
        run = Fair("Lower numbers go first; what has begun goes before all; equals come as they arrived.")
        run.push("a1", 5)
        run.push("a2")
        run.push("a3")
        run.push("a4", -5)
        run.push("a5", URGENT)
        run.check(TRACES / "fair_queue_priorities.txt")

    def test_tenants_share_tokens_not_requests(self) -> None:
        run = Fair("A request of `long` costs as much as ten of `short`: afterwards those go first.")
        for name in ("long1", "long2", "short1", "short2", "short3"):
            run.push(name, num_prompt_tokens=100 if name.startswith("long") else 10)
        run.serve(100)
        run.serve(10)
        run.serve(10)
        run.push("new1")
        run.serve(10)
        run.serve(10)
        run.check(TRACES / "fair_queue_tokens.txt")

    def test_a_tenant_beyond_its_share_of_the_slots_goes_last(self) -> None:
        run = Fair(
            "`b` has three times the weight. `a` keeps two slots: a third one is beyond its share while `b` waits.",
            b=3,
        )
        for name in ("a1", "a2", "a3"):
            run.push(name)
        run.serve(leaves=False)
        run.serve(leaves=False)
        for name in ("b1", "b2"):
            run.push(name, num_prompt_tokens=50)
        run.serve(leaves=False)
        run.serve(leaves=False)
        run.check(TRACES / "fair_queue_slots.txt")

    def test_who_waits_most_for_its_weight_is_refused_for_others(self) -> None:
        run = Fair("There is room for no more: the newest of the tenant with most waiting makes room.")
        for name in ("a1", "a2", "a3", "b1"):
            run.push(name)
        run.ask_whom_to_refuse("b")
        run.ask_whom_to_refuse("a")
        run.push("c1", 9)
        run.ask_whom_to_refuse("a")
        run.ask_whom_to_refuse("d", 9)
        run.check(TRACES / "fair_queue_refused.txt")


class Slots(Trace):
    """The queue of one model before targets of these contexts, with two slots each."""

    def __init__(self, title: str, *contexts: int) -> None:
        super().__init__(title, width=56)
        self.now_s, self._router = 0.0, Router(lambda _: None, Random(0), 3.0)
        self._targets = [
            record_of(
                "target",
                f"127.0.0.1:{number}",
                "0" * 16,
                incarnation=str(number),
                max_model_len=each,
                max_num_seqs=2,
            )
            for number, each in enumerate(contexts, 1)
        ]
        self._slots = SlotQueue("demo", self._router, wait_max_s=30.0, weights={})
        self._held: dict[str, Slot] = {}
        self._requests: dict[str, PlacementRequest] = {}

    def come(self, name: str, num_tokens: int, *, deadline_s: float = 600.0) -> None:
        """A sequence takes a free slot, or waits for one."""
        request = self._requests[name] = PlacementRequest(
            model="demo",
            ticket=Ticket(),
            rank=self._ranked(num_tokens),
            is_hopeless=lambda: False,
            token=name,
            since_s=self.now_s,
            deadline_s=self.now_s + deadline_s,
            num_tokens=num_tokens,
            restrictions=frozenset,
        )
        event = f"{name} comes: {num_tokens} tokens"
        slot = None
        if not self._slots:
            offer = self._slots.offer(request, self.now_s)
            slot = self._slots.take(offer, next(iter(offer.asked), None), self.now_s)
        if slot is not None:
            self._grant(event, slot)
            return
        try:
            until_s = self._slots.push(request, self.now_s)
        except OutriderError as error:
            self._refuse(event, error)
        else:
            self._add(event, f"it waits until {until_s:g} s")

    def look(self) -> None:
        """One pass over the queue, to the first slot."""
        turns, details = Round(self._slots), list[str]()
        while (offer := turns.next(self.now_s)) is not None:
            slot = self._slots.take(offer, next(iter(offer.asked), None), self.now_s)
            if slot is not None:
                self._slots.forget(offer.request)
                self._grant("a pass over the queue", slot, *details)
                return
            details.append(f"{offer.request.token}: no room")
            turns.found_full(offer)
        self._add("a pass over the queue", "", *details)

    def leave(self, name: str) -> None:
        slot = self._held.pop(name)
        self._slots.leave(slot, self.now_s)
        self._add(f"{name} leaves {slot.target.worker_id}", f"{self._slots.num_held} slots taken")

    def give_up(self, name: str) -> None:
        """A sequence has waited its longest."""
        error = self._slots.timeout_error(self._requests[name], self.now_s)
        self._slots.forget(self._requests[name])
        self._refuse(f"{name} has waited its longest", error)

    def _ranked(self, num_tokens: int) -> Callable[[], list[WorkerRecord]]:
        return lambda: [target for target in self._targets if target.max_model_len >= num_tokens]

    def _grant(self, event: str, slot: Slot, *details: str) -> None:
        self._held[slot.token] = slot
        self._add(event, f"{slot.token} has a slot at {slot.target.worker_id}", *details)

    def _refuse(self, event: str, error: OutriderError) -> None:
        retry = f", come back in {error.retry_after_s:.1f} s" if hasattr(error, "retry_after_s") else ""
        self._add(event, f"{type(error).__name__}{retry}", error.message)

    def _add(self, event: str, decided: str, *details: str) -> None:
        self.add(f"{self.now_s:5.1f} s  {event}", decided, *details)


class TestSlotQueue:
    def test_a_long_one_waits_for_room_and_hides_no_short_one(self) -> None:
        run = Slots(
            "One target takes 1,000 tokens, the other 100. Each has two slots, and lets one more sequence wait.",
            1000,
            100,
        )
        for number in range(1, 4):
            run.come(f"long{number}", 900)
        run.come("long4", 900)
        for number in range(1, 3):
            run.come(f"short{number}", 50)
        for _ in range(3):
            run.look()
        run.now_s = 8.0
        run.leave("long1")
        run.look()
        run.check(TRACES / "slot_queue_long.txt")

    def test_who_would_wait_too_long_is_refused_at_once(self) -> None:
        run = Slots(
            "Slots are held for 10 s: a sequence that would wait longer than it may is told when to come back.",
            1000,
        )
        for number in range(1, 4):
            run.come(f"s{number}", 100)
        run.come("s4", 100, deadline_s=10.0)
        run.now_s = 10.0
        run.leave("s1")
        for number in range(5, 7):
            run.come(f"s{number}", 100)
        run.come("s7", 100, deadline_s=4.0)
        run.check(TRACES / "slot_queue_refused.txt")

    def test_the_error_says_whether_targets_are_full_or_do_not_answer(self) -> None:
        run = Slots("Three wait for slots that stay taken: one until its deadline, one until its longest wait.", 1000)
        for number in range(1, 6):
            run.come(f"s{number}", 100, deadline_s=10.0 if number == 5 else 600.0)
        run.look()
        run.now_s = 10.0
        run.give_up("s5")
        run.now_s = 30.0
        run.give_up("s4")
        run.check(TRACES / "slot_queue_too_late.txt")
        run = Slots("The only target that is left has too short a context: none has answered.", 50)
        run.come("s1", 100)
        run.now_s = 30.0
        run.give_up("s1")
        run.check(TRACES / "slot_queue_silent.txt")


class Poison(Trace):
    """A replica's record, and one run that loses targets; `others` die as well."""

    def __init__(self, title: str, num_targets: int) -> None:
        super().__init__(title, width=60)
        self.record, self.now_s, self.killed = PoisonRecord(), 0.0, set[WorkerLife]()
        self._targets = {f"target-{number}": True for number in range(1, num_targets + 1)}

    def lose(self, number: int, *, on_trial: bool = False) -> None:
        """The run loses a target."""
        target = record_of("target", f"127.0.0.1:{number}", "0" * 16)
        self.record.note_loss(target, "p", self.now_s)
        self.killed.add(WorkerLife.of(target))
        num = len(self.killed)
        if on_trial and self._blames(num):
            self.record.convict("p", self.now_s)
            self._add(f"target-{number} is lost with it, on trial", "the run is ended, its prompt is refused")
        else:
            must = "must be tried alone" if num >= 2 and self._blames(num + 1) else "goes on"
            self._add(f"target-{number} is lost with it", f"the run {must}")

    def lose_another(self, number: int) -> None:
        """A target is lost that did not have the run."""
        self.record.note_loss(record_of("target", f"127.0.0.1:{number}", "0" * 16), "q", self.now_s)
        must = "must be tried alone" if self._blames(len(self.killed) + 1) else "goes on"
        self._add(f"target-{number} is lost with another run", f"the run {must}")

    def told(self, event: str) -> None:
        left_s, num = self.record.time_left_s("p", self.now_s), self.record.num_killed("p", self.now_s)
        state = f"refused for another {left_s:.0f} s" if left_s else f"admitted, with {num} losses"
        self._add(event, state)

    def merge(self, other: PoisonRecord) -> None:
        """Takes the facts of another replica."""
        facts = other.take_new_facts()
        self.record.merge(dict.fromkeys(facts, self.now_s), self.now_s)
        self._add("another replica tells", *(" ".join(fact) for fact in facts))

    def _blames(self, num_losses: int) -> bool:
        return self.record.blames(
            "p",
            num_losses,
            self.killed,
            has_passed_trial=False,
            num_losses_max=3,
            num_sequences=1,
            targets=self._targets,
            model="demo",
            since_s=-300.0,
        )

    def _add(self, event: str, decided: str, *details: str) -> None:
        self.add(f"{self.now_s:5.1f} s  {event}", decided, *details)
        self.now_s += 1.0


class TestPoison:
    def test_a_run_that_loses_a_target_on_trial_is_ended_and_its_prompt_refused(self) -> None:
        run = Poison("Eight targets, and nobody else dies: the third loss, on trial, ends the run.", 8)
        for number in range(1, 4):
            run.lose(number, on_trial=number == 3)
        run.told("a request with the same prompt")
        run.now_s = 130.0
        run.told("the same request")
        run.check(TRACES / "poison_convicted.txt")

    def test_where_others_die_too_chance_explains_the_losses(self) -> None:
        run = Poison("Eight targets, and others die as well: the run may lose more before it is to blame.", 8)
        run.lose(1)
        run.lose(2)
        run.lose_another(3)
        run.lose_another(4)
        for number in range(5, 8):
            run.lose(number, on_trial=number == 7)
        run.check(TRACES / "poison_chance.txt")

    def test_losses_of_a_run_that_was_left_count_for_the_next_one_until_one_completes(self) -> None:
        run = Poison("A client leaves after two losses and asks again; the third attempt completes.", 8)
        run.lose(1)
        run.lose(2)
        run.record.suspect("p", run.killed, run.now_s)
        run.told("the client leaves, and sends the request again")
        run.record.acquit("p", run.now_s)
        run.told("this run completes; the next request")
        run.check(TRACES / "poison_cleared.txt")

    def test_what_one_replica_knows_all_know(self) -> None:
        run = Poison("The client sends the refused request to another replica, which has heard of it.", 8)
        other = Poison("", 8)
        for number in range(1, 4):
            other.lose(number, on_trial=number == 3)
        run.told("a request with the prompt")
        run.merge(other.record)
        run.told("the same request")
        run.check(TRACES / "poison_shared.txt")
