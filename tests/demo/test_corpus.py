"""The split keeps held-out files away from training, for good."""

from __future__ import annotations

from pathlib import Path

import pytest

import demo
from demo import corpus

DEMO = Path(demo.__file__).parent


@pytest.fixture(scope="module")
def files() -> tuple[list[corpus.SourceFile], list[corpus.SourceFile]]:
    return corpus.training_files(), corpus.held_out_files()


def test_splits_are_disjoint_and_both_usable(
    files: tuple[list[corpus.SourceFile], list[corpus.SourceFile]],
) -> None:
    training, held_out = files
    assert not {file.name for file in training} & {file.name for file in held_out}
    assert len(training) > 10 * len(held_out) > 100


def test_held_out_prompts_do_not_come_from_training_files(
    files: tuple[list[corpus.SourceFile], list[corpus.SourceFile]],
) -> None:
    training, held_out = files
    library = "\x00".join(file.text for file in training)
    prompts = corpus.held_out_prompts(50)
    assert len(prompts) == 50
    assert all(any(prompt in file.text for file in held_out) for prompt in prompts)
    # Boilerplate such as a licence may occur in both; a whole prompt almost never does.
    assert sum(prompt in library for prompt in prompts) <= 1


def test_prompts_are_a_function_of_their_arguments() -> None:
    assert corpus.held_out_prompts(10) == corpus.held_out_prompts(20)[:10]
    assert corpus.held_out_prompts(10, seed=1) != corpus.held_out_prompts(10)


def test_written_split_follows_the_rule() -> None:
    listed = (DEMO / "held_out.txt").read_text().split()
    assert listed
    assert all(corpus.is_held_out(name) and not corpus.is_skipped(name) for name in listed)


def test_other_peoples_packages_and_tests_are_skipped(tmp_path: Path) -> None:
    for name in (
        "a.py",
        "json/empty.py",
        "site-packages/b.py",
        "json/tests/c.py",
        "_sysconfigdata_x.py",
        "json/d.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "json/empty.py").write_text("\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    files = corpus.training_files(tmp_path) + corpus.held_out_files(tmp_path)
    assert sorted(file.name for file in files) == ["a.py", "json/d.py"]
