"""Which tests belong to the first circle."""

from __future__ import annotations

import pytest

from tests.circles import first_circle

pytest_plugins = ["pytester"]

MODULE = """
import pytest

def test_plain(): ...

@pytest.mark.parametrize("case", "abcd")
def test_matrix(case): ...

@pytest.mark.parametrize("case", [pytest.param("a", marks=pytest.mark.slow), "b", "c"])
def test_partly_slow(case): ...

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.slow
@pytest.mark.first
def test_system(): ...
"""


def names(items: list[pytest.Item], *changed: str) -> list[str]:
    first = first_circle(items, changed)
    return [item.nodeid.rpartition("::")[2] for item in items if item in first]


def collected(pytester: pytest.Pytester, path: str) -> list[pytest.Item]:
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers =\n    slow\n    first")
    file = pytester.path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(MODULE)
    items, _ = pytester.inline_genitems(str(file))
    return items


def test_it_has_what_is_quick_and_of_each_matrix_its_first_case(pytester: pytest.Pytester) -> None:
    items = collected(pytester, "tests/engine/test_it.py")
    assert names(items) == ["test_plain", "test_matrix[a]", "test_partly_slow[b]", "test_system"]


@pytest.mark.parametrize("changed", ["k8s/helm/outrider/values.yaml", "tests/k8s/test_it.py"])
def test_manifests_are_tested_in_it_only_where_they_were_changed(pytester: pytest.Pytester, changed: str) -> None:
    items = collected(pytester, "tests/k8s/test_it.py")
    assert names(items, "coordinator/settings.py") == []
    assert "test_plain" in names(items, changed)
