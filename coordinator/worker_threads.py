"""Threads for the work of one request that would hold up the event loop: reading, tokenizing and writing what is large.

What runs here either releases the interpreter's lock (`tokenizers`, see `Tokenizer.encode`) or is Python, which shares
it every few milliseconds. A single call of C code that keeps the lock must be small by its own bound
(`coordinator.json_size`): a thread does not help against it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from outrider.errors import Overloaded

ResultT = TypeVar("ResultT")
Arguments = ParamSpec("Arguments")

THREADS_MAX: Final = 4
PENDING_MAX: Final = 256
"""Pieces of work that run or wait; what a new request needs is refused then."""


class WorkerThreads:
    """A pool of its own, so that nothing else waits for large requests, and with a bound, so that they do not pile up.

    Threads start with the first piece of work.
    """

    def __init__(self, num_threads: int | None = None, pending_max: int = PENDING_MAX) -> None:
        num_threads = num_threads or min(THREADS_MAX, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="large-requests")
        self._pending_max = pending_max
        self._num_pending = 0
        self._lock = threading.Lock()

    async def run(
        self, work: Callable[Arguments, ResultT], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> ResultT:
        """What `work` returns or raises. Work that has not begun when its caller is cancelled never begins.

        Raises Overloaded when too much is waiting already.
        """
        with self._lock:
            if self._num_pending >= self._pending_max:
                raise Overloaded("too many large requests are being read, tokenized or answered at once")
            self._num_pending += 1
        return await self._done(partial(work, *args, **kwargs))

    async def run_admitted(
        self, work: Callable[Arguments, ResultT], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> ResultT:
        """As `run`, for a request whose work has been done: it is not refused at its end. Of these there are no more
        than there are requests."""
        with self._lock:
            self._num_pending += 1
        return await self._done(partial(work, *args, **kwargs))

    async def _done(self, work: Callable[[], ResultT]) -> ResultT:
        """What `work` returns; it is counted already."""
        try:
            future = self._executor.submit(work)
        except BaseException:
            self._forget()
            raise
        future.add_done_callback(self._forget)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Begins nothing any more; what runs comes to its end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _forget(self, _: Future[ResultT] | None = None) -> None:
        with self._lock:
            self._num_pending -= 1
