"""The queue of texts that wait for a place at a target: one for each model, in each replica.

A text is sent to a target when there is a place for it, and waits here until then: whose turn it is, priorities and the
tenants' shares decide (`coordinator.fair_queue`), and whichever target has room first takes it. One that would wait for
longer than it may is refused before any work, and told when to come back.

Every free slot is offered in the order of turns. A sequence is passed only by those that fit where it does not: a long
one waits for a roomy target, and of every slot there it has the first refusal before those behind it; short ones behind
it are not kept from the other targets, however many long ones there are.

Invariant: a `Place` is reserved until it is left, and one that nobody took is left at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from coordinator.fair_queue import URGENT, FairQueue, Ticket
from coordinator.reservations import Reservations
from coordinator.routing import Router
from coordinator.slot_search import Restrictions, SlotSearch
from outrider.background import end_tasks
from outrider.errors import DeadlineExceeded, Overloaded, Unavailable
from outrider.turnover import Turnover, retry_after_s
from outrider.worker_record import WorkerRecord

TICK_S: Final = 0.1
"""How often is looked for places that came free elsewhere."""
URGENT_WAIT_S: Final = 1.0
"""A text that has begun waits as long at a time; then there may be targets for it that it had left before."""


@dataclass(slots=True, eq=False)
class Wish:
    """A text that needs a place."""

    model: str
    ticket: Ticket
    rank: Callable[[], Sequence[WorkerRecord]]  # targets as of now, the one to take first
    is_hopeless: Callable[[], bool]  # whether waiting for a target is in vain, where there is none as of now
    token: str  # of its reservation, never the same twice
    since_s: float  # when it first wanted one
    deadline_s: float
    # What decides which targets `rank` names, beside who is alive: they take so many tokens, and these keep some away.
    num_tokens: int
    restrictions: Callable[[], Restrictions]

    @property
    def is_urgent(self) -> bool:
        return self.ticket.priority == URGENT


@dataclass(frozen=True, slots=True)
class Place:
    """At a target, of one text."""

    target: WorkerRecord
    token: str
    since_s: float
    tenant: str = ""


@dataclass(slots=True)
class _Line:
    """What waits for one model, and for what; the answer is None where there is nobody to ask."""

    queue: FairQueue
    turnover: Turnover = field(default_factory=Turnover)
    num_held: int = 0  # places of this replica's texts
    waiting: dict[Ticket, tuple[Wish, asyncio.Future[Place | None]]] = field(default_factory=dict)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    pump: asyncio.Task[None] | None = None


class Admission:
    """Of one replica. Times are in seconds on `now_s`."""

    def __init__(
        self,
        router: Router,
        reservations: Reservations,
        now_s: Callable[[], float],
        *,
        wait_max_s: float,
        weights: Mapping[str, float],
    ) -> None:
        """`wait_max_s`: longest wait of a text that has not begun; `weights`: of tenants, 1 for all others."""
        self._router = router
        self._reservations = reservations
        self._now_s = now_s
        self._wait_max_s = wait_max_s
        self._weights = weights
        self._lines: dict[str, _Line] = {}
        reservations.on_released = self._tell_all

    @property
    def num_waiting(self) -> int:
        """Texts in the queue."""
        return sum(len(line.queue) for line in self._lines.values())

    @property
    def num_held(self) -> int:
        """Places of this replica's texts."""
        return sum(line.num_held for line in self._lines.values())

    async def close(self) -> None:
        """Gives out nothing any more."""
        await end_tasks(*(line.pump for line in self._lines.values()))

    def check_room(self, model: str, ticket: Ticket, time_left_s: float) -> None:
        """Raises Overloaded where `place` would, as things stand: before as much as a look at the prompt, for there may
        be ten times more of them than can be served."""
        line = self._line(model)
        if line.queue:
            self._check_wait(line, model, ticket, min(self._wait_max_s, time_left_s), time_left_s)

    async def place(self, wish: Wish) -> Place | None:
        """A place, to be left with `leave`. None where no target serves such a text at present, and where one that has
        begun should think again. Raises Overloaded, Unavailable where all that there are did not answer of late, and
        DeadlineExceeded."""
        line = self._line(wish.model)
        if not line.queue:
            ranked = wish.rank()
            place = await self._take(line, wish, ranked)
            if place is not None or (not ranked and wish.is_hopeless()):
                return place
        until_s = self._waits_until_s(line, wish)
        answer = asyncio.get_running_loop().create_future()
        line.queue.push(wish.ticket)
        line.waiting[wish.ticket] = wish, answer
        if line.pump is None or line.pump.done():
            line.pump = asyncio.create_task(self._give_out(line), name=f"places at targets of {wish.model}")
        is_taken = False
        try:
            async with asyncio.timeout(until_s - self._now_s()):
                place = await answer
            is_taken = True
            return place
        except TimeoutError:
            # In time after all: the timer fired first on a loop that had been held up.
            if (place := _given(answer)) is not None:
                is_taken = True
                return place
            if wish.is_urgent and self._now_s() < wish.deadline_s:
                return None
            raise self._came_too_late(line, wish) from None
        finally:
            self._forget(line, wish)
            if not is_taken and (place := _given(answer)) is not None:
                self.leave(wish.model, place)

    def leave(self, model: str, place: Place) -> None:
        """The text is no longer there."""
        self._router.close_session(place.target)
        line = self._line(model)
        line.num_held -= 1
        line.queue.leave_slot(place.tenant)
        line.turnover.leave(self._now_s() - place.since_s)
        self._reservations.give_back(place.target, place.token)

    def count_output(self, model: str, tenant: str, num_tokens: int) -> None:
        """What a tenant is served decides whose turn comes next."""
        self._line(model).queue.count_output(tenant, num_tokens)

    def shed_for(self, model: str, newcomer: Ticket, num: int = 1) -> bool:
        """Refuses `num` sequences that wait and are less entitled than those of a newcomer, and with them the rest of
        their requests. False, and nobody is refused, when there are not so many."""
        line = self._line(model)
        shed: list[Ticket] = []
        while len(shed) < num and (ticket := line.queue.less_entitled_than(newcomer)) is not None:
            line.queue.remove(ticket)
            shed.append(ticket)
        if len(shed) < num:
            for ticket in shed:
                line.queue.push(ticket)
            return False
        refusal = Overloaded("there is no room to wait, and others come first", self.retry_after_s(model))
        for ticket in shed:
            _, answer = line.waiting[ticket]
            if not answer.done():
                answer.set_exception(refusal)
        return True

    def retry_after_s(self, model: str) -> float:
        """When one that is refused now should come back: about when all that wait have had their turns."""
        line = self._line(model)
        return retry_after_s(line.turnover.wait_s(len(line.queue), line.num_held))

    def _line(self, model: str) -> _Line:
        if model not in self._lines:  # as many as there are models that targets have registered
            self._lines[model] = _Line(FairQueue(self._weights))
        return self._lines[model]

    def _tell_all(self) -> None:
        for line in self._lines.values():
            line.has_news.set()

    def _waits_until_s(self, line: _Line, wish: Wish) -> float:
        """Raises where that would be in vain."""
        now_s = self._now_s()
        if wish.is_urgent:
            return min(now_s + URGENT_WAIT_S, wish.deadline_s)
        until_s = min(wish.since_s + self._wait_max_s, wish.deadline_s)
        if now_s >= until_s:
            raise self._came_too_late(line, wish)
        self._check_wait(line, wish.model, wish.ticket, until_s - now_s, wish.deadline_s - now_s)
        return until_s

    def _check_wait(
        self, line: _Line, model: str, ticket: Ticket, patience_s: float, time_left_s: float
    ) -> None:
        num_ahead = line.queue.num_ahead(ticket.priority, ticket.tenant)
        wait_s = line.turnover.wait_s(num_ahead, line.num_held)
        if wait_s > patience_s:
            limit = (
                "its deadline allows"
                if patience_s == time_left_s
                else f"the {self._wait_max_s:g} s that texts wait"
            )
            raise Overloaded(
                f"every target of {model} is taken; with {len(line.queue)} texts waiting, this one's turn would come "
                f"in about {wait_s:.1f} s, which is more than {limit}",
                self.retry_after_s(model),
            )

    def _came_too_late(self, line: _Line, wish: Wish) -> Overloaded | Unavailable | DeadlineExceeded:
        if self._now_s() >= wish.deadline_s:
            return DeadlineExceeded("no target had a place before the request's deadline")
        if not wish.rank():
            return Unavailable(f"no target of {wish.model} has answered within {self._wait_max_s:g} s")
        return Overloaded(
            f"every target of {wish.model} is full: none had a place within {self._wait_max_s:g} s",
            self.retry_after_s(wish.model),
        )

    def _forget(self, line: _Line, wish: Wish) -> None:
        if wish.ticket in line.queue:
            line.queue.remove(wish.ticket)
        line.waiting.pop(wish.ticket, None)

    async def _take(self, line: _Line, wish: Wish, ranked: Sequence[WorkerRecord]) -> Place | None:
        """A place at the first of these targets that has one."""
        now_s, router = self._now_s(), self._router
        asked = [worker for worker in ranked if router.may_ask(worker, now_s, is_urgent=wish.is_urgent)]
        limits = [router.place_limit(worker, is_urgent=wish.is_urgent) for worker in asked]
        target = await self._reservations.take("target", asked, wish.token, limits)
        if target is None:
            return None
        router.open_session(target)
        line.num_held += 1
        tenant = wish.ticket.tenant
        line.queue.take_slot(tenant)
        line.queue.begin(wish.ticket)
        return Place(target, wish.token, self._now_s(), tenant)

    async def _give_out(self, line: _Line) -> None:
        """Until nobody waits."""
        while line.queue:
            line.has_news.clear()
            if not await self._give_one(line):
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await line.has_news.wait()

    async def _give_one(self, line: _Line) -> bool:
        """False when nobody can have a place now."""
        search = SlotSearch()
        for ticket in line.queue.turns():
            if ticket not in line.waiting:  # it has left while another one was tried
                continue
            wish, answer = line.waiting[ticket]
            if answer.done():  # nobody waits for it any more; its task has not come to say so
                if ticket not in line.queue:  # it has been answered
                    continue
                line.queue.remove(ticket)
                return True
            restrictions = wish.restrictions()
            if search.is_in_vain(wish.num_tokens, restrictions):
                continue
            ranked = wish.rank()
            place = await self._take(line, wish, search.not_full(ranked))
            if answer.done():
                if place is not None:
                    self.leave(wish.model, place)
                return True
            if place is not None or (not ranked and wish.is_hopeless()):
                line.queue.remove(ticket)
                answer.set_result(place)
                return True
            search.found_full(wish.num_tokens, restrictions, ranked)
            shortest = _shortest(line, restrictions)
            if shortest is not None:
                search.look_shorter(restrictions, shortest.rank())
        return False


def _shortest(line: _Line, restrictions: Restrictions) -> Wish | None:
    """Of the sequences that wait and are restricted so."""
    alike = (
        wish
        for wish, answer in line.waiting.values()
        if not answer.done() and wish.restrictions() == restrictions
    )
    return min(alike, key=lambda wish: wish.num_tokens, default=None)


def _given(answer: asyncio.Future[Place | None]) -> Place | None:
    if not answer.done() or answer.cancelled() or answer.exception() is not None:
        return None
    return answer.result()
