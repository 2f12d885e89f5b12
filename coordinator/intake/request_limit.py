"""Bound on the requests that a process takes in at once, over both APIs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import Overloaded


class RequestLimit:
    """Counts requests of any kind, from their head to the end of their answer; not thread-safe.

    The service refuses earlier, and knows who goes first. This bounds what is read and refused at the same time.
    """

    def __init__(self, num_max: int) -> None:
        self.num_max = num_max
        self._num = 0

    @property
    def num(self) -> int:
        """The number of requests at present."""
        return self._num

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Counts a request inside the block. Raises Overloaded if there are `num_max`."""
        if self._num >= self.num_max:
            raise Overloaded(f"this coordinator has {self.num_max} requests, the most that it takes in at once")
        self._num += 1
        try:
            yield
        finally:
            self._num -= 1
