"""The queue for slots at targets."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from coordinator.placement.admission import Admission
from coordinator.placement.fair_queue import URGENT, Ticket
from coordinator.placement.placement_request import PlacementRequest
from coordinator.placement.reservations import Reservations
from coordinator.placement.routing import ModelKey, Router
from coordinator.placement.slot_queue import Slot
from outrider.errors import DeadlineExceeded, Overloaded
from outrider.registry.worker_record import Snapshot, WorkerRecord
from outrider.sampling_params import BACKGROUND_PRIORITY
from tests.coordinator.fakes import eventually, record_of

FINGERPRINT = "0123456789abcdef"
MODEL = ModelKey("demo", FINGERPRINT)


def target(number: int, num_slots: int = 1, **changes: Any) -> WorkerRecord:
    record = record_of(
        *("target", f"127.0.0.1:{7000 + number}", FINGERPRINT),
        max_num_seqs=num_slots,
        max_num_waiting=0,
        **changes,
    )
    return replace(record, incarnation=f"run of {number}")


@dataclass
class Door:
    """One replica's admission without Redis, where its own count is all there is."""

    targets: list[WorkerRecord]
    admission: Admission
    router: Router
    numbers: Any = field(default_factory=itertools.count)

    def rank(self, num_tokens: int = 10) -> Sequence[WorkerRecord]:
        loop = asyncio.get_running_loop()
        return self.router.rank_targets(
            Snapshot(targets=tuple(self.targets)),
            loop.time(),
            model=MODEL,
            num_tokens=num_tokens,
            excluded=(),
        )

    def is_hopeless(self, num_tokens: int) -> bool:
        snapshot = Snapshot(targets=tuple(self.targets))
        return not self.router.expects_target(snapshot, model=MODEL, num_tokens=num_tokens, excluded=())

    def ask(self, ticket: Ticket | None = None, **options: Any) -> asyncio.Task[Slot | None]:
        return asyncio.create_task(self.admission.reserve(self.request(ticket, **options)))

    def request(
        self,
        ticket: Ticket | None = None,
        *,
        num_tokens: int = 10,
        deadline_s: float = 60.0,
        is_background: bool = False,
    ) -> PlacementRequest:
        now_s = asyncio.get_running_loop().time()
        return PlacementRequest(
            "demo",
            ticket or Ticket(),
            lambda: self.rank(num_tokens),
            lambda: self.is_hopeless(num_tokens),
            f"token {next(self.numbers)}",
            now_s,
            now_s + deadline_s,
            num_tokens,
            frozenset,
            is_background,
        )

    async def taken(self, *tickets: Ticket) -> list[Slot]:
        slots = [await self.ask(ticket) for ticket in tickets or (Ticket(),)]
        return [slot for slot in slots if slot is not None]

    async def until_waiting(self, num: int) -> None:
        await eventually(lambda: self.admission.num_waiting == num, f"{num} wait")


def given(task: asyncio.Task[Slot | None]) -> Slot:
    slot = task.result()
    assert slot is not None
    return slot


Opened = Callable[..., Any]


@pytest.fixture
def opened() -> Opened:
    @asynccontextmanager
    async def make(
        *targets: WorkerRecord, wait_max_s: float = 30.0, weights: dict[str, float] | None = None
    ) -> AsyncIterator[Door]:
        now_s = asyncio.get_running_loop().time
        router = Router(lambda _: None, random.Random(0), quarantine_s=3.0)
        admission = Admission(router, Reservations(None, now_s), now_s, wait_max_s=wait_max_s, weights=weights or {})
        try:
            yield Door(list(targets), admission, router)
        finally:
            await admission.close()

    return make


async def test_a_free_slot_is_had_at_once(opened: Opened) -> None:
    async with opened(target(0)) as door:
        slot = await door.ask()
        assert slot.target == door.targets[0]
        assert not door.router.has_room(door.targets[0])


async def test_without_any_target_there_is_no_waiting(opened: Opened) -> None:
    async with opened() as door:
        assert await door.ask() is None


async def test_one_that_leaves_lets_the_next_one_in(opened: Opened) -> None:
    async with opened(target(0)) as door:
        (slot,) = await door.taken()
        waiting = door.ask()
        await door.until_waiting(1)
        door.admission.leave("demo", slot)
        assert (await waiting).target == door.targets[0]
        assert door.admission.num_waiting == 0


async def test_priorities_decide_whose_turn_it_is(opened: Opened) -> None:
    async with opened(target(0)) as door:
        (slot,) = await door.taken()
        order: list[str] = []
        waiting = []

        def note(name: str, _: object) -> None:
            order.append(name)

        for name, priority in (("late", 5), ("usual", 0), ("begun", URGENT), ("early", -5)):
            task = door.ask(Ticket(priority))
            task.add_done_callback(partial(note, name))
            waiting.append(task)
            await door.until_waiting(len(waiting))
        for _ in range(4):
            door.admission.leave("demo", slot)
            (done,), pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=5)
            slot, waiting = given(done), list(pending)
        assert order == ["begun", "early", "usual", "late"]


async def test_a_new_target_is_found_without_being_told(opened: Opened) -> None:
    async with opened(target(0)) as door:
        await door.taken()
        waiting = door.ask()
        await door.until_waiting(1)
        door.targets.append(target(1))
        assert (await waiting).target == door.targets[1]


async def test_one_that_no_free_target_suits_does_not_hold_up_others(opened: Opened) -> None:
    async with opened(target(0, max_model_len=1000), target(1, max_model_len=10)) as door:
        held = await door.taken(Ticket(), Ticket())
        long = door.ask(num_tokens=500)
        await door.until_waiting(1)
        short = door.ask(num_tokens=5)
        await door.until_waiting(2)
        small = next(slot for slot in held if slot.target.max_model_len == 10)
        door.admission.leave("demo", small)
        assert (await short).target == small.target
        assert not long.done()
        long.cancel()


async def test_who_has_waited_for_long_enough_is_told_to_come_back(opened: Opened) -> None:
    async with opened(target(0), wait_max_s=0.2) as door:
        await door.taken()
        with pytest.raises(Overloaded, match=r"within 0.2 s") as caught:
            await door.ask()
        assert caught.value.retry_after_s > 0
        assert door.admission.num_waiting == 0


async def test_a_deadline_ends_the_wait(opened: Opened) -> None:
    async with opened(target(0)) as door:
        await door.taken()
        with pytest.raises(DeadlineExceeded):
            await door.ask(deadline_s=0.2)


async def test_a_wait_that_would_be_too_long_is_refused_at_once_and_says_how_long(opened: Opened) -> None:
    async with opened(target(0), wait_max_s=2.0) as door:
        line = door.admission._of("demo")
        line.slots.turnover.leave(1.5)  # how long slots are held
        await door.taken()
        first = door.ask()
        await door.until_waiting(1)
        with pytest.raises(Overloaded, match=r"1 sequences waiting.*3.0 s.*2 s that sequences wait") as caught:
            await door.ask()
        assert caught.value.retry_after_s == pytest.approx(3.0)
        with pytest.raises(Overloaded, match="its deadline allows"):
            await door.ask(Ticket(-1), deadline_s=1.0)
        urgent = door.ask(Ticket(-1))  # goes before the first one
        await door.until_waiting(2)
        first.cancel()
        urgent.cancel()


async def test_how_long_a_batch_holds_a_slot_is_no_forecast_for_others(opened: Opened) -> None:
    async with opened(target(0, 4)) as door:
        turnover = door.admission._of("demo").slots.turnover
        slots = [await door.ask(is_background=background) for background in (True, False)]
        assert door.admission.num_held == 1
        for slot, is_forecast in zip(slots, (False, True), strict=True):
            assert slot is not None
            door.admission.leave("demo", slot)
            assert bool(turnover.stays.weight) is is_forecast
        assert door.admission.num_held == 0
        assert not door.router._num_open


async def test_how_many_lines_wait_is_no_forecast_for_others(opened: Opened) -> None:
    async with opened(target(0)) as door:
        line = door.admission._of("demo")
        line.slots.turnover.leave(1.5)  # how long slots are held
        await door.taken()
        before_s = door.admission.retry_after_s("demo")
        lines = [door.ask(Ticket(BACKGROUND_PRIORITY), is_background=True) for _ in range(10)]
        await door.until_waiting(10)
        assert door.admission.retry_after_s("demo") == before_s
        for each in lines:
            each.cancel()


async def test_a_text_that_has_begun_is_asked_to_think_again_not_refused(opened: Opened) -> None:
    async with opened(target(0), wait_max_s=0.1) as door:
        await door.taken()
        assert await door.ask(Ticket(URGENT)) is None
        with pytest.raises(DeadlineExceeded):
            await door.ask(Ticket(URGENT), deadline_s=0.1)


async def test_who_goes_away_is_forgotten_and_takes_nothing_along(opened: Opened) -> None:
    async with opened(target(0)) as door:
        (slot,) = await door.taken()
        gone, waiting = door.ask(), door.ask()
        await door.until_waiting(2)
        gone.cancel()
        await asyncio.wait([gone])
        door.admission.leave("demo", slot)
        slot = await waiting
        last = door.ask()
        await door.until_waiting(1)
        # In the same moment: the slot that was given is given on.
        door.admission.leave("demo", slot)
        await asyncio.sleep(0)
        last.cancel()
        await asyncio.wait([last])
        assert (await door.ask()).target == door.targets[0]


async def test_many_that_come_and_go_leave_nothing_behind(opened: Opened) -> None:
    rng = random.Random(1)
    async with opened(target(0, 2), target(1, 3)) as door:

        async def one() -> None:
            # Not in a task of its own, which could have a slot that its cancelled asker never sees.
            slot = await door.admission.reserve(door.request(Ticket(rng.choice([0, 0, URGENT]), rng.choice("ab"))))
            try:
                await asyncio.sleep(rng.uniform(0, 0.01))
            finally:
                if slot is not None:
                    door.admission.leave("demo", slot)

        tasks = [asyncio.create_task(one()) for _ in range(300)]
        for task in tasks:
            if rng.random() < 0.3:
                await asyncio.sleep(rng.uniform(0, 0.003))
                task.cancel()
        done, pending = await asyncio.wait(tasks, timeout=20)
        assert not pending
        assert [error for task in done if not task.cancelled() and (error := task.exception())] == []
        assert not door.router._num_open
        assert door.admission.num_waiting == 0
        assert door.admission.num_held == 0


async def test_one_that_has_gone_without_saying_so_does_not_keep_the_loop(opened: Opened) -> None:
    """Its answer is cancelled, and its task has not run since: the next one is tried, and everybody else runs too."""
    async with opened(target(0)) as door:
        (slot,) = await door.taken()
        gone, waiting = door.ask(), door.ask()
        await door.until_waiting(2)
        door.admission.leave("demo", slot)
        gone.cancel()  # in the same moment: the queue looks before its task has run
        async with asyncio.timeout(5):
            assert (await waiting).target == door.targets[0]


async def test_room_is_made_for_those_that_go_first(opened: Opened) -> None:
    async with opened(target(0)) as door:
        await door.taken()
        last = door.ask(Ticket(1))
        await door.until_waiting(1)
        assert not door.admission.shed_for("demo", Ticket(1))
        assert door.admission.shed_for("demo", Ticket(0))
        with pytest.raises(Overloaded, match="others come first"):
            await last
        assert door.admission.num_waiting == 0


class TestShareOfSlots:
    async def test_while_others_wait_a_tenant_beyond_its_share_gets_no_new_slot(self, opened: Opened) -> None:
        async with opened(target(0, 8)) as door:
            held = await door.taken(*(Ticket(tenant="greedy") for _ in range(8)))  # nobody else wants them
            greedy = [door.ask(Ticket(tenant="greedy")) for _ in range(8)]
            await door.until_waiting(8)
            # What they were served is no reason to wait: it is what they hold.
            door.admission.count_output("demo", "modest", 10**6)
            modest = [door.ask(Ticket(tenant="modest")) for _ in range(8)]
            await door.until_waiting(16)
            for slot in held[:4]:
                door.admission.leave("demo", slot)
            await eventually(lambda: door.admission.num_waiting == 12, "four slots are given out")
            assert sum(task.done() for task in modest) == 4
            assert not any(task.done() for task in greedy)
            for task in (*greedy, *modest):
                task.cancel()

    async def test_a_slot_that_fits_nobody_else_is_had_by_whoever_it_fits(self, opened: Opened) -> None:
        async with opened(target(0, 2, max_model_len=1000), target(1, 3, max_model_len=10)) as door:
            held = await door.taken(*(Ticket(tenant="greedy") for _ in range(5)))
            modest = door.ask(Ticket(tenant="modest"), num_tokens=500)
            await door.until_waiting(1)
            greedy = door.ask(Ticket(tenant="greedy"))
            await door.until_waiting(2)
            door.admission.leave("demo", next(each for each in held if each.target.max_model_len == 10))
            assert (await greedy).tenant == "greedy"
            assert not modest.done()
            door.admission.leave("demo", next(each for each in held if each.target.max_model_len == 1000))
            assert (await modest).tenant == "modest"

    async def test_one_that_has_begun_is_not_held_back(self, opened: Opened) -> None:
        async with opened(target(0, 4)) as door:
            held = await door.taken(*(Ticket(tenant="greedy") for _ in range(4)))
            modest = door.ask(Ticket(tenant="modest"))
            begun = door.ask(Ticket(URGENT, "greedy"))
            await door.until_waiting(2)
            door.admission.leave("demo", held[0])
            assert (await begun).tenant == "greedy"
            assert not modest.done()
            modest.cancel()

    async def test_slots_are_counted_until_they_are_left(self, opened: Opened) -> None:
        async with opened(target(0, 3)) as door:
            for slot in await door.taken(*(Ticket(tenant=name) for name in "aab")):
                door.admission.leave("demo", slot)
            assert not door.admission._of("demo").slots.queue._num_held_of


@pytest.mark.parametrize("lengths", [[500] * 40, list(range(900, 500, -10)), list(range(500, 900, 10))])
async def test_sequences_that_fit_nowhere_hide_none_that_fits_however_many_they_are(
    opened: Opened, lengths: list[int]
) -> None:
    async with opened(target(0, max_model_len=1000), target(1, max_model_len=10)) as door:
        held = {slot.target.max_model_len: slot for slot in await door.taken(Ticket(), Ticket())}
        long = [door.ask(num_tokens=length) for length in lengths]
        await door.until_waiting(len(long))
        short = door.ask(num_tokens=5)
        await door.until_waiting(len(long) + 1)
        door.admission.leave("demo", held[10])
        async with asyncio.timeout(20):
            assert given_by(await short) == 10
        for task in long:
            assert not task.done()
            task.cancel()


async def test_a_long_sequence_has_the_first_slot_that_it_fits_before_short_ones_behind_it(
    opened: Opened,
) -> None:
    async with opened(target(0, max_model_len=1000), target(1, max_model_len=10)) as door:
        held = {slot.target.max_model_len: slot for slot in await door.taken(Ticket(), Ticket())}
        long = door.ask(num_tokens=500)
        await door.until_waiting(1)
        short = [door.ask(num_tokens=5) for _ in range(20)]
        await door.until_waiting(21)
        for _ in range(3):
            door.admission.leave("demo", held[10])
            done, pending = await asyncio.wait(short, return_when=asyncio.FIRST_COMPLETED, timeout=20)
            (held[10],), short = map(given, done), list(pending)
        door.admission.leave("demo", held[1000])
        async with asyncio.timeout(20):
            assert given_by(await long) == 1000
        assert not any(task.done() for task in short)
        for task in short:
            task.cancel()


def given_by(slot: Slot | None) -> int:
    """The longest context of the target that it is at."""
    assert slot is not None
    return slot.target.max_model_len


async def test_room_for_several_is_made_only_where_there_is_enough(opened: Opened) -> None:
    async with opened(target(0)) as door:
        await door.taken()
        waiting = [door.ask(Ticket(1)) for _ in range(3)]
        await door.until_waiting(3)
        assert not door.admission.shed_for("demo", Ticket(0), 4)
        assert door.admission.num_waiting == 3
        assert door.admission.shed_for("demo", Ticket(0), 2)
        assert door.admission.num_waiting == 1
        for task in waiting[1:]:
            with pytest.raises(Overloaded, match="others come first"):
                await task
        assert not waiting[0].done()
        waiting[0].cancel()
