"""Admission: one replica's queues for slots at targets, and the reservations that follow.

The shell around `coordinator.placement.slot_queue`, one queue per model: it reserves slots in Redis and wakes the
requests that wait.

Invariant: a `Slot` is reserved until it is left; one that nobody takes is left at once.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from coordinator.placement.fair_queue import Ticket
from coordinator.placement.placement_request import PlacementRequest
from coordinator.placement.reservations import Reservations
from coordinator.placement.routing import Router
from coordinator.placement.slot_queue import Offer, Round, Slot, SlotQueue
from outrider.concurrency.background import end_tasks
from outrider.errors import Overloaded

TICK_S: Final = 0.1
"""Interval at which the queue looks for slots that other replicas freed."""

Answer = asyncio.Future[Slot | None]
"""Answer to a waiting request; None if no target serves it at present."""


@dataclass(slots=True)
class _ModelQueue:
    """The queue of one model, and the task that gives out its slots."""

    slots: SlotQueue
    answers: dict[Ticket, Answer] = field(default_factory=dict)
    has_changed: asyncio.Event = field(default_factory=asyncio.Event)
    pump: asyncio.Task[None] | None = None


class Admission:
    """Reserves slots for the sequences of one replica. Times are in seconds on `now_s`."""

    def __init__(
        self,
        router: Router,
        reservations: Reservations,
        now_s: Callable[[], float],
        *,
        wait_max_s: float,
        weights: Mapping[str, float],
    ) -> None:
        """`wait_max_s`: longest wait of a sequence that has not begun; `weights`: of tenants, by default 1."""
        self._router = router
        self._reservations = reservations
        self._now_s = now_s
        self._wait_max_s = wait_max_s
        self._weights = weights
        self._models: dict[str, _ModelQueue] = {}
        reservations.on_released = self._wake_all

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the queues."""
        return sum(len(model_queue.slots) for model_queue in self._models.values())

    @property
    def num_held(self) -> int:
        """Number of slots given to this replica's sequences."""
        return sum(model_queue.slots.num_held for model_queue in self._models.values())

    async def close(self) -> None:
        """Stops giving out slots."""
        await end_tasks(*(model_queue.pump for model_queue in self._models.values()))

    def check_room(self, model: str, ticket: Ticket, time_left_s: float) -> None:
        """Raises Overloaded if `reserve` would, as of now. It is called before the prompt is read: there may be ten
        times more requests than can be served."""
        self._of(model).slots.check_room(ticket, time_left_s)

    async def reserve(self, request: PlacementRequest) -> Slot | None:
        """Reserves a slot; the caller leaves it with `leave`. None if no target serves such a sequence at present, and
        if one that has begun should choose again. Raises Overloaded, DeadlineExceeded, and Unavailable if no target has
        answered lately."""
        model_queue = self._of(request.model)
        if len(model_queue.slots) == 0:
            offer = model_queue.slots.offer(request, self._now_s())
            slot = await self._take(model_queue, offer)
            if slot is not None or (not offer.ranked and request.is_hopeless()):
                return slot
        until_s = model_queue.slots.push(request, self._now_s())
        answer: Answer = asyncio.get_running_loop().create_future()
        model_queue.answers[request.ticket] = answer
        if model_queue.pump is None or model_queue.pump.done():
            model_queue.pump = asyncio.create_task(
                self._give_out(model_queue), name=f"slots at targets of {request.model}"
            )
        is_taken = False
        try:
            async with asyncio.timeout(until_s - self._now_s()):
                slot = await answer
            is_taken = True
            return slot
        except TimeoutError:
            # The answer came in time: the timer fired first on a delayed event loop.
            if (slot := _given(answer)) is not None:
                is_taken = True
                return slot
            if request.is_urgent and self._now_s() < request.deadline_s:
                return None
            raise model_queue.slots.timeout_error(request, self._now_s()) from None
        finally:
            model_queue.slots.forget(request)
            model_queue.answers.pop(request.ticket, None)
            if not is_taken and (slot := _given(answer)) is not None:
                self.leave(request.model, slot)

    def leave(self, model: str, slot: Slot) -> None:
        """Frees the slot of a sequence that has left its target."""
        self._of(model).slots.leave(slot, self._now_s())
        self._reservations.give_back(slot.target, slot.token)

    def count_output(self, model: str, tenant: str, num_tokens: int) -> None:
        """Counts a tenant's generated tokens; they decide who is next."""
        self._of(model).slots.queue.count_output(tenant, num_tokens)

    def shed_for(self, model: str, newcomer: Ticket, num: int = 1) -> bool:
        """Refuses `num` waiting sequences that are less entitled than a newcomer's, and so their whole requests. False,
        and nobody is refused, if there are not so many."""
        model_queue = self._of(model)
        shed = model_queue.slots.shed_for(newcomer, num)
        refusal = Overloaded("there is no room to wait, and others come first", model_queue.slots.retry_after_s)
        for request in shed:
            answer = model_queue.answers[request.ticket]
            if not answer.done():
                answer.set_exception(copy.copy(refusal))  # each waiter gets its own traceback
        return bool(shed)

    def retry_after_s(self, model: str) -> float:
        """Time after which a refused request should come back: about when all that wait now have had slots."""
        return self._of(model).slots.retry_after_s

    def _of(self, model: str) -> _ModelQueue:
        if model not in self._models:  # bounded by the models that targets have registered
            slots = SlotQueue(model, self._router, wait_max_s=self._wait_max_s, weights=self._weights)
            self._models[model] = _ModelQueue(slots)
        return self._models[model]

    def _wake_all(self) -> None:
        for model_queue in self._models.values():
            model_queue.has_changed.set()

    async def _take(self, model_queue: _ModelQueue, offer: Offer) -> Slot | None:
        """Reserves a slot at the first of the targets asked that has one."""
        now_s, token = self._now_s(), offer.request.token
        target = await self._reservations.take("target", offer.asked, token, offer.limits)
        return model_queue.slots.take(offer, target, now_s if target is None else self._now_s())

    async def _give_out(self, model_queue: _ModelQueue) -> None:
        """Gives out slots until nobody waits."""
        while len(model_queue.slots) > 0:
            model_queue.has_changed.clear()
            if not await self._give_one(model_queue):
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await model_queue.has_changed.wait()

    async def _give_one(self, model_queue: _ModelQueue) -> bool:
        """Gives out one slot; False if no request can have one now."""
        round_ = Round(model_queue.slots)
        while (offer := round_.next(self._now_s())) is not None:
            request, answer = offer.request, model_queue.answers[offer.request.ticket]
            if answer.done():  # nobody waits for it; its task has yet to notice
                model_queue.slots.forget(request)
                return True
            slot = await self._take(model_queue, offer)
            if answer.done():
                if slot is not None:
                    self.leave(request.model, slot)
                return True
            if slot is not None or (not offer.ranked and request.is_hopeless()):
                model_queue.slots.forget(request)
                answer.set_result(slot)
                return True
            round_.found_full(offer)
        return False


def _given(answer: Answer) -> Slot | None:
    if not answer.done() or answer.cancelled() or answer.exception() is not None:
        return None
    return answer.result()
