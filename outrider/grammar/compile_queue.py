"""Queue of grammars to compile: each one once, a few at a time, with bounded waiting.

Invariant: no caller waits longer than `wait_max_s` for a grammar, and a caller that leaves removes its grammar from the
queue unless others want it too. A compilation that has begun cannot be stopped (it is one call into llguidance), so
`outrider.grammar.source` and the parser's limits keep it short, and it holds one slot of a few.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar

from outrider.concurrency.round_robin import RoundRobin
from outrider.errors import InvalidRequest, OutriderError, Overloaded, detached

_log = logging.getLogger(__name__)

STACK_BYTES: Final = 512 * 2**20
MAX_RUNNING: Final = 2  # at once, each with a stack of that size; other work needs the processor, too
MAX_CALLERS: Final = 256  # waiting callers, at most half of them of one owner
TIME_LIMIT_S: Final = 5.0  # per grammar; the worst one found took 0.5 s of processor time
WAIT_MAX_S: Final = 10.0  # until a caller has an answer

_NO_ROOM: Final = Overloaded("no room to compile the grammar now", retry_after_s=1.0)  # no thread, no stack
_FAILED: Final = OutriderError("compiling the grammar failed; see the log")  # a bug of ours or llguidance's

_T = TypeVar("_T")
_stack_size_lock = threading.Lock()  # the stack size of new threads is a setting of the process


@dataclass(slots=True, eq=False)
class _Job(Generic[_T]):
    key: bytes
    owner: str
    build: Callable[[], _T]
    callers: set[Future[_T]] = field(default_factory=set)
    began_at: float | None = None  # monotonic seconds


class CompileQueue(Generic[_T]):
    """Builds values by key, on threads of its own with deep stacks, and caches the latest. Thread-safe."""

    def __init__(self, max_kept: int, *, time_limit_s: float = TIME_LIMIT_S, wait_max_s: float = WAIT_MAX_S) -> None:
        self._max_kept = max_kept
        self._time_limit_s = time_limit_s
        self._wait_max_s = wait_max_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _T | InvalidRequest] = OrderedDict()  # least recently used first
        self._jobs: dict[bytes, _Job[_T]] = {}  # waiting or running
        self._waiting = RoundRobin[_Job[_T]]()  # by owner, in order of arrival
        self._running: Counter[str] = Counter()  # by owner
        self._num_callers: Counter[str] = Counter()  # by owner

    async def get_async(self, key: bytes, owner: str, build: Callable[[], _T]) -> _T:
        """Returns the value for a key, built or cached. Cancelling gives up the place in the queue.

        Raises the OutriderError that `build` raised, or a plain one for an unexpected error; InvalidRequest for a
        grammar that takes too long, and Overloaded when the queue is full or does not move. `owner` is the tenant:
        those with the fewest running compilations go first, and take turns.
        """
        future = self._ask(key, owner, build)
        try:
            async with asyncio.timeout(self._wait_max_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise self._too_late(key) from None

    def forget(self, key: bytes) -> None:
        """Removes a value, so that the next caller has it built again."""
        with self._lock:
            self._kept.pop(key, None)

    def _ask(self, key: bytes, owner: str, build: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        with self._lock:
            kept = self._kept.get(key)
            if key in self._kept:
                self._kept.move_to_end(key)
                if isinstance(kept, InvalidRequest):
                    raise copy.copy(kept)
                assert kept is not None
                future.set_result(kept)
                return future
            if self._num_callers.total() >= MAX_CALLERS or self._num_callers[owner] >= MAX_CALLERS // 2:
                raise Overloaded("too many grammars are waiting to be compiled", retry_after_s=1.0)
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job(key, owner, build)
                self._waiting.put(owner, key, job)
            job.callers.add(future)
            self._num_callers[owner] += 1
            unstarted = self._start_next()
        future.add_done_callback(lambda done: self._leave(job, owner, done))
        self._refuse(unstarted)
        return future

    def _leave(self, job: _Job[_T], owner: str, caller: Future[_T]) -> None:
        """Removes a caller that has its answer or has left."""
        with self._lock:
            self._num_callers -= Counter([owner])
            job.callers.discard(caller)
            if not job.callers and job.began_at is None and self._jobs.get(job.key) is job:
                self._waiting.forget(job.owner, job.key)
                del self._jobs[job.key]

    def _start_next(self) -> list[_Job[_T]]:
        """Starts as many jobs as there are slots, those of the owners with the fewest running first. The lock must be
        held.

        Returns those for which there is no thread or no stack.
        """
        unstarted = []
        while self._running.total() < MAX_RUNNING:
            job = self._waiting.take(lambda owner: self._running[str(owner)])
            if job is None:
                break
            self._running[job.owner] += 1
            job.began_at = time.monotonic()
            try:
                start_with_a_deep_stack(partial(self._run, job))
            except (RuntimeError, MemoryError):
                unstarted.append(job)
        return unstarted

    def _refuse(self, unstarted: list[_Job[_T]]) -> None:
        for job in unstarted:
            self._finish(job, _NO_ROOM)

    def _run(self, job: _Job[_T]) -> None:
        began_s = time.thread_time()
        outcome: _T | OutriderError
        try:
            outcome = job.build()
        except OutriderError as error:
            outcome = detached(error)  # it is kept for later callers
        except (RuntimeError, MemoryError):
            outcome = _NO_ROOM
        except BaseException:  # llguidance's Rust panics are no Exceptions; free the slot in any case
            _log.exception("compiling a grammar failed")
            outcome = _FAILED
        # Processor time, so that a busy machine condemns no grammar for good.
        if time.thread_time() - began_s > self._time_limit_s:
            outcome = self._too_slow()
        self._finish(job, outcome)

    def _finish(self, job: _Job[_T], outcome: _T | OutriderError) -> None:
        with self._lock:
            self._running -= Counter([job.owner])
            del self._jobs[job.key]
            if isinstance(outcome, InvalidRequest) or not isinstance(outcome, OutriderError):
                self._kept[job.key] = outcome
                while len(self._kept) > self._max_kept:
                    self._kept.popitem(last=False)
            callers = list(job.callers)
            unstarted = self._start_next()
        for caller in callers:
            with contextlib.suppress(InvalidStateError):  # it has left
                if isinstance(outcome, OutriderError):
                    caller.set_exception(copy.copy(outcome))  # each caller gets its own traceback
                else:
                    caller.set_result(outcome)
        self._refuse(unstarted)

    def _too_late(self, key: bytes) -> OutriderError:
        with self._lock:
            job = self._jobs.get(key)
            began_at = None if job is None else job.began_at
        if began_at is not None and time.monotonic() - began_at >= self._time_limit_s:
            return self._too_slow()
        return Overloaded(
            f"the grammar was not compiled within {self._wait_max_s:g} s: others are before it",
            retry_after_s=1.0,
        )

    def _too_slow(self) -> InvalidRequest:
        return InvalidRequest(
            "grammar",
            f"the grammar takes longer than {self._time_limit_s:g} s to compile; one with fewer properties, "
            "alternatives or repetitions takes less",
        )


def start_with_a_deep_stack(function: Callable[[], object]) -> threading.Thread:
    """Runs the function on a new thread with a deep stack.

    llguidance follows references by recursion. A chain of them as long as a grammar may be would overflow a normal
    stack, which ends the process. Only touched pages of this one take memory.
    """
    with _stack_size_lock:
        previous_bytes = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=function, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(previous_bytes)
    return thread


def on_a_deep_stack(function: Callable[[], _T]) -> tuple[_T, float]:
    """Runs the function on such a thread, and waits; returns its result and its processor time in seconds."""
    results, errors = list[tuple[_T, float]](), list[BaseException]()

    def run() -> None:
        try:
            results.append((function(), time.thread_time()))
        except BaseException as error:
            errors.append(detached(error))

    start_with_a_deep_stack(run).join()
    if errors:
        raise errors.pop()  # by no name: its traceback leads to this frame
    return results[0]
