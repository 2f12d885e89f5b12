"""Looks whether every KV block is accounted for, while a worker has nothing else to do.

A block that nobody owns and nobody can have is lost until the worker ends; one with two owners that do not know of each
other gives wrong text. Neither shows by itself, and both would be our own mistakes: they are told to whoever runs the
worker, which goes on.
"""

from __future__ import annotations

import logging
import math
from typing import Protocol

from outrider.engine.kv_cache import BlockAllocator

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
"""At most; it takes a millisecond for twenty thousand blocks."""


class _Counter(Protocol):
    def inc(self, amount: float = 1) -> None: ...


class IdleCheck:
    """Of one worker's blocks. `num_failures` counts the looks at which they were not accounted for."""

    def __init__(self, allocator: BlockAllocator, num_failures: _Counter) -> None:
        self._allocator = allocator
        self._num_failures = num_failures
        self._looked_at = -math.inf  # seconds, the caller's clock

    def look(self, now: float) -> None:
        """To be called while there is no session."""
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            self._allocator.check_integrity([])
        except AssertionError as error:
            self._num_failures.inc()
            logger.error("KV blocks are lost or owned twice, restart this worker: %s", error)
