"""Virtual time for asyncio: a loop that never waits, and whose processes can stop and go on as under SIGSTOP."""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Any, Final


class NothingLeftToDoError(Exception):
    """Every task waits for something that will never come."""


class TimeStandsStillError(Exception):
    """Somebody is busy without end and lets no time pass."""


_TURNS_MAX: Final = 20_000
"""Of the loop, at one moment."""


class _NoInput(selectors.BaseSelector):
    """Stands where the loop waits for sockets. There are none, so waiting is letting time pass."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_turns = 0  # since time has passed
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeftToDoError
        if timeout > 0:
            self.now_s += timeout
            self.num_turns = 0
        elif (turns := self.num_turns + 1) > _TURNS_MAX:
            raise TimeStandsStillError
        else:
            self.num_turns = turns
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(
            fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data
        )
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Out of `run_until_complete` come NothingLeftToDoError on a deadlock and TimeStandsStillError."""

    _ready: Any
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._no_input = _NoInput()
        self.work_s = 0.0
        """How long the work that a thread is given now would have taken; the work itself says so."""
        super().__init__(self._no_input)

    def forgive(self) -> None:
        """Whoever was busy without end is ended now, which takes a few turns more."""
        self._no_input.num_turns = 0

    def time(self) -> float:
        return self._no_input.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """A thread's work: done at once, known when as much time has passed as it says that it took."""
        answer: asyncio.Future[Any] = self.create_future()
        self.work_s = 0.0
        try:
            result, error = func(*args), None
        except Exception as raised:
            result, error = None, raised
        self.call_later(self.work_s, _settle, answer, result, error)
        return answer

    def take_out(self, is_concerned: Callable[[Context], bool]) -> Stopped:
        """All that is due now or later in contexts that a freeze concerns, which does not happen until `put_back`."""
        due = []
        for index, handle in enumerate(self._ready):
            if not handle._cancelled and is_concerned(handle._context):
                due.append(handle)
                self._ready[index] = _nothing(self)  # the loop has counted them
        later = [each for each in self._scheduled if not each._cancelled and is_concerned(each._context)]  # type: ignore[attr-defined]
        if later:
            taken = set(map(id, later))
            self._scheduled[:] = [each for each in self._scheduled if id(each) not in taken]
            heapq.heapify(self._scheduled)
        for timer in later:
            timer._scheduled = False  # type: ignore[attr-defined]
        return Stopped(due, sorted(later, key=asyncio.TimerHandle.when))

    def put_back(self, stopped: Stopped) -> None:
        """What was due meanwhile comes before anything else, late as it is."""
        now_s = self.time()
        self._ready.extend(each for each in stopped.due if not each._cancelled)
        for timer in stopped.later:
            if timer._cancelled:
                continue
            if timer.when() <= now_s:
                self._ready.append(timer)
            else:
                timer._scheduled = True  # type: ignore[attr-defined]
                heapq.heappush(self._scheduled, timer)


class Stopped:
    """What a process had still to do when it was stopped."""

    def __init__(self, due: list[asyncio.Handle], later: list[asyncio.TimerHandle]) -> None:
        self.due, self.later = due, later


def _settle(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


def _nothing(loop: asyncio.AbstractEventLoop) -> asyncio.Handle:
    handle = asyncio.Handle(lambda: None, (), loop, Context())
    handle.cancel()
    return handle
