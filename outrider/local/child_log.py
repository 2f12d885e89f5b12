"""Log file of a child process, of bounded size, with its last lines available for error messages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

NUM_TAIL_LINES = 20
FILE_LEN_MAX = 16 << 20  # bytes; one older file of the same size is kept


class ChildLog:
    """The output of one child over all its restarts."""

    def __init__(self, name: str, log_dir: Path, echo: Callable[[str, str], None] | None = None) -> None:
        self.path = log_dir / f"{name}.log"
        self._name = name
        self._echo = echo
        self._tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._file = RotatingFileHandler(self.path, maxBytes=FILE_LEN_MAX, backupCount=1, encoding="utf-8", delay=True)

    def write(self, line: str) -> None:
        """Appends one line, and repeats it to `echo(name, line)` if there is one."""
        self._tail.append(line)
        self._file.handle(logging.makeLogRecord({"msg": line}))
        if self._echo is not None:
            self._echo(self._name, line)

    def tail(self) -> list[str]:
        """The last lines, oldest first."""
        return list(self._tail)

    def close(self) -> None:
        self._file.close()
