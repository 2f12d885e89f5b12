"""Log file of a child process, of bounded size, with its last lines available for error messages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from io import BufferedWriter, FileIO, TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from outrider.local.private_files import open_private
from outrider.visible_text import visible

NUM_TAIL_LINES = 20
FILE_LEN_MAX = 16 << 20  # bytes; one older file of the same size is kept


class _PrivateFile(RotatingFileHandler):
    """A file that only its owner can read: lines name tenants, requests and addresses."""

    def _open(self) -> TextIOWrapper:
        raw = FileIO(self.baseFilename, "a", opener=open_private)
        return TextIOWrapper(BufferedWriter(raw), encoding=self.encoding)


class ChildLog:
    """The output of one child over all its restarts.

    A child may print whatever a model folder or a client made it print, so control characters are written out: a
    terminal that shows the file, or its end in an error message, obeys none.
    """

    def __init__(self, name: str, log_dir: Path, echo: Callable[[str, str], None] | None = None) -> None:
        self.path = log_dir / f"{name}.log"
        self._name = name
        self._echo = echo
        self._tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._file = _PrivateFile(self.path, maxBytes=FILE_LEN_MAX, backupCount=1, encoding="utf-8", delay=True)

    def write(self, line: str) -> None:
        """Appends one line, and repeats it to `echo(name, line)` if there is one."""
        line = visible(line)
        self._tail.append(line)
        self._file.handle(logging.makeLogRecord({"msg": line}))
        if self._echo is not None:
            self._echo(self._name, line)

    def tail(self) -> list[str]:
        """The last lines, oldest first."""
        return list(self._tail)

    def close(self) -> None:
        self._file.close()
