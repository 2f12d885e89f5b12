"""Charts of benchmark results as self-contained SVG files: grouped bars, and lines over a number.

Every value has the ends of its spread (usually quartiles), drawn as a whisker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from command_line.bench import plot

Value = tuple[float, float, float]  # middle, low, high
Point = tuple[float, float, float, float]  # x, y, low, high

_HEIGHT: Final = 300  # of the plotting area, pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 56, 46  # around it
_BAR_WIDTH, _GROUP_GAP = 30, 34
_LETTER_WIDTH: Final = 7.0  # on average, at 12 pixels


def bars(path: Path | str, title: str, groups: Mapping[str, Mapping[str, Value]], unit: str) -> None:
    """Draws bars side by side in named groups: `{group: {series: (value, low, high)}}`.

    A series has one colour throughout and may be missing from a group. `unit` labels the axis, which begins at 0.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    values = (each for group in groups.values() for value in group.values() for each in value)
    top, step = plot.scale(filter(math.isfinite, values))
    widths = [
        max(_BAR_WIDTH * len(group), round(_LETTER_WIDTH * len(name))) + _GROUP_GAP for name, group in groups.items()
    ]
    width = max(sum(widths) + _LEFT + _RIGHT, round(1.2 * _LETTER_WIDTH * len(title)) + 40, 320)

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (1 - (value if math.isfinite(value) else 0.0) / top)

    parts = [plot.text_at(width / 2, 22, title, size=15, weight="bold")]
    parts.append(plot.text_at(_LEFT - 8, _TOP - 14, unit, anchor="start", color="#666"))
    parts += plot.axis(top, step, _LEFT, width - _RIGHT, y)
    left = float(_LEFT)
    for (group_name, group), group_width in zip(groups.items(), widths, strict=True):
        parts.append(plot.text_at(left + group_width / 2, _TOP + _HEIGHT + 20, group_name))
        x = left + (group_width - _BAR_WIDTH * len(group)) / 2
        for name in [name for name in names if name in group]:
            middle, low, high = map(y, group[name])
            center = x + _BAR_WIDTH / 2
            parts += [
                f'<rect x="{x + 2:.1f}" y="{middle:.1f}" width="{_BAR_WIDTH - 4}" height="{y(0) - middle:.1f}" '
                f'fill="{plot.color_of(names.index(name))}"/>',
                plot.whisker(center, low, high),
                plot.text_at(center, min(middle, high) - 5, _figure(group[name][0]), size=10),
            ]
            x += _BAR_WIDTH
        left += group_width
    bottom = _TOP + _HEIGHT + _BOTTOM
    parts += plot.legend(names, _LEFT, bottom)
    drawn = plot.document(width, bottom + plot.LINE_HEIGHT * len(names) + 8, parts)
    Path(path).write_text(drawn, encoding="utf-8")


def _figure(value: float) -> str:
    """A value to three digits, which is finer than the spread."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def lines(path: Path | str, title: str, series: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> None:
    """Draws one line per series: `{series: [(x, y, low, high)]}`. Its numbers x have equal distances."""
    line_panels(path, title, {y_label: series}, x_label)


def line_panels(
    path: Path | str, title: str, panels: Mapping[str, Mapping[str, Sequence[Point]]], x_label: str
) -> None:
    """Draws panels of lines below each other, by the label of their y: `{y: {series: [(x, y, low, high)]}}`. A series
    has one colour throughout and may be missing from a panel."""
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    drawn = []
    for y_label, series in panels.items():
        xs = sorted({point[0] for points in series.values() for point in points})
        own = []
        for name, points in series.items():
            found = {x: (y, (low, high)) for x, y, low, high in points}
            values = [found[x][0] if x in found else None for x in xs]
            ends = [found[x][1] if x in found else None for x in xs]
            own.append(plot.Line(values, names.index(name), ends=ends))
        drawn.append(plot.Panel(y_label, x_label, [f"{x:g}" for x in xs], own))
    Path(path).write_text(plot.draw(title, drawn, names), encoding="utf-8")
