"""Events of draft workers for a session that the coordinator has not started here yet. Pure.

Both workers get a request at once, and a draft model is fast: its first hints often arrive before the session does.
They are kept briefly and replayed; their number and age are bounded (I7).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from target_worker.limits import SchedulerLimits
from target_worker.messages import HintsArrived, StreamId, SubscribeDraft

EarlyEvent = SubscribeDraft | HintsArrived


@dataclass(slots=True)
class _Kept:
    since: float  # shell's clock, seconds
    events: list[EarlyEvent] = field(default_factory=list)

    @property
    def num_hints(self) -> int:
        return sum(len(event.hints) for event in self.events if isinstance(event, HintsArrived))


class EarlyEvents:
    """Events by session, the oldest session first."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def keep(self, session_id: str, event: EarlyEvent, now: float) -> None:
        """Keeps an event unless its session has too many already; drops events that are too old."""
        while self._kept and next(iter(self._kept.values())).since < now - self._limits.early_s:
            self._kept.popitem(last=False)
        kept = self._kept.setdefault(session_id, _Kept(now))
        num_new = len(event.hints) if isinstance(event, HintsArrived) else 0
        if (
            len(kept.events) < self._limits.max_early_events
            and kept.num_hints + num_new <= self._limits.max_early_hints
        ):
            kept.events.append(event)
        if len(self._kept) > self._limits.max_early_sessions:
            self._kept.popitem(last=False)

    def take(self, session_id: str) -> list[EarlyEvent]:
        """Removes and returns a session's events in the order they came."""
        kept = self._kept.pop(session_id, None)
        return kept.events if kept is not None else []

    def forget_subscriber(self, stream_id: StreamId, session_id: str | None = None) -> None:
        """Drops a stream's subscriptions to one session, or to all."""
        for each in self._kept if session_id is None else [session_id]:
            kept = self._kept.get(each)
            if kept is not None:
                kept.events = [
                    event
                    for event in kept.events
                    if not (isinstance(event, SubscribeDraft) and event.stream_id == stream_id)
                ]
