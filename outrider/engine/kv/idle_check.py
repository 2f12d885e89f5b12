"""Checks that every KV block is accounted for, while a worker is idle.

A block that is neither owned nor free is lost until the worker restarts; one with two independent owners corrupts
output. Neither shows by itself, and both would be bugs of ours. They are logged and counted, and the worker goes on.
"""

from __future__ import annotations

import logging
import math
from typing import Protocol

from outrider.engine.kv.kv_cache import BlockAllocator

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
"""Least time between two checks; one takes a millisecond for twenty thousand blocks."""


class _Counter(Protocol):
    def inc(self, amount: float = 1) -> None: ...


class IdleCheck:
    """Periodic check of one worker's blocks. `num_failures` counts the checks that failed."""

    def __init__(self, allocator: BlockAllocator, num_failures: _Counter) -> None:
        self._allocator = allocator
        self._num_failures = num_failures
        self._looked_at = -math.inf  # seconds, the caller's clock

    def look(self, now: float) -> None:
        """Checks the blocks if a check is due. Must be called only while there is no session."""
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            self._allocator.check_integrity([])
        except AssertionError as error:
            self._num_failures.inc()
            logger.error("KV blocks are lost or owned twice, restart this worker: %s", error)
