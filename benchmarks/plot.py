"""Charts of what a benchmark measured, as self-contained SVG files: grouped bars, and lines over a number.

Every value comes with the ends of its spread (quartiles, usually), drawn as a whisker. Colours and round axis steps
are those of `outrider bench --plot`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from outrider.cli.bench.plot import COLORS, document, scale, text_at

Value = tuple[float, float, float]  # middle, low, high
Point = tuple[float, float, float, float]  # x, y, low, high

_HEIGHT: Final = 300  # of the plotting area, pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 56, 46  # around it
_LINE_HEIGHT: Final = 18
_BAR_WIDTH, _GROUP_GAP = 30, 34
_LINES_WIDTH: Final = 560
_LETTER_WIDTH: Final = 7.0  # on average, at 12 pixels


def bars(path: Path | str, title: str, groups: Mapping[str, Mapping[str, Value]], unit: str) -> None:
    """Writes bars side by side in named groups: `{group: {series: (value, low, high)}}`.

    A series has one colour throughout and may be missing from a group. `unit` stands beside the axis, which begins
    at 0.
    """
    names = _series(groups.values())
    top, step = _scale(each for group in groups.values() for value in group.values() for each in value)
    widths = [
        max(_BAR_WIDTH * len(group), round(_LETTER_WIDTH * len(name))) + _GROUP_GAP
        for name, group in groups.items()
    ]
    width = max(sum(widths) + _LEFT + _RIGHT, round(1.2 * _LETTER_WIDTH * len(title)) + 40, 320)
    parts = _axis(top, step, width, unit)
    left = float(_LEFT)
    for (group_name, group), group_width in zip(groups.items(), widths, strict=True):
        middle = left + group_width / 2
        parts.append(text_at(middle, _TOP + _HEIGHT + 20, group_name))
        x = middle - _BAR_WIDTH * len(group) / 2
        for name in [name for name in names if name in group]:
            parts.append(_bar(x, group[name], top, COLORS[names.index(name) % len(COLORS)]))
            x += _BAR_WIDTH
        left += group_width
    _write(path, title, parts, names, width)


def _bar(x: float, value: Value, top: float, color: str) -> str:
    middle, low, high = (_y(each, top) for each in value)
    center = x + _BAR_WIDTH / 2
    return "\n".join([
        f'<rect x="{x + 2:.1f}" y="{middle:.1f}" width="{_BAR_WIDTH - 4}" height="{_y(0, top) - middle:.1f}" '
        f'fill="{color}"/>',
        _whisker(center, low, high),
        text_at(center, min(middle, high) - 5, _figure(value[0]), size=10),
    ])  # fmt: skip


def lines(
    path: Path | str, title: str, series: Mapping[str, Sequence[Point]], x_label: str, y_label: str
) -> None:
    """Writes one line per series: `{series: [(x, y, low, high)]}`, both axes linear; the y axis begins at 0."""
    xs = [point[0] for points in series.values() for point in points]
    begin, end = min(xs, default=0.0), max(xs, default=1.0)
    top, step = _scale(each for points in series.values() for point in points for each in point[1:])
    width = max(_LINES_WIDTH, round(1.2 * _LETTER_WIDTH * len(title)) + 40)
    inner_left, inner_right = _LEFT + 20, width - _RIGHT - 20

    def at(x: float) -> float:
        share = (x - begin) / (end - begin) if end > begin else 0.5
        return inner_left + (inner_right - inner_left) * share

    parts = _axis(top, step, width, y_label)
    shown = -math.inf
    for x in sorted(set(xs)):
        if at(x) - shown >= 4 * _LETTER_WIDTH:  # labels that would overlap are left out
            parts.append(text_at(at(x), _TOP + _HEIGHT + 18, f"{x:g}"))
            shown = at(x)
    parts.append(text_at((_LEFT + width - _RIGHT) / 2, _TOP + _HEIGHT + 38, x_label))
    for index, points in enumerate(series.values()):
        color = COLORS[index % len(COLORS)]
        ordered = sorted(points)
        path_points = " ".join(f"{at(x):.1f},{_y(y, top):.1f}" for x, y, _, _ in ordered)
        parts.append(f'<polyline points="{path_points}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, y, low, high in ordered:
            parts.append(_whisker(at(x), _y(low, top), _y(high, top), color))
            parts.append(f'<circle cx="{at(x):.1f}" cy="{_y(y, top):.1f}" r="3" fill="{color}"/>')
    _write(path, title, parts, list(series), width)


def _series(groups: Iterable[Iterable[str]]) -> list[str]:
    """Names of all series, in the order of their first appearance."""
    return list(dict.fromkeys(name for group in groups for name in group))


def _scale(values: Iterable[float]) -> tuple[float, float]:
    return scale(each for each in values if math.isfinite(each))


def _y(value: float, top: float) -> float:
    return _TOP + _HEIGHT * (1 - (value if math.isfinite(value) else 0.0) / top)


def _axis(top: float, step: float, width: float, label: str) -> list[str]:
    """Lines across at round values, and what they count."""
    parts = [text_at(_LEFT - 8, _TOP - 14, label, anchor="start", color="#666")]
    for number in range(round(top / step) + 1):
        y = _y(number * step, top)
        parts.append(f'<line x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(text_at(_LEFT - 6, y + 4, f"{number * step:g}", anchor="end"))
    return parts


def _whisker(x: float, low: float, high: float, color: str = "#222") -> str:
    return (
        f'<path d="M{x - 4:.1f} {low:.1f}h8M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {high:.1f}h8" '
        f'stroke="{color}" fill="none"/>'
    )


def _figure(value: float) -> str:
    """Three digits, which is finer than the spread."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _write(path: Path | str, title: str, parts: Sequence[str], names: Sequence[str], width: float) -> None:
    legend_top = _TOP + _HEIGHT + _BOTTOM
    height = legend_top + _LINE_HEIGHT * len(names) + 8
    legend = [
        f'<rect x="{_LEFT}" y="{y - 10}" width="12" height="12" fill="{COLORS[index % len(COLORS)]}"/>'
        + text_at(_LEFT + 20, y, name, anchor="start")
        for index, name in enumerate(names)
        for y in [legend_top + _LINE_HEIGHT * index + 12]
    ]
    body = [text_at(width / 2, 22, title, size=15, weight="bold"), *parts, *legend]
    Path(path).write_text(document(width, height, body), encoding="utf-8")
