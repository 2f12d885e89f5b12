"""The queue for places at targets."""

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

from coordinator.admission import Admission, Place, Wish
from coordinator.fair_queue import URGENT, Ticket
from coordinator.reservations import Reservations
from coordinator.routing import Router
from outrider.errors import DeadlineExceeded, Overloaded
from outrider.worker_record import Snapshot, WorkerRecord
from tests.coordinator.fakes import eventually, record_of

FINGERPRINT = "0123456789abcdef"


def target(number: int, num_places: int = 1, **changes: Any) -> WorkerRecord:
    record = record_of(
        *("target", f"127.0.0.1:{7000 + number}", FINGERPRINT),
        max_num_seqs=num_places,
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
            model="demo",
            num_tokens=num_tokens,
            excluded=(),
        )

    def is_hopeless(self, num_tokens: int) -> bool:
        snapshot = Snapshot(targets=tuple(self.targets))
        return not self.router.expects_target(snapshot, model="demo", num_tokens=num_tokens, excluded=())

    def ask(
        self, ticket: Ticket | None = None, *, num_tokens: int = 10, deadline_s: float = 60.0
    ) -> asyncio.Task[Place | None]:
        now_s = asyncio.get_running_loop().time()
        wish = Wish(
            "demo",
            ticket or Ticket(),
            lambda: self.rank(num_tokens),
            lambda: self.is_hopeless(num_tokens),
            f"token {next(self.numbers)}",
            now_s,
            now_s + deadline_s,
            num_tokens,
            frozenset,
        )
        return asyncio.create_task(self.admission.place(wish))

    async def taken(self, *tickets: Ticket) -> list[Place]:
        places = [await self.ask(ticket) for ticket in tickets or (Ticket(),)]
        return [place for place in places if place is not None]

    async def until_waiting(self, num: int) -> None:
        await eventually(lambda: self.admission.num_waiting == num, f"{num} wait")


def given(task: asyncio.Task[Place | None]) -> Place:
    place = task.result()
    assert place is not None
    return place


Opened = Callable[..., Any]


@pytest.fixture
def opened() -> Opened:
    @asynccontextmanager
    async def make(
        *targets: WorkerRecord, wait_max_s: float = 30.0, weights: dict[str, float] | None = None
    ) -> AsyncIterator[Door]:
        now_s = asyncio.get_running_loop().time
        router = Router(FINGERPRINT, (), random.Random(0), quarantine_s=3.0)
        admission = Admission(
            router, Reservations(None, now_s), now_s, wait_max_s=wait_max_s, weights=weights or {}
        )
        try:
            yield Door(list(targets), admission, router)
        finally:
            await admission.close()

    return make


async def test_a_place_that_is_free_is_had_at_once(opened: Opened) -> None:
    async with opened(target(0)) as door:
        place = await door.ask()
        assert place.target == door.targets[0]
        assert not door.router.has_room(door.targets[0])


async def test_without_any_target_there_is_no_waiting(opened: Opened) -> None:
    async with opened() as door:
        assert await door.ask() is None


async def test_one_that_leaves_lets_the_next_one_in(opened: Opened) -> None:
    async with opened(target(0)) as door:
        (place,) = await door.taken()
        waiting = door.ask()
        await door.until_waiting(1)
        door.admission.leave("demo", place)
        assert (await waiting).target == door.targets[0]
        assert door.admission.num_waiting == 0


async def test_priorities_decide_whose_turn_it_is(opened: Opened) -> None:
    async with opened(target(0)) as door:
        (place,) = await door.taken()
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
            door.admission.leave("demo", place)
            (done,), pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=5)
            place, waiting = given(done), list(pending)
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
        small = next(place for place in held if place.target.max_model_len == 10)
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
        line = door.admission._line("demo")
        line.turnover.leave(1.5)  # what places are held for
        await door.taken()
        first = door.ask()
        await door.until_waiting(1)
        with pytest.raises(Overloaded, match=r"1 texts waiting.*3.0 s.*2 s that texts wait") as caught:
            await door.ask()
        assert caught.value.retry_after_s == pytest.approx(3.0)
        with pytest.raises(Overloaded, match="its deadline allows"):
            await door.ask(Ticket(-1), deadline_s=1.0)
        urgent = door.ask(Ticket(-1))  # goes before the first one
        await door.until_waiting(2)
        first.cancel()
        urgent.cancel()


async def test_a_text_that_has_begun_is_asked_to_think_again_not_refused(opened: Opened) -> None:
    async with opened(target(0), wait_max_s=0.1) as door:
        await door.taken()
        assert await door.ask(Ticket(URGENT)) is None
        with pytest.raises(DeadlineExceeded):
            await door.ask(Ticket(URGENT), deadline_s=0.1)


async def test_who_goes_away_is_forgotten_and_takes_nothing_along(opened: Opened) -> None:
    async with opened(target(0)) as door:
        (place,) = await door.taken()
        gone, waiting = door.ask(), door.ask()
        await door.until_waiting(2)
        gone.cancel()
        await asyncio.wait([gone])
        door.admission.leave("demo", place)
        place = await waiting
        last = door.ask()
        await door.until_waiting(1)
        # In the same moment: the place that was given is given on.
        door.admission.leave("demo", place)
        await asyncio.sleep(0)
        last.cancel()
        await asyncio.wait([last])
        assert (await door.ask()).target == door.targets[0]


async def test_many_that_come_and_go_leave_nothing_behind(opened: Opened) -> None:
    rng = random.Random(1)
    async with opened(target(0, 2), target(1, 3)) as door:

        async def one() -> None:
            place = await door.ask(Ticket(rng.choice([0, 0, URGENT]), rng.choice("ab")))
            try:
                await asyncio.sleep(rng.uniform(0, 0.01))
            finally:
                if place is not None:
                    door.admission.leave("demo", place)

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
        (place,) = await door.taken()
        gone, waiting = door.ask(), door.ask()
        await door.until_waiting(2)
        door.admission.leave("demo", place)
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
