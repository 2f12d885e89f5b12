"""The thread that a worker's model runs in.

A pure core decides (events in, actions and steps out); this shell drives it. Only this thread touches the core's state,
so it needs no locks; the event loop sends events by `submit` and gets actions by `deliver`. Between the end of a step
and the start of the next there is only the core's own work: publishing happens on the event loop while the next step
runs. Peer workers take turns. Where their events have a share, it counts while a step is due or somebody else waits:
the rest waits for the next step.
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
from outrider.concurrency.round_robin import RoundRobin

logger = logging.getLogger(__name__)


class _Pulse:
    """A liveness check, which the thread answers by taking it from the queue."""


class _Peers:
    """Wakes the thread for events of peers."""


_PULSE = _Pulse()
_PEERS = _Peers()

PEERS_SHARE: Final = 0.25
"""Share of a target's thread that events of peer workers may have while steps are due."""
PEERS_S: Final = 0.005
"""Processor time that they may have between two steps."""
PEERS_EVENTS: Final = 2048
"""Most events of peer workers between two steps, in any worker."""
PEERS_SIZE: Final = 1 << 18
"""Events of peer workers that may wait, each with its hints."""

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
        max_peers_size: int = PEERS_SIZE,
        peers_share: LoopShare | None = None,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        """max_peers_size: events of peers that may wait, each with its hints; peers_share: what they have of the
        thread's time while steps are due, None: what they need; processor: a clock of the time that the thread
        computes, seconds."""
        self._core = core
        self._deliver = deliver
        self._on_failure = on_failure
        self._max_events = max_events
        # SimpleQueue wakes its reader without a Python-level lock; the bound is checked in `submit`.
        self._inbox: queue.SimpleQueue[EventT | _Pulse | _Peers | None] = queue.SimpleQueue()
        self._peers = RoundRobin[EventT](max_peers_size)
        self._peers_share = peers_share
        self._processor = processor
        self._is_awake = True  # and looks for what peers sent before it waits
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_stopping = False
        self._pulse_owed_since: float | None = None

    def start(self) -> None:
        self._thread.start()

    def submit(self, event: EventT, *, is_release: bool = False, peer: str | None = None) -> bool:
        """Queues an event for the core; returns False when the queue is full (I7).

        Events that free something are always accepted: there is at most one for each thing that was taken. `peer` names
        the connection that an event came on, whose events have a queue of their own, so that one that floods shuts out
        nobody else. An event that ends a stream of it comes after all others of that stream, which are dropped.
        """
        stream = getattr(event, "stream_id", None)
        if is_release and peer is not None:
            self._peers.forget(peer, stream)
        elif peer is not None:
            if not self._peers.put(peer, stream, event, 1 + len(getattr(event, "hints", ()))):
                return False
            if not self._is_awake:
                self._is_awake = True
                self._inbox.put(_PEERS)
            return True
        if not is_release and self._inbox.qsize() >= self._max_events:
            return False
        self._inbox.put(event)
        return True

    def has_room(self, peer: str) -> bool:
        """Whether a peer may send more now; otherwise its messages have to wait on its own side."""
        return self._peers.has_room(peer)

    def has_events(self) -> bool:
        """Whether events wait that the thread would take now."""
        return not self._inbox.empty() or (len(self._peers) > 0 and not self._must_peers_wait())

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
        # In this order: an event that comes after the look finds that the thread has to be woken.
        self._is_awake = False
        if len(self._peers):
            self._is_awake = True
        try:
            if self._is_awake:
                event = self._inbox.get_nowait()
            elif wake_at is None:
                event = self._inbox.get()
            elif (wait_s := wake_at - time.monotonic()) > 0.0:
                event = self._inbox.get(timeout=wait_s)
            else:
                event = self._inbox.get_nowait()
            self._is_awake = True
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
        self._is_awake = True
        actions += self._take_peers_events(wake_at)
        if actions:
            self._deliver(actions)

    def _take_peers_events(self, wake_at: float | None) -> list[ActionT]:
        """Handles what peers have sent so far, within their share of the time while somebody waits for the thread."""
        actions: list[ActionT] = []
        for _ in range(min(len(self._peers), PEERS_EVENTS)):
            is_due = (wake_at is not None and wake_at <= time.monotonic()) or not self._inbox.empty()
            share = self._peers_share if is_due else None
            if (share is not None and self._must_peers_wait()) or (event := self._peers.take()) is None:
                break
            began_s = self._processor()
            actions += self._core.handle(event, time.monotonic())
            if share is not None:
                share.spend(self._processor() - began_s, time.monotonic())
        return actions

    def _must_peers_wait(self) -> bool:
        """Whether they have used up their share."""
        return self._peers_share is not None and self._peers_share.wait_s(time.monotonic()) > 0.0
