"""Timing of requests: levels of load, arrival times, the order in which servers are measured. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outrider.errors import InvalidRequest

NUM_CONNECTIONS_MAX: Final = 4096  # in one closed loop, to limit sockets
NUM_REQUESTS_PER_CONNECTION: Final = 8  # default
NUM_REQUESTS_MIN: Final = 16


class Loop(StrEnum):
    """Trigger of the next request."""

    CLOSED = "concurrency"  # the last answer: a fixed number of requests is in flight
    OPEN = "rate"  # the clock, however slow the server is


@dataclass(frozen=True, slots=True)
class Level:
    """One strength of load. `value` is requests in flight (CLOSED, whole) or requests per second (OPEN)."""

    loop: Loop
    value: float

    @property
    def label(self) -> str:
        """The value as given."""
        return f"{self.value:g}"

    def __str__(self) -> str:
        return f"concurrency {self.label}" if self.loop is Loop.CLOSED else f"{self.label} requests/s"


@dataclass(frozen=True, slots=True)
class Plan:
    """Levels, rounds and request counts of a run. Counts are per server, level and round."""

    levels: tuple[Level, ...]
    num_rounds: int
    num_requests: int | None  # None: bound by duration_s, else by the default
    duration_s: float | None  # after which no further request starts
    num_warmup: int | None  # None: one per connection
    seed: int

    def num_requests_at(self, level: Level) -> int | None:
        """Maximum of counted requests; None if only the duration bounds them."""
        if self.num_requests is not None or self.duration_s is not None:
            return self.num_requests
        return max(NUM_REQUESTS_MIN, math.ceil(level.value * NUM_REQUESTS_PER_CONNECTION))

    def num_warmup_at(self, level: Level) -> int:
        """Number of requests before the counted ones."""
        if self.num_warmup is not None:
            return self.num_warmup
        return int(level.value) if level.loop is Loop.CLOSED else 1


def parse_levels(loop: Loop, text: str) -> tuple[Level, ...]:
    """Levels from a list such as "1,8,32". Raises InvalidRequest, which names a wrong value."""
    levels: list[Level] = []
    for word in text.split(","):
        try:
            value = float(int(word)) if loop is Loop.CLOSED else float(word)
        except ValueError:
            raise InvalidRequest(loop, f"{word.strip()!r} in {text!r} is not {_WANTED[loop]}") from None
        if not (0 < value < math.inf) or (loop is Loop.CLOSED and value > NUM_CONNECTIONS_MAX):
            raise InvalidRequest(loop, f"{word.strip()!r} in {text!r} is not {_WANTED[loop]}")
        levels.append(Level(loop, value))
    if len(set(levels)) < len(levels):
        raise InvalidRequest(loop, f"{text!r} names a level twice; --rounds repeats all of them")
    return tuple(levels)


_WANTED: Final = {
    Loop.CLOSED: f"a whole number of requests at once, 1 to {NUM_CONNECTIONS_MAX}",
    Loop.OPEN: "a number of requests per second above 0",
}


def arrivals(rate: float, *, seed: str, num_requests: int | None, duration_s: float | None) -> Iterator[float]:
    """Arrival times of a Poisson process of `rate` requests per second, in seconds; the first is 0.

    Equal seeds give equal times. Ends after `num_requests` or before `duration_s`, whichever comes first; at least
    one bound is needed.
    """
    if num_requests is None and duration_s is None:
        raise ValueError("arrivals without an end")
    source = random.Random(seed)
    at_s, number = 0.0, 0
    while (num_requests is None or number < num_requests) and (duration_s is None or at_s < duration_s):
        yield at_s
        number += 1
        at_s += source.expovariate(rate)


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of one server at one level."""

    number: int  # of the round, from 0
    level: Level
    server: int  # index


def turns(plan: Plan, num_servers: int) -> Iterator[Turn]:
    """Every turn of a run, in order.

    Within a round all servers are measured at each level in turn, so that a change of the machine's load affects all
    of them. The first server rotates, so that none has an advantage.
    """
    for number in range(plan.num_rounds):
        for level in plan.levels:
            for place in range(num_servers):
                yield Turn(number, level, (place + number) % num_servers)
