"""Every fenced command of the documentation is run by a test, or its page's source says why not."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT, Fence, all_pages, fences

COMMANDS = {"sh", "bash", "console", "python"}
TEST = re.compile(r"(?P<path>tests/[\w/]+\.py)::(?P<name>\w+)")


def mistakes(fence: Fence) -> Iterator[str]:
    """Mistakes in the marker of a block of commands, in words."""
    kind, _, text = fence.marker.partition(": ")
    first = fence.content.splitlines()[0]
    if kind == "not run" and len(text) > 10:
        return
    if kind != "run":
        yield f"nothing says who runs {first!r}"
        return
    if not (named := TEST.findall(text)):
        yield f"no test is named for {first!r}"
    for path, name in named:
        file = ROOT / path
        if not file.is_file() or not re.search(rf"\bdef {name}\(", file.read_text(encoding="utf-8")):
            yield f"there is no {path}::{name}"


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_commands_says_who_runs_it(page: object) -> None:
    found = fences(str(page.read_text(encoding="utf-8")))  # type: ignore[attr-defined]
    assert not [text for fence in found if fence.language in COMMANDS for text in mistakes(fence)]


def test_there_are_commands_of_both_kinds() -> None:
    markers = [fence.marker for page in all_pages() for fence in fences(page.read_text(encoding="utf-8"))]
    assert sum(marker.startswith("run: ") for marker in markers) >= 12
    assert any(marker.startswith("not run: ") for marker in markers)


@pytest.mark.parametrize(
    ("marker", "mistake"),
    [
        ("", "nothing says who runs"),
        ("not run: no", "nothing says who runs"),
        ("run: by hand", "no test is named"),
        ("run: tests/test_readme.py::test_nothing_of_the_kind", "there is no"),
        ("run: tests/test_nowhere.py::test_it", "there is no"),
    ],
)
def test_a_block_without_a_true_marker_is_found(marker: str, mistake: str) -> None:
    assert mistake in next(mistakes(Fence("sh", "make\n", marker)))


def test_a_block_inside_a_list_is_read_with_its_marker() -> None:
    (fence,) = fences("1. Do:\n\n    <!-- run: x -->\n    ```sh\n    a\n      b\n    ```\n")
    assert fence == Fence("sh", "a\n  b\n", "run: x")
