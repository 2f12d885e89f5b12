"""All output of the commands to a terminal, which shows control characters of text from elsewhere and obeys none.

Invariant: every command writes through `TerminalConsole` or `print_line`, and no other module of this package prints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from outrider.visible_text import visible


class TerminalConsole(Console):
    """A console whose texts are shown as they are: without markup, without guessed colours, without control
    characters. Styles come from `rich.text.Text`."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of anything that can be printed, from which rich makes all its output."""
        for segment in super().render(renderable, options):
            # What rich does to the cursor comes as control segments, which no text becomes.
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def print_line(text: str = "", *, stderr: bool = False) -> None:
    """Writes plain text, which programs may read, and ends the line."""
    print(visible(text), file=sys.stderr if stderr else sys.stdout, flush=True)
