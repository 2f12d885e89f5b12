"""Charts that are well-formed and true to scale."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from command_line.bench.plot import Line, Panel, draw, scale

SVG = "{http://www.w3.org/2000/svg}"


def test_larger_values_stand_higher_and_gaps_have_no_point() -> None:
    panel = Panel("tokens/s", "at once", ["1", "8", "32"], [Line([10.0, None, 40.0], 0)])
    root = ElementTree.fromstring(draw("title", [panel], ["a"]))
    points = [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in root.iter(f"{SVG}circle")]
    assert len(points) == 2
    (left, low), (right, high) = points
    assert left < right
    assert low > high, "y grows downwards"


def test_names_are_text_whatever_they_hold() -> None:
    root = ElementTree.fromstring(draw("<&>", [Panel("", "", ["1"], [])], ["a<b\x00", 'c"&d'], note="\x1b[0m"))
    shown = [each.text for each in root.iter(f"{SVG}text")]
    assert {"<&>", "a<b?", 'c"&d'} <= set(shown)


@pytest.mark.parametrize(
    ("values", "top", "step"),
    [
        ([], 1.0, 0.5),
        ([0.0], 1.0, 0.5),
        ([float("inf")], 1.0, 0.5),
        ([1.0], 1.0, 0.5),
        ([7.0, 3.0], 8.0, 2.0),
        ([41.0], 60.0, 20.0),
        ([0.03], 0.03, 0.01),
        ([12_345.0], 15_000.0, 5000.0),
    ],
)
def test_axes_end_on_round_numbers(values: list[float], top: float, step: float) -> None:
    assert list(scale(values)) == pytest.approx([top, step])
