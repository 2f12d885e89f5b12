"""How far away the target workers are, by pings on the hint streams. Pure.

Coordinators choose draft workers by it: the worker's record in the registry carries `told`.
"""

from __future__ import annotations

from collections import OrderedDict, deque

PINGS_KEPT = 8
TARGETS_MAX = 64  # the last ones that were pinged
_UINT32_MAX = (1 << 32) - 1


class Distance:
    """The round trip to one target worker: the least of the last ones, for whatever else happens only adds to it."""

    def __init__(self) -> None:
        self._sent_at: dict[int, float] = {}
        self._last = 0
        self._round_trips_s: deque[float] = deque(maxlen=PINGS_KEPT)

    def ping(self, now: float) -> int:
        """The number to send, above 0. Answers to earlier ones count no more."""
        self._last = self._last % _UINT32_MAX + 1
        self._sent_at = {self._last: now}
        return self._last

    def pong(self, number: int, now: float) -> None:
        """A number came back."""
        sent_at = self._sent_at.pop(number, None)
        if sent_at is not None:
            self._round_trips_s.append(now - sent_at)

    @property
    def round_trip_s(self) -> float | None:
        """None before the first answer."""
        return min(self._round_trips_s, default=None)


class Distances:
    """To all targets that this worker has hinted to lately."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[str, Distance] = OrderedDict()

    def to(self, address: str) -> Distance:
        """That of one target, which is remembered after its link was closed."""
        found = self._by_address.setdefault(address, Distance())
        self._by_address.move_to_end(address)
        while len(self._by_address) > TARGETS_MAX:
            self._by_address.popitem(last=False)
        return found

    def told(self) -> str:
        """As `WorkerRecord.round_trips` has it."""
        return " ".join(
            f"{address}={round(distance.round_trip_s * 1e6)}"
            for address, distance in self._by_address.items()
            if distance.round_trip_s is not None
        )
