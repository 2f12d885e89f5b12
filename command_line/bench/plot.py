"""Line charts as one self-contained SVG, and the parts of which other charts are made. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

# Distinguishable with colour blindness (Okabe and Ito).
COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_WIDTH, _HEIGHT = 420, 300  # of a panel, pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 40, 48  # between panel and axes
LINE_HEIGHT: Final = 18
_NUM_TICKS = 4
_NUM_MARKED: Final = 50  # labels up to which every value of a line has a point


@dataclass(frozen=True, slots=True)
class Line:
    """One value per label of its panel; None leaves a gap."""

    values: Sequence[float | None]
    color: int  # index into COLORS, modulo their number
    is_dashed: bool = False
    ends: Sequence[tuple[float, float] | None] = ()  # of each value's spread, drawn as a whisker


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. Its labels have equal distances, whatever their values; an empty one is not shown."""

    title: str
    x_title: str
    labels: Sequence[str]
    lines: Sequence[Line]


def draw(heading: str, panels: Sequence[Panel], names: Sequence[str], note: str = "") -> str:
    """The charts side by side, with a legend of one name per colour below."""
    width = max(_WIDTH * len(panels), 9 * len(heading) + 40)
    top = 30
    height = top + _HEIGHT + LINE_HEIGHT * (len(names) + (2 if note else 1))
    body = [
        text_at(width / 2, 22, heading, size=15, weight="bold"),
        *(
            f'<g transform="translate({_WIDTH * index},{top})">{_panel(panel)}</g>'
            for index, panel in enumerate(panels)
        ),
        *legend(names, _LEFT, top + _HEIGHT),
    ]
    if note:
        body.append(text_at(_LEFT, height - 10, note, anchor="start", color="#666"))
    return document(width, height, body)


def document(width: float, height: float, parts: Sequence[str]) -> str:
    """An SVG file with `parts` on white; sizes in pixels."""
    content = "\n".join([f'<rect width="{width}" height="{height}" fill="white"/>', *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n{content}\n</svg>\n'
    )


def _panel(panel: Panel) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    top_tick, step = scale(
        value
        for line in panel.lines
        for value in (*line.values, *(end for ends in line.ends if ends for end in ends))
        if value is not None
    )

    def x(index: int) -> float:
        if len(panel.labels) == 1:
            return (_LEFT + right) / 2
        return _LEFT + 20 + (right - _LEFT - 40) * index / (len(panel.labels) - 1)

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * value / top_tick

    parts = [text_at((_LEFT + right) / 2, 24, panel.title, weight="bold")]
    parts += axis(top_tick, step, _LEFT, right, y)
    parts += [text_at(x(index), bottom + 18, label) for index, label in enumerate(panel.labels) if label]
    parts.append(text_at((_LEFT + right) / 2, bottom + 38, panel.x_title))
    for line in panel.lines:
        known = [(x(index), y(value)) for index, value in enumerate(line.values) if value is not None]
        points = " ".join(f"{at:.1f},{level:.1f}" for at, level in known)
        dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        color = color_of(line.color)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        for index, ends in enumerate(line.ends):
            parts += [whisker(x(index), y(ends[0]), y(ends[1]), color)] if ends else []
        if len(panel.labels) <= _NUM_MARKED:
            parts += [f'<circle cx="{at:.1f}" cy="{level:.1f}" r="3" fill="{color}"/>' for at, level in known]
    return "\n".join(parts)


def scale(values: Iterable[float]) -> tuple[float, float]:
    """(top, step) of an axis from 0: round steps, the top a multiple of them and at or above every value."""
    largest = max(values, default=0.0)
    if not 0 < largest < math.inf:
        return 1.0, 0.5
    power = 10.0 ** math.floor(math.log10(largest / _NUM_TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * _NUM_TICKS >= largest * (1 - 1e-9))
    return step * math.ceil(largest / step - 1e-9), step


def axis(top: float, step: float, left: float, right: float, y: Callable[[float], float]) -> Iterator[str]:
    """Horizontal lines at round values, with labels; `y` gives a value's place."""
    for number in range(round(top / step) + 1):
        at = y(number * step)
        yield f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
        yield text_at(left - 6, at + 4, f"{number * step:g}", anchor="end")


def legend(names: Sequence[str], left: float, top: float) -> Iterator[str]:
    """A line per name, below each other, with its colour."""
    for index, name in enumerate(names):
        y = top + LINE_HEIGHT * (index + 1)
        yield f'<rect x="{left}" y="{y - 10}" width="12" height="12" fill="{color_of(index)}"/>'
        yield text_at(left + 20, y, name, anchor="start")


def whisker(x: float, low: float, high: float, color: str = "#222") -> str:
    """A vertical line between two places, with ends."""
    return (
        f'<path d="M{x - 4:.1f} {low:.1f}h8M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {high:.1f}h8" '
        f'stroke="{color}" fill="none"/>'
    )


def color_of(index: int) -> str:
    return COLORS[index % len(COLORS)]


def text_at(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "middle",
    size: int = 12,
    weight: str = "normal",
    color: str = "#222",
) -> str:
    """One line of SVG text; `anchor` is the part of it at x."""
    # escape() keeps control characters, which XML forbids.
    shown = escape("".join(letter if letter.isprintable() else "?" for letter in text))
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{color}">{shown}</text>'
    )
