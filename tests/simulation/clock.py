"""Virtual time for asyncio: a loop that never waits, and whose processes can stop and go on as under SIGSTOP.

It turns as `asyncio.SelectorEventLoop` does, callback for callback and in the same order, but has no sockets to look
at: where that one would wait for them, time passes. A simulated run is little else than thousands of small callbacks,
so handles and timers are as light as they can be; a timer is the moment itself, which the heap compares without Python.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import threading
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, Final


class NothingLeftToDoError(Exception):
    """Every task waits for something that will never come."""


class TimeStandsStillError(Exception):
    """Somebody is busy without end and lets no time pass."""


_TURNS_MAX: Final = 20_000
"""Turns of the loop without any time passing, after which `TimeStandsStillError` is raised."""
_RESOLUTION_S: Final = 1e-9
"""Timers that are no further apart are due together."""
_CANCELLED_TIMERS_MIN: Final = 100
_CANCELLED_SHARE_MAX: Final = 0.5
"""The share of cancelled timers, of more than so many, above which they are removed from the heap, as asyncio does."""


class Handle:
    """A callback that is due now. Cancelled where it has none."""

    __slots__ = ("args", "callback", "context")

    callback: Callable[..., object] | None
    args: tuple[Any, ...]

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> None:
        self.callback, self.args, self.context = callback, args, context

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None


class Timer(float):
    """A moment at which a callback is due, in seconds. Cancelled where it has none."""

    __slots__ = ("args", "callback", "context", "is_scheduled", "loop")

    callback: Callable[..., object] | None
    args: tuple[Any, ...]
    context: Context
    loop: SimulatedLoop
    is_scheduled: bool

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback, self.args = None, ()
            if self.is_scheduled:
                self.loop.num_cancelled += 1

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return float(self)


class SimulatedLoop(asyncio.BaseEventLoop):
    """Starts at 0 s. Out of `run_until_complete` come NothingLeftToDoError on a deadlock and TimeStandsStillError."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._num_turns = 0  # since time has passed
        self._due: deque[Handle | Timer] = deque()
        self._timers: list[Timer] = []  # a heap
        self.num_cancelled = 0  # of the timers in the heap
        self._thread_s: float | None = None  # what a thread's work has taken; None while the loop itself is at work
        self.on_held_up: Callable[[float], object] = lambda work_s: None
        """Told how long work that is done on the loop itself would hold it up."""

    def forgive(self) -> None:
        """Whoever was busy without end is ended now, which takes a few turns more."""
        self._num_turns = 0

    def time(self) -> float:
        return self._now_s

    # What is to be done.

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context)
        self._due.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]
    """There is one thread."""

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        timer = Timer(when)
        timer.callback, timer.args, timer.loop = callback, args, self
        timer.context = copy_context() if context is None else context
        timer.is_scheduled = True
        heapq.heappush(self._timers, timer)
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """A thread's work: done at once, known when as much time has passed as it takes."""
        answer: asyncio.Future[Any] = self.create_future()
        self._thread_s = 0.0
        try:
            result, error = func(*args), None
        except Exception as raised:
            result, error = None, raised
        self.call_later(self._thread_s, _settle, answer, result, error)
        self._thread_s = None
        return answer

    @contextmanager
    def on_thread(self) -> Iterator[None]:
        """Counts work that is done within as a thread's, which does not hold up the loop."""
        before, self._thread_s = self._thread_s, 0.0
        try:
            yield
        finally:
            self._thread_s = before

    def work(self, work_s: float) -> None:
        """Adds computing time of the running code: on a thread, or on the loop, where it holds others up."""
        if self._thread_s is None:
            self.on_held_up(work_s)
        else:
            self._thread_s += work_s

    # Turns.

    def run_forever(self) -> None:
        """Until `stop`."""
        self._check_closed()  # type: ignore[attr-defined]
        self._check_running()  # type: ignore[attr-defined]
        hooks_before = sys.get_asyncgen_hooks()
        self._thread_id: int | None = threading.get_ident()
        sys.set_asyncgen_hooks(finalizer=self._asyncgen_finalizer_hook)  # type: ignore[attr-defined]
        events._set_running_loop(self)
        try:
            self._turn_until_stopped()
        finally:
            self._stopping = False
            self._thread_id = None
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks_before)

    def _turn_until_stopped(self) -> None:
        due, next_due = self._due, self._due.popleft
        while not self._stopping:
            self._sort_out_cancelled()
            if due:
                if self._num_turns >= _TURNS_MAX:
                    raise TimeStandsStillError
                self._num_turns += 1
            else:
                self._let_time_pass()
            timers, until_s = self._timers, self._now_s + _RESOLUTION_S
            while timers and timers[0] < until_s:
                timer = heapq.heappop(timers)
                timer.is_scheduled = False
                due.append(timer)
            for _ in range(len(due)):  # what these add is due in the next turn
                handle = next_due()
                if (callback := handle.callback) is None:
                    continue
                try:
                    handle.context.run(callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"in callback {callback}", "exception": error})
            del handle, callback

    def _let_time_pass(self) -> None:
        """Until the next timer."""
        if not self._timers:
            raise NothingLeftToDoError
        left_s = self._timers[0] - self._now_s
        if left_s > 0:
            self._now_s += left_s
            self._num_turns = 0

    def _sort_out_cancelled(self) -> None:
        timers = self._timers
        if len(timers) > _CANCELLED_TIMERS_MIN and self.num_cancelled > _CANCELLED_SHARE_MAX * len(timers):
            self._timers = [timer for timer in timers if timer.callback is not None]
            heapq.heapify(self._timers)
            self.num_cancelled = 0
            return
        while timers and timers[0].callback is None:
            heapq.heappop(timers).is_scheduled = False
            self.num_cancelled -= 1

    # Processes that stop.

    def take_out(self, is_concerned: Callable[[Context], bool]) -> Stopped:
        """Removes the callbacks and timers of contexts that a freeze concerns; they do not run until `put_back`."""
        due = []
        for index, handle in enumerate(self._due):
            if handle.callback is not None and is_concerned(handle.context):
                due.append(handle)
                self._due[index] = _NOTHING  # the loop has counted them
        later = [each for each in self._timers if each.callback is not None and is_concerned(each.context)]
        if later:
            taken = set(map(id, later))
            self._timers[:] = [each for each in self._timers if id(each) not in taken]
            heapq.heapify(self._timers)
        for timer in later:
            timer.is_scheduled = False
        return Stopped(due, sorted(later))

    def put_back(self, stopped: Stopped) -> None:
        """Restores removed callbacks and timers; those that became due meanwhile run at once, late."""
        self._due.extend(each for each in stopped.due if each.callback is not None)
        for timer in stopped.later:
            if timer.callback is None:
                continue
            if timer <= self._now_s:
                self._due.append(timer)
            else:
                timer.is_scheduled = True
                heapq.heappush(self._timers, timer)


class Stopped:
    """Callbacks and timers that a process still had when it was frozen."""

    def __init__(self, due: list[Handle | Timer], later: list[Timer]) -> None:
        self.due, self.later = due, later


def _settle(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


_NOTHING: Final = Handle(lambda: None, (), Context())
_NOTHING.cancel()
