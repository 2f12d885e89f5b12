"""Golden traces: what a pure core does in a few runs, as text that documents it and that a test compares.

`OUTRIDER_WRITE_TRACES=1 pytest ...` writes them anew; read the difference before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path


def check_trace(path: Path, text: str) -> None:
    """Fails where the trace differs from the file."""
    if os.environ.get("OUTRIDER_WRITE_TRACES"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"there is no {path.name}; OUTRIDER_WRITE_TRACES=1 writes it"
    assert text == path.read_text(encoding="utf-8")


class Trace:
    """A run as it is told: a title, and for each event a line with what the core decided."""

    def __init__(self, title: str, width: int = 48) -> None:
        """`width`: characters of an event, before the arrow."""
        self._lines, self._width = [title, ""], width

    def add(self, event: str, decided: str, *details: str) -> None:
        """Adds an event and what was decided; `details` stand below."""
        self._lines.append(f"{event:<{self._width}} -> {decided or 'nothing'}")
        self._lines += [f"{'':{self._width}}    {each}" for each in details]

    def check(self, path: Path) -> None:
        """Compares the run with a file."""
        check_trace(path, "\n".join([*self._lines, ""]))
