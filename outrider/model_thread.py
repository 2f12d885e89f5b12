"""The thread that a worker's model runs in.

A pure core decides (events in, actions and steps out); this shell feeds it. Everything the core owns is touched by
this one thread only, so it needs no locks; the event loop talks to it by `submit` and hears from it by `deliver`.
Between the end of a step and the start of the next there is only the core's own work: publishing happens on the
event loop while the next step runs.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from outrider import turns

logger = logging.getLogger(__name__)


class _Pulse:
    """An event for the thread itself, which answers by taking it."""


_PULSE = _Pulse()

EventT = TypeVar("EventT")
EventT_contra = TypeVar("EventT_contra", contravariant=True)
ActionT = TypeVar("ActionT")


class Core(Protocol[EventT_contra, ActionT]):
    """What the shell drives. Times are `time.monotonic()` seconds."""

    def handle(self, event: EventT_contra, now: float) -> list[ActionT]: ...

    def run_next(self, now: float) -> tuple[list[ActionT], float | None]:
        """Runs a step if there is one to run, and returns its actions and when to be called again.

        0.0 means at once, None means not before an event comes.
        """
        ...


class ModelThread(Generic[EventT, ActionT]):
    """Runs `core` until stopped. `deliver` is called on this thread with each batch of actions."""

    def __init__(
        self,
        core: Core[EventT, ActionT],
        deliver: Callable[[list[ActionT]], None],
        on_failure: Callable[[BaseException], None],
        *,
        name: str,
        max_events: int = 65536,
    ) -> None:
        self._core = core
        self._deliver = deliver
        self._on_failure = on_failure
        self._max_events = max_events
        # SimpleQueue wakes its reader without a Python-level lock; the bound is checked in `submit`.
        self._inbox: queue.SimpleQueue[EventT | _Pulse | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_stopping = False
        self._pulse_owed_since: float | None = None

    def start(self) -> None:
        self._thread.start()

    def submit(self, event: EventT, *, is_release: bool = False, is_from_peer: bool = False) -> bool:
        """Hands an event to the core; False when it is too far behind to take more (I7).

        An event that frees something is taken even then: there is one at most for each thing that was taken. What the
        other kind of worker says finds half of the room only, so that one that floods us shuts no caller out.
        """
        room = self._max_events // 2 if is_from_peer else self._max_events
        if not is_release and self._inbox.qsize() >= room:
            return False
        self._inbox.put(event)
        return True

    def has_events(self) -> bool:
        """Whether the core is to hear of something."""
        return not self._inbox.empty()

    def stalled_s(self) -> float:
        """How long the thread has owed a sign of life, seconds; asks for the next one.

        It gives one between two steps, and at once while it has nothing to do.
        """
        now = time.monotonic()
        owed_since = self._pulse_owed_since  # read once: the thread may give its sign at any moment
        if owed_since is None:
            self._pulse_owed_since = now
            self._inbox.put(_PULSE)
            return 0.0
        return now - owed_since

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Whether it has ended; it does not while its model is in a step."""
        self._is_stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # For `top -H` and profilers, where the system has names for threads.
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self._thread.name)
        turns.take_long_turns()
        try:
            wake_at: float | None = None
            while not self._is_stopping:
                self._take_events(wake_at)
                actions, wake_at = self._core.run_next(time.monotonic())
                if actions:
                    self._deliver(actions)
        except BaseException as error:
            logger.exception("the model thread died")
            self._on_failure(error)

    def _take_events(self, wake_at: float | None) -> None:
        """Waits for an event until `wake_at`, then takes those that are there; later ones wait for the next turn."""
        actions: list[ActionT] = []
        try:
            if wake_at is None:
                event = self._inbox.get()
            elif (wait_s := wake_at - time.monotonic()) > 0.0:
                event = self._inbox.get(timeout=wait_s)
            else:
                event = self._inbox.get_nowait()
            num_left = self._inbox.qsize()
            while event is not None:
                if isinstance(event, _Pulse):
                    self._pulse_owed_since = None
                else:
                    actions += self._core.handle(event, time.monotonic())
                if num_left == 0:
                    break
                num_left -= 1
                event = self._inbox.get_nowait()
        except queue.Empty:
            pass
        if actions:
            self._deliver(actions)
