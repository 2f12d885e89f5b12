"""Status line and messages while processes start, stop and restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from outrider.local.child_spec import ChildEvent, Phase


class Progress:
    """A status line on a terminal, plain lines elsewhere. All of it goes to `console`, which writes to stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._pending: dict[str, float] = {}  # name of a starting child -> start time, monotonic seconds
        self._message = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("", refresh_per_second=5)
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def say(self, message: str) -> None:
        """Shows what happens now. On a terminal a new message replaces the last one."""
        if self._status is None:
            self.note(message)
        self.update(message)

    def update(self, message: str) -> None:
        """Like `say`, but on a terminal only: details that would fill a log."""
        self._message = message
        self._refresh()

    def note(self, message: str) -> None:
        """Prints a line that stays."""
        self._console.print(Text(message), soft_wrap=True)

    def warn(self, message: str) -> None:
        """Prints a warning that stays."""
        self._console.print(Text.assemble(("warning ", "bold red"), message), soft_wrap=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hides the status line while something else writes to the terminal."""
        if self._status is None:
            yield
            return
        self._status.stop()
        try:
            yield
        finally:
            self._status.start()

    def on_event(self, event: ChildEvent) -> None:
        """Reports that a child started, became ready, died or stopped."""
        if event.phase is Phase.STARTING:
            self._pending[event.name] = time.monotonic()
        elif event.phase is Phase.READY:
            began_s = self._pending.pop(event.name, time.monotonic())
            self._line("ready", "green", event.name, f"after {time.monotonic() - began_s:.1f} s")
        elif event.phase is Phase.DIED:
            self._line("died", "red", event.name, event.detail)
        else:
            self._pending.pop(event.name, None)
            if event.detail:
                self._line("stopped", "red", event.name, event.detail)
        self._refresh()

    def echo(self, name: str, line: str) -> None:
        """Prints one line of a child's output."""
        self._console.print(Text.assemble((f"{name:>12} │ ", "dim"), line), soft_wrap=True)

    def _line(self, word: str, style: str, name: str, detail: str) -> None:
        self._console.print(Text.assemble((f"{word:>7} ", style), f"{name} ", (detail, "dim")), soft_wrap=True)

    def _refresh(self) -> None:
        if self._status is not None:
            waiting = f" waiting for {', '.join(self._pending)}" if self._pending else ""
            self._status.update(Text.assemble(self._message, (waiting, "dim")))
