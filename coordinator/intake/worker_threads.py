"""Threads for large work that would block the event loop: parsing, tokenizing and writing long requests and answers.

The work either releases the interpreter's lock (`tokenizers`, see `Tokenizer.encode`) or is Python code, which releases
it every few milliseconds. A thread does not help against a call of C code that keeps the lock: such a call needs a
bound of its own (`coordinator.intake.json_size`).

Work that has begun cannot be stopped: the longest prompt takes 0.3 to 0.5 s of processor time to tokenize, by its text.
So tenants take turns, and work on up to SHORT_CHARS, which takes some 30 ms, has threads of its own, where it never
waits for longer work.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from outrider.concurrency.round_robin import RoundRobin
from outrider.errors import Overloaded

ResultT = TypeVar("ResultT")
Arguments = ParamSpec("Arguments")

THREADS_MAX: Final = 4
PENDING_MAX: Final = 512
"""Most pieces of work that run or wait; beyond it, work of new requests is refused. A tenant may have as many as are
still free, so that one alone leaves half of them to others."""
PENDING_CHARS_MAX: Final = 1 << 30
"""Most characters or values that they may be about, together, of which a tenant has as much: requests that wait are
kept whole."""
SHORT_CHARS: Final = 64 << 10
"""Length in characters, or number of values of an answer, up to which work is short."""


class WorkerThreads:
    """Bounded pools of threads for large requests only, so that nothing else waits for them.

    Threads start with the first piece of work.
    """

    def __init__(self, num_threads: int | None = None, pending_max: int = PENDING_MAX) -> None:
        num_threads = num_threads or min(THREADS_MAX, os.cpu_count() or 1)
        self._short = _Pool(max(num_threads // 2, 1), "short-work")
        self._long = _Pool(max(num_threads - 1, 1), "long-work")
        self._pending_max = pending_max
        # By tenant; running or waiting.
        self._num_pending: Counter[str | None] = Counter()
        self._chars_pending: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    @property
    def num_pending(self) -> int:
        """Pieces of work that run or wait."""
        return self._num_pending.total()

    def of(self, tenant: str | None, num_chars: float = math.inf) -> TenantThreads:
        """The threads for a tenant's work on so much text, or on so many values; by default it may take long."""
        return TenantThreads(self, tenant, num_chars)

    def close(self) -> None:
        """Cancels waiting work; running work finishes."""
        self._short.close()
        self._long.close()

    def check_room(self, tenant: str | None) -> None:
        """Raises Overloaded if a tenant may have no more work pending."""
        if (
            self._num_pending[tenant] >= self._pending_max - self.num_pending
            or self._chars_pending[tenant] >= PENDING_CHARS_MAX - self._chars_pending.total()
        ):
            raise Overloaded("too many large requests are being read, tokenized or answered at once")

    def submit(self, tenant: str | None, num_chars: float, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Has `work` done in a thread when its turn comes, unless the future is cancelled before."""
        future: Future[ResultT] = Future()
        size = 0 if num_chars == math.inf else int(num_chars)  # it is known of all that callers send
        with self._lock:
            self._num_pending[tenant] += 1
            self._chars_pending[tenant] += size
        future.add_done_callback(lambda _: self._forget(tenant, size))
        (self._short if num_chars <= SHORT_CHARS else self._long).submit(tenant, future, work)
        return future

    def _forget(self, tenant: str | None, size: int) -> None:
        with self._lock:
            self._num_pending -= Counter([tenant])
            self._chars_pending -= Counter({tenant: size})


@dataclass(frozen=True, slots=True)
class TenantThreads:
    """The threads of `WorkerThreads` for work of one tenant, all on something of one size."""

    threads: WorkerThreads
    tenant: str | None
    num_chars: float

    async def run(
        self, work: Callable[Arguments, ResultT], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> ResultT:
        """Runs `work` in a thread. Work that has not begun when its caller is cancelled never begins.

        Raises Overloaded if too much work runs or waits, in all or of this tenant.
        """
        self.threads.check_room(self.tenant)
        return await self.run_admitted(work, *args, **kwargs)

    async def run_admitted(
        self, work: Callable[Arguments, ResultT], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> ResultT:
        """Runs `work` for an admitted request, which is never refused. Running requests bound this work."""
        future = self.threads.submit(self.tenant, self.num_chars, partial(work, *args, **kwargs))
        return await asyncio.wrap_future(future)


class _Pool:
    """Threads that take pieces of work of all tenants in turns."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._waiting = RoundRobin[tuple[Future[Any], Callable[[], Any]]]()

    def submit(self, tenant: str | None, future: Future[ResultT], work: Callable[[], ResultT]) -> None:
        self._waiting.put(tenant, future, (future, work))
        future.add_done_callback(lambda _: self._waiting.forget(tenant, future))  # it may be cancelled
        try:
            self._executor.submit(self._do_next)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        while (piece := self._waiting.take()) is not None:
            piece[0].cancel()

    def _do_next(self) -> None:
        piece = self._waiting.take()
        if piece is None:  # what it was to do was cancelled
            return
        future, work = piece
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            del piece, future, work  # an error's frames must not keep them
