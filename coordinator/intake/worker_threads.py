"""Threads for large work that would block the event loop: parsing, tokenizing and writing long requests and answers.

The work either releases the interpreter's lock (`tokenizers`, see `Tokenizer.encode`) or is Python code, which releases
it every few milliseconds. A thread does not help against a call of C code that keeps the lock: such a call needs a
bound of its own (`coordinator.intake.json_size`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from outrider.errors import Overloaded

ResultT = TypeVar("ResultT")
Arguments = ParamSpec("Arguments")

THREADS_MAX: Final = 4
PENDING_MAX: Final = 256
"""Most pieces of work that run or wait; beyond it, work of new requests is refused."""


class WorkerThreads:
    """A bounded pool of threads for large requests only, so that nothing else waits for them.

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
        """Runs `work` in a thread. Work that has not begun when its caller is cancelled never begins.

        Raises Overloaded if `pending_max` pieces of work run or wait.
        """
        if self._num_pending >= self._pending_max:
            raise Overloaded("too many large requests are being read, tokenized or answered at once")
        return await self.run_admitted(work, *args, **kwargs)

    async def run_admitted(
        self, work: Callable[Arguments, ResultT], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> ResultT:
        """Runs `work` for an admitted request, which is never refused. Running requests bound this work."""
        with self._lock:
            self._num_pending += 1
        try:
            future = self._executor.submit(work, *args, **kwargs)
        except BaseException:
            self._forget()
            raise
        future.add_done_callback(self._forget)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Cancels waiting work; running work finishes."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _forget(self, _: Future[ResultT] | None = None) -> None:
        with self._lock:
            self._num_pending -= 1
