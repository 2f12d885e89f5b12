"""The thread that a worker's model runs in.

A pure core decides (events in, actions and steps out); this shell drives it. Only this thread touches the core's state,
so it needs no locks; the event loop sends events by `submit` and gets actions by `deliver`. Between the end of a step
and the start of the next there is only the core's own work: publishing happens on the event loop while the next step
runs. What peer workers send has a share of the thread's time, in which they take turns: the rest waits for the next
step.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from outrider.concurrency import time_slices
from outrider.concurrency.loop_share import LoopShare
from outrider.concurrency.peer_events import PeerEvents

logger = logging.getLogger(__name__)


class _Pulse:
    """A liveness check, which the thread answers by taking it from the queue."""


class _Peers:
    """Wakes the thread for events of peers."""


_PULSE = _Pulse()
_PEERS = _Peers()

PEERS_SHARE: Final = 0.25
"""Share of the thread's time that events of peer workers may have."""
PEERS_S: Final = 0.005
"""Processor time that they may have between two steps."""

EventT = TypeVar("EventT")
EventT_contra = TypeVar("EventT_contra", contravariant=True)
ActionT = TypeVar("ActionT")


class Core(Protocol[EventT_contra, ActionT]):
    """The interface of the core that the thread drives. Times are `time.monotonic()` seconds."""

    def handle(self, event: EventT_contra, now: float) -> list[ActionT]: ...

    def run_next(self, now: float) -> tuple[list[ActionT], float | None]:
        """Runs a step if there is one, and returns its actions and when to be called again.

        0.0 means at once, None means not before an event comes.
        """
        ...


class ModelThread(Generic[EventT, ActionT]):
    """Runs `core` until stopped. Calls `deliver` on this thread with each batch of actions."""

    def __init__(
        self,
        core: Core[EventT, ActionT],
        deliver: Callable[[list[ActionT]], None],
        on_failure: Callable[[BaseException], None],
        *,
        name: str,
        max_events: int = 65536,
        max_stream_events: int = 1024,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        """max_stream_events: that may wait of one peer's stream; processor: a clock of the time that the thread
        computes, seconds."""
        self._core = core
        self._deliver = deliver
        self._on_failure = on_failure
        self._max_events = max_events
        # SimpleQueue wakes its reader without a Python-level lock; the bound is checked in `submit`.
        self._inbox: queue.SimpleQueue[EventT | _Pulse | _Peers | None] = queue.SimpleQueue()
        self._max_stream_events = max_stream_events
        self._peers = PeerEvents[EventT](max_events // 2)
        self._peers_share = LoopShare(PEERS_SHARE, PEERS_S)
        self._processor = processor
        self._is_woken = False  # for peers, and the thread has not looked yet
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_stopping = False
        self._pulse_owed_since: float | None = None

    def start(self) -> None:
        self._thread.start()

    def submit(self, event: EventT, *, is_release: bool = False, is_from_peer: bool = False) -> bool:
        """Queues an event for the core; returns False when the queue is full (I7).

        Events that free something are always accepted: there is at most one for each thing that was taken. One that
        ends a peer's stream comes after all others of it, which are dropped. Each peer has a queue of its own, so that
        one that floods shuts out nobody else.
        """
        peer = getattr(event, "stream_id", None)
        if is_from_peer:
            if not self._peers.put(peer, event, self._max_events if peer is None else self._max_stream_events):
                return False
            if not self._is_woken:
                self._is_woken = True
                self._inbox.put(_PEERS)
            return True
        if is_release and peer is not None:
            self._peers.forget(peer)
        if not is_release and self._inbox.qsize() >= self._max_events:
            return False
        self._inbox.put(event)
        return True

    def has_events(self) -> bool:
        return not self._inbox.empty() or len(self._peers) > 0

    def stalled_s(self) -> float:
        """How long the thread has not answered a liveness check, seconds; starts the next check.

        The thread answers between two steps, and at once while it is idle.
        """
        now = time.monotonic()
        owed_since = self._pulse_owed_since  # read once: the thread may answer at any moment
        if owed_since is None:
            self._pulse_owed_since = now
            self._inbox.put(_PULSE)
            return 0.0
        return now - owed_since

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stops the thread; returns whether it has ended, which it does not during a step."""
        self._is_stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # For `top -H` and profilers, where the system has names for threads.
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self._thread.name)
        time_slices.use_default_slices()
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
        """Waits for an event until `wake_at`, then handles those that are queued; later ones wait for the next call."""
        actions: list[ActionT] = []
        if len(self._peers):  # some were left
            left_at = time.monotonic() + self._peers_share.wait_s(time.monotonic())
            wake_at = left_at if wake_at is None else min(wake_at, left_at)
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
                elif not isinstance(event, _Peers):
                    actions += self._core.handle(event, time.monotonic())
                if num_left == 0:
                    break
                num_left -= 1
                event = self._inbox.get_nowait()
        except queue.Empty:
            pass
        self._is_woken = False
        actions += self._take_peers_events()
        if actions:
            self._deliver(actions)

    def _take_peers_events(self) -> list[ActionT]:
        """Handles what peers have sent, within their share of the time."""
        actions: list[ActionT] = []
        while not self._peers_share.wait_s(time.monotonic()) and (event := self._peers.take()) is not None:
            began_s = self._processor()
            actions += self._core.handle(event, time.monotonic())
            self._peers_share.spend(self._processor() - began_s, time.monotonic())
        return actions
