"""Processes: who runs what, on a host with a clock of its own, and what it means to stop one and let it go on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.clock import SimulatedLoop, Stopped

if TYPE_CHECKING:
    from tests.simulation.calls import Call, Method

_READ_S: Final = 0.001
_CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


@dataclass(frozen=True, slots=True)
class Host:
    """Offsets of a machine's clocks from the true time, in seconds."""

    monotonic_s: float = 0.0  # since it was booted; means nothing elsewhere
    skew_s: float = 0.0  # by which its clock on the wall is ahead


_RIGHT: Final = Host()


class Process:
    """One life of one process. Whatever it starts belongs to it, and ends with it."""

    def __init__(self, name: str, loop: SimulatedLoop, host: Host = _RIGHT) -> None:
        self.name = name  # and that of its host
        self.address = f"{name}:1"
        self.loop, self.its_host = loop, host
        self.is_alive = True
        self.is_frozen = False
        self.methods: dict[str, Method] = {}
        self.calls: dict[Call, None] = {}  # either end
        self.unread: deque[Callable[[], object]] = deque()
        """Deliveries that came while the process was frozen, and wait in its sockets."""
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._stopped: Stopped | None = None
        before = _CURRENT.set(self)
        self.context = copy_context()
        _CURRENT.reset(before)

    def now_s(self) -> float:
        """The time on its host's monotonic clock, in seconds."""
        return self.loop.time() + self.its_host.monotonic_s

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process, as are all that it starts in turn."""
        before = _CURRENT.set(self)
        try:
            return asyncio.create_task(work)
        finally:
            _CURRENT.reset(before)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(lambda _: self._tasks.pop(task, None))

    def receive(self, what: Callable[[], object]) -> None:
        """Something comes in by the network, or a signal does: now, or when the process goes on."""
        if self.is_frozen or self.unread:
            self.unread.append(what)
        else:
            what()

    def freeze(self) -> None:
        """SIGSTOP: nothing of it runs, neither tasks nor timers nor threads."""
        if not self.is_frozen and self.is_alive:
            self.is_frozen = True
            self._stopped = self.loop.take_out(self._is_context_of_it)

    def thaw(self) -> None:
        """SIGCONT. Timers that ran out meanwhile fire first, then what lies in the sockets is read: a real loop sees
        its timers and the readable socket in one turn, but gRPC needs longer to make messages of what it reads."""
        if not self.is_frozen:
            return
        self.is_frozen = False
        assert self._stopped is not None
        self.loop.put_back(self._stopped)
        self._stopped = None
        self.loop.call_later(_READ_S, self._read_all, context=NOBODY)

    def end(self) -> None:
        """No more of it runs. Its `finally` clauses do, but reach nobody."""
        self.is_alive = False
        self.unread.clear()
        self.thaw()
        for task in list(self._tasks):
            task.cancel()

    def _read_all(self) -> None:
        while self.unread and not self.is_frozen:
            self.unread.popleft()()

    def _is_context_of_it(self, context: Context) -> bool:
        return context.get(_CURRENT) is self


def current_process() -> Process | None:
    """The process whose code runs now; None for the network's."""
    return _CURRENT.get()


NOBODY: Final = Context()
"""The context of the network, which goes on while processes are frozen."""


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """The loop's task factory."""
    task = asyncio.Task(coroutine, loop=loop, **options)
    process = _CURRENT.get()
    if process is not None:
        process.adopt(task)
    return task
