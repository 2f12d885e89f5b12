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
AGAIN_S: Final = 10.0
"""After which files that were no good are read again though they have not changed."""
SMALL_BYTES: Final = 16 << 10
"""Of all files together, which whoever asks may read on an event loop: a hundred keys take 3 ms, and twice that where
there is a slip among them."""

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
        self._again_at_s = 0.0  # when what was refused is read again
        self._is_being_read = False  # by a thread
        self._content = read()

    def current(self) -> ContentT:
        """Looks at the files at most once in LOOK_EVERY_S. Reads small ones then and there; large ones a thread reads,
        until whose end what was read before is in force."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_at_s >= LOOK_EVERY_S and not self._is_being_read:
                self._looked_at_s = now_s
                self._look(now_s)
            return self._content

    def refused_for_s(self) -> float | None:
        """For how long the files have been no good, so that what was read before is in force; None while they are."""
        self.current()
        with self._lock:
            return None if self._refused_at_s is None else time.monotonic() - self._refused_at_s

    def _look(self, now_s: float) -> None:
        """With the lock held, as what follows unless it says otherwise."""
        stamp = self._stamp_now()
        now_ns = time.time_ns()
        if stamp == self._stamp:
            self._refused = self._refused_at_s = None
            return
        if any(0 <= now_ns - changed_ns < SETTLED_S * 1e9 for changed_ns, _, _ in stamp):
            return
        # What was no good may be so again without a change: a disk that failed, a permission that is given back.
        if stamp == self._refused and now_s < self._again_at_s:
            return
        if sum(size for _, _, size in stamp) <= SMALL_BYTES:
            try:
                self._take(stamp, self._read())
            except ConfigurationError as error:
                self._refuse(stamp, error)
            return
        reading = threading.Thread(target=self._read_aside, args=(stamp,), name="watched files", daemon=True)
        try:
            reading.start()
        except RuntimeError:  # no thread to be had: at the next look
            return
        self._is_being_read = True

    def _read_aside(self, stamp: _Stamp) -> None:
        """On a thread of its own, without the lock until it is read."""
        content: ContentT | Exception
        try:
            content = self._read()
        except ConfigurationError as error:
            content = error
        except Exception as error:
            logger.exception("reading %s failed", self._paths[0])
            content = error
        with self._lock:
            self._is_being_read = False
            if isinstance(content, Exception):
                self._refuse(stamp, content)
            else:
                self._take(stamp, content)

    def _take(self, stamp: _Stamp, content: ContentT) -> None:
        self._content, self._stamp = content, stamp
        self._refused = self._refused_at_s = None
        logger.info("%s was read again", self._paths[0])

    def _refuse(self, stamp: _Stamp, error: Exception) -> None:
        if stamp != self._refused:
            logger.error("what was read before stays in force: %s", error)
        now_s = time.monotonic()
        self._refused, self._again_at_s = stamp, now_s + AGAIN_S
        self._refused_at_s = self._refused_at_s or now_s

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
