"""Files that are reloaded when they change.

A change that cannot be read leaves the previous contents in force, and is logged. A very recent change is left to
settle: half a file can be as valid as a whole one, with less in it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from outrider.errors import ConfigurationError, detached

logger = logging.getLogger(__name__)

ContentT = TypeVar("ContentT")
LOOK_EVERY_S: Final = 1.0
SETTLED_S: Final = 1.0
AGAIN_S: Final = 10.0
"""Time after which rejected files are read again although they have not changed."""
SMALL_BYTES: Final = 16 << 10
"""Total size up to which files are read on the caller's event loop: a hundred keys take 3 ms, and twice that if one has
an error."""

Stamp = tuple[tuple[int, int, int], ...]


class WatchedFiles(Generic[ContentT]):
    """The last valid result of `read` on `paths`. Thread-safe."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], ContentT], small_bytes: int = SMALL_BYTES) -> None:
        """Reads once. Raises what `read` raises, which for invalid files is ConfigurationError. With a `small_bytes` of
        0 a thread reads every change: what the files name takes long to load."""
        self._paths = paths
        self._small_bytes = small_bytes
        self._read = read
        self._lock = threading.Lock()
        self._looked_at_s = time.monotonic()
        self._stamp = stamp_of(self._paths)
        self._refused: Stamp | None = None  # whose rejection has been logged
        self._refused_at_s: float | None = None
        self._again_at_s = 0.0  # when rejected files are read again
        self._is_being_read = False  # by a thread
        self._content = read()

    def current(self) -> ContentT:
        """The contents; looks at the files at most once in LOOK_EVERY_S. Small ones are read here; large ones by a
        thread, until whose end the previous contents stay in force."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_at_s >= LOOK_EVERY_S and not self._is_being_read:
                self._looked_at_s = now_s
                self._look(now_s)
            return self._content

    def refused_for_s(self) -> float | None:
        """How long the files have been invalid, so that older contents are in force; None while they are valid."""
        self.current()
        with self._lock:
            return None if self._refused_at_s is None else time.monotonic() - self._refused_at_s

    def _look(self, now_s: float) -> None:
        """Looks at the files. The lock must be held, here and below unless stated otherwise."""
        stamp = stamp_of(self._paths)
        now_ns = time.time_ns()
        if stamp == self._stamp:
            self._refused = self._refused_at_s = None
            return
        if any(0 <= now_ns - changed_ns < SETTLED_S * 1e9 for changed_ns, _, _ in stamp):
            return
        # Rejected files may become valid without a change: a disk that failed, a permission that is restored.
        if stamp == self._refused and now_s < self._again_at_s:
            return
        if sum(size for _, _, size in stamp) <= self._small_bytes:
            try:
                self._take(stamp, self._read())
            except ConfigurationError as error:
                self._refuse(stamp, error)
            return
        reading = threading.Thread(target=self._read_aside, args=(stamp,), name="watched files", daemon=True)
        try:
            reading.start()
        except RuntimeError:  # no thread available: at the next look
            return
        self._is_being_read = True

    def _read_aside(self, stamp: Stamp) -> None:
        """Reads on a thread, and takes the lock afterwards."""
        content: ContentT | Exception
        try:
            content = self._read()
        except ConfigurationError as error:
            content = detached(error)
        except Exception as error:
            logger.exception("reading %s failed", self._paths[0])
            content = detached(error)
        with self._lock:
            self._is_being_read = False
            if isinstance(content, Exception):
                self._refuse(stamp, content)
            else:
                self._take(stamp, content)

    def _take(self, stamp: Stamp, content: ContentT) -> None:
        self._content, self._stamp = content, stamp
        self._refused = self._refused_at_s = None
        logger.info("%s was reloaded", self._paths[0])

    def _refuse(self, stamp: Stamp, error: Exception) -> None:
        if stamp != self._refused:
            logger.error("what was read before stays in force: %s", error)
        now_s = time.monotonic()
        self._refused, self._again_at_s = stamp, now_s + AGAIN_S
        self._refused_at_s = self._refused_at_s or now_s


def stamp_of(paths: Iterable[Path | str | None]) -> Stamp:
    """A value that changes when a file does, or the folder that a link of Kubernetes leads to. Zeros for no file."""
    found = []
    for path in paths:
        try:
            status = os.stat(path or "")
            found.append((status.st_mtime_ns, status.st_ino, status.st_size))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)
