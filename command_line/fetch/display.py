"""Shows how far a fetch is: a bar on a terminal, a line every few seconds in a log. All of it goes to stderr."""

from __future__ import annotations

import time
from threading import Lock
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

_LINE_S: Final = 10.0
_WINDOW_S: Final = 30.0
"""Time over which the rate of a line is taken."""


class TransferDisplay:
    """Progress of all files together."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = Lock()
        self._num_files = self._num_finished = self._num_bytes = self._total_bytes = 0
        self._line_s = time.monotonic()
        self._seen: list[tuple[float, int]] = []  # times and bytes of the last lines
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, num_files: int, num_bytes: int) -> None:
        """Sets what is to be there at the end; counting starts anew."""
        with self._lock:
            self._num_files, self._total_bytes = num_files, num_bytes
            self._num_finished = self._num_bytes = 0
            self._line_s = time.monotonic()
            self._seen = []
            if self._bar is not None:
                self._bar.reset(self._task, total=num_bytes, visible=True)
            self._refresh()
        if self._bar is None:
            self.note(f"{num_files} files, {num_bytes / 1e9:.2f} GB")

    def advance(self, num_bytes: int) -> None:
        """Counts bytes that are there; negative ones were thrown away."""
        with self._lock:
            self._num_bytes += num_bytes
            line = self._line()
            self._refresh()
        if line:
            self.note(line)

    def finished(self, path: str) -> None:
        """Counts a file that is whole."""
        with self._lock:
            self._num_finished += 1
            self._refresh()

    def note(self, message: str) -> None:
        """Prints a line that stays."""
        (self._console if self._bar is None else self._bar.console).print(Text(message), soft_wrap=True)

    def _refresh(self) -> None:
        if self._bar is not None:
            words = f"{self._num_finished} of {self._num_files} files"
            self._bar.update(self._task, completed=self._num_bytes, description=words)

    def _line(self) -> str | None:
        """A line of a log, if one is due."""
        now_s = time.monotonic()
        if not self._seen:
            self._seen = [(now_s, self._num_bytes)]
        if self._bar is not None or not self._total_bytes or now_s - self._line_s < _LINE_S:
            return None
        self._line_s = now_s
        self._seen = [each for each in self._seen if now_s - each[0] <= _WINDOW_S] or self._seen[-1:]
        (then_s, then), left = self._seen[0], self._total_bytes - self._num_bytes
        rate = max(self._num_bytes - then, 0) / max(now_s - then_s, 0.001)  # bytes per second
        self._seen.append((now_s, self._num_bytes))
        return (
            f"{self._num_finished} of {self._num_files} files, {self._num_bytes / 1e9:.2f} of "
            f"{self._total_bytes / 1e9:.2f} GB, {rate / 1e6:.1f} MB/s"
            f"{f', {left / rate:.0f} s left' if rate else ''}"
        )
