"""When requests are sent: levels of load, arrival times, the order in which servers take turns. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outrider.errors import InvalidRequest

NUM_CONNECTIONS_MAX: Final = 4096  # in one closed loop; sockets are not free
NUM_REQUESTS_PER_CONNECTION: Final = 8  # unless somebody says how many
NUM_REQUESTS_MIN: Final = 16


class Loop(StrEnum):
    """Who decides when the next request is sent."""

    CLOSED = "concurrency"  # the last answer: so many requests are always under way
    OPEN = "rate"  # the clock, whatever the server does


@dataclass(frozen=True, slots=True)
class Level:
    """One strength of load. `value` is requests at once (CLOSED, whole) or requests per second (OPEN)."""

    loop: Loop
    value: float

    @property
    def label(self) -> str:
        """The value as it was given."""
        return f"{self.value:g}"

    def __str__(self) -> str:
        return f"concurrency {self.label}" if self.loop is Loop.CLOSED else f"{self.label} requests/s"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured how often. Numbers of requests are per server, level and round."""

    levels: tuple[Level, ...]
    num_rounds: int
    num_requests: int | None  # None: bound by duration_s, else by the default
    duration_s: float | None  # after which no further request begins
    num_warmup: int | None  # None: one per connection
    seed: int

    def num_requests_at(self, level: Level) -> int | None:
        """Most counted requests; None where only the duration bounds them."""
        if self.num_requests is not None or self.duration_s is not None:
            return self.num_requests
        return max(NUM_REQUESTS_MIN, math.ceil(level.value * NUM_REQUESTS_PER_CONNECTION))

    def num_warmup_at(self, level: Level) -> int:
        """Requests before the counted ones."""
        if self.num_warmup is not None:
            return self.num_warmup
        return int(level.value) if level.loop is Loop.CLOSED else 1


def parse_levels(loop: Loop, text: str) -> tuple[Level, ...]:
    """Levels from "1,8,32". Raises InvalidRequest saying which value is none."""
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


def arrivals(
    rate: float, *, seed: str, num_requests: int | None, duration_s: float | None
) -> Iterator[float]:
    """Seconds after the start at which a Poisson process of `rate` per second sends; the first at 0.

    Equal seeds give equal times. Ends after `num_requests`, or before `duration_s`, whichever comes first; at least
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
    """One server measured at one level, once."""

    number: int  # of the round, from 0
    level: Level
    server: int  # index


def turns(plan: Plan, num_servers: int) -> Iterator[Turn]:
    """Every turn of a run, in order.

    Within a round the servers follow one another at each level, so that a change of the machine's mood meets all of
    them; who goes first rotates, so that it is nobody's advantage.
    """
    for number in range(plan.num_rounds):
        for level in plan.levels:
            for place in range(num_servers):
                yield Turn(number, level, (place + number) % num_servers)
