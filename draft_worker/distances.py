"""Round-trip times to target workers, measured by pings on the hint streams. Pure.

Coordinators choose draft workers by them: the worker's record in the registry carries `record_text`.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from outrider.sampling_params import UINT32_MAX

PINGS_KEPT = 8
TARGETS_MAX = 64  # the last ones that were pinged


class Distance:
    """The round trip to one target worker: the minimum of the last pings, because queueing and load only add to it."""

    def __init__(self) -> None:
        self._sent_at: dict[int, float] = {}
        self._last = 0
        self._round_trips_s: deque[float] = deque(maxlen=PINGS_KEPT)

    def ping(self, now: float) -> int:
        """The number to send, above 0. Answers to earlier ones count no more."""
        self._last = self._last % UINT32_MAX + 1
        self._sent_at = {self._last: now}
        return self._last

    def pong(self, number: int, now: float) -> None:
        """Records the answer to a ping."""
        sent_at = self._sent_at.pop(number, None)
        if sent_at is not None:
            self._round_trips_s.append(now - sent_at)

    @property
    def round_trip_s(self) -> float | None:
        """The smallest recent round trip in seconds; None before the first answer."""
        return min(self._round_trips_s, default=None)


class Distances:
    """Round trips to the targets that this worker sent hints to lately."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[str, Distance] = OrderedDict()

    def to(self, address: str) -> Distance:
        """Returns the distance to one target. It is kept after the link to the target is closed."""
        found = self._by_address.setdefault(address, Distance())
        self._by_address.move_to_end(address)
        while len(self._by_address) > TARGETS_MAX:
            self._by_address.popitem(last=False)
        return found

    def record_text(self) -> str:
        """The round trips in the format of `WorkerRecord.round_trips`."""
        return " ".join(
            f"{address}={round(distance.round_trip_s * 1e6)}"
            for address, distance in self._by_address.items()
            if distance.round_trip_s is not None
        )
