"""Files that are read again when they change, while the process goes on.

A change that cannot be read leaves in force what was there before, and says so. One of this very moment is left to
settle: half a file can be as good as a whole one, with less in it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from outrider.errors import ConfigurationError

logger = logging.getLogger(__name__)

ContentT = TypeVar("ContentT")
LOOK_EVERY_S: Final = 1.0
SETTLED_S: Final = 1.0

_Stamp = tuple[tuple[int, int, int], ...]


class WatchedFiles(Generic[ContentT]):
    """What `read` made of `paths` the last time that it could. For any thread."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], ContentT]) -> None:
        """Reads once. Raises what `read` raises, which for files that are no good is ConfigurationError."""
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._looked_at_s = time.monotonic()
        self._stamp = self._stamp_now()
        self._refused: _Stamp | None = None  # whose refusal has been told
        self._refused_at_s: float | None = None
        self._content = read()

    def current(self) -> ContentT:
        """Looks at the files at most once in LOOK_EVERY_S."""
        with self._lock:
            if time.monotonic() - self._looked_at_s >= LOOK_EVERY_S:
                self._looked_at_s = time.monotonic()
                self._look()
            return self._content

    def refused_for_s(self) -> float | None:
        """For how long the files have been no good, so that what was read before is in force; None while they are."""
        self.current()
        with self._lock:
            return None if self._refused_at_s is None else time.monotonic() - self._refused_at_s

    def _look(self) -> None:
        stamp = self._stamp_now()
        now_ns = time.time_ns()
        if stamp == self._stamp:
            self._refused = self._refused_at_s = None
            return
        if any(0 <= now_ns - changed_ns < SETTLED_S * 1e9 for changed_ns, _, _ in stamp):
            return
        try:
            self._content = self._read()
        except ConfigurationError as error:
            if stamp != self._refused:
                logger.error("what was read before stays in force: %s", error.message)
            self._refused = stamp
            self._refused_at_s = self._refused_at_s or time.monotonic()
            return
        self._stamp = stamp
        self._refused = self._refused_at_s = None
        logger.info("%s was read again", self._paths[0])

    def _stamp_now(self) -> _Stamp:
        """What changes when a file does, or the folder that a link of Kubernetes leads to. Zeros for no file."""
        found = []
        for path in self._paths:
            try:
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)
