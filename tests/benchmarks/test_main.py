"""`python -m benchmarks` finds every benchmark, and the documentation names each."""

from __future__ import annotations

import re

import pytest

from benchmarks import __main__ as runner
from tests.docs.pages import read


def test_the_page_of_methods_names_exactly_the_benchmarks_that_there_are() -> None:
    rows = re.findall(r"^\| (`.+?) \|", read("docs/benchmarks/method.md"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(runner.benchmarks())


def test_without_a_name_it_lists_them_and_an_unknown_one_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, status in (([], 0), (["--help"], 0), (["no_such"], 2)):
        monkeypatch.setattr("sys.argv", ["benchmarks", *words])
        assert runner.main() == status
        printed = capsys.readouterr()
        assert "speedup           Measures one request at a time" in (printed.err if status else printed.out)


@pytest.mark.parametrize("name", runner.benchmarks())
def test_every_one_explains_its_flags(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code == 0
    assert f"usage: python -m benchmarks {name}" in capsys.readouterr().out
