"""Charts are well-formed and show what they were given."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from benchmarks.shared.plot import bars, lines

SVG = "{http://www.w3.org/2000/svg}"


def shapes(path: Path, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.parse(path).getroot().iter(SVG + kind))


def texts(path: Path) -> set[str]:
    return {each.text or "" for each in shapes(path, "text")}


def test_bars_draws_one_bar_per_value_and_names_groups_and_series(tmp_path: Path) -> None:
    path = tmp_path / "bars.svg"
    groups = {
        "batch 1": {"a": (1.0, 0.5, 1.2), "b <&>": (300.4, 250.0, 400.0)},
        "batch 8": {"a": (0.0, 0.0, 0.0)},
    }
    bars(path, 'Title "&"', groups, "tokens/s")
    drawn = [each for each in shapes(path, "rect") if each.get("width") == "26"]
    assert len(drawn) == 3
    assert {'Title "&"', "batch 1", "batch 8", "a", "b <&>", "tokens/s", "300"} <= texts(path)


def test_bars_heights_are_proportional_to_values(tmp_path: Path) -> None:
    path = tmp_path / "bars.svg"
    bars(path, "", {"group": {"a": (2.0, 2.0, 2.0), "b": (1.0, 1.0, 1.0)}}, "")
    first, second = (float(each.get("height", "")) for each in shapes(path, "rect") if each.get("width") == "26")
    assert abs(first - 2 * second) < 0.2


def test_a_series_keeps_its_colour_in_groups_that_lack_another(tmp_path: Path) -> None:
    path = tmp_path / "bars.svg"
    bars(path, "", {"one": {"a": (1.0, 1.0, 1.0), "b": (1.0, 1.0, 1.0)}, "two": {"b": (1.0, 1.0, 1.0)}}, "")
    colours = [each.get("fill") for each in shapes(path, "rect") if each.get("width") == "26"]
    assert colours[1] == colours[2] != colours[0]


def test_lines_draws_one_point_per_value_in_the_order_of_x(tmp_path: Path) -> None:
    path = tmp_path / "lines.svg"
    series = {"a": [(8.0, 6.0, 5.0, 7.0), (1.0, 2.0, 1.0, 3.0)], "b": [(32.0, 9.0, 8.0, 10.0)]}
    lines(path, "Lines", series, "streams", "tokens/s")
    assert len(shapes(path, "circle")) == 3
    points = shapes(path, "polyline")[0].get("points", "").split()
    assert [float(point.split(",")[0]) for point in points] == sorted(float(point.split(",")[0]) for point in points)
    assert {"Lines", "a", "b", "streams", "tokens/s", "1", "8", "32"} <= texts(path)


def test_charts_of_nothing_are_well_formed(tmp_path: Path) -> None:
    bars(tmp_path / "bars.svg", "", {}, "")
    lines(tmp_path / "lines.svg", "", {}, "", "")
    assert not shapes(tmp_path / "bars.svg", "circle")
    assert not shapes(tmp_path / "lines.svg", "circle")


def test_control_characters_do_not_break_the_file(tmp_path: Path) -> None:
    bars(tmp_path / "bars.svg", "a\x00b", {"g": {"s": (1.0, 1.0, 1.0)}}, "")
    assert "a?b" in texts(tmp_path / "bars.svg")
