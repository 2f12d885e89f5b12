"""Two circles of tests: `make test` runs the first, `make test-all` the second as well.

The first circle is for whoever wants to know whether a clone works, and takes minutes: every test that is neither slow
nor thorough, of each parametrized test its first case, and the tests marked `first`. A test that takes longer than two
seconds is thorough, unless nothing else shows the same. Tests of what users do not run (manifests, images, benchmarks,
the training of the demo pair), of the harnesses, and statistical ones of the canary and the simulator belong to it only
where that was changed.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
LATER: Final = ("slow", "thorough", "long")
"""Markers of tests that the first circle leaves out."""
WHERE_CHANGED: Final = {
    "tests/benchmarks/": ("benchmarks/",),
    "tests/cluster/": ("k8s/",),
    "tests/command_line/simulator/": ("command_line/simulator/",),
    "tests/demo/": ("demo/",),
    "tests/e2e/": (),
    "tests/exactness/test_mutations.py": (),
    "tests/images/": ("k8s/images/", "pyproject.toml"),
    "tests/k8s/": ("k8s/",),
    "tests/outrider/canary/": ("outrider/canary/",),
    "tests/simulation/": (),
}
"""Tests that belong to the first circle only where they, or something below these paths, were changed.

Tests without paths belong to it only where they were changed themselves. What is left out is not imported either.
"""


def first_circle(items: Sequence[pytest.Item], changed: Iterable[str]) -> set[pytest.Item]:
    """Those of the collected tests that the first circle runs; `changed` are paths of files."""
    omitted = left_out(changed)
    chosen: dict[str, pytest.Item] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        is_later = any(map(item.get_closest_marker, LATER))
        if not name.startswith(omitted) and (item.get_closest_marker("first") or not is_later):
            chosen.setdefault(name, item)
    return set(chosen.values())


def left_out(changed: Iterable[str]) -> tuple[str, ...]:
    """The paths of tests that the first circle leaves out, because nothing of theirs is among the files `changed`."""
    changed = tuple(changed)
    return tuple(
        tests for tests, paths in WHERE_CHANGED.items() if not any(name.startswith((*paths, tests)) for name in changed)
    )


@functools.cache
def changed_files() -> tuple[str, ...]:
    """Paths that differ from the upstream branch, or from the last commit where there is none."""
    base = _git("merge-base", "HEAD", "@{upstream}") or ["HEAD"]
    return (*_git("diff", "--name-only", base[0]), *_git("ls-files", "--others", "--exclude-standard"))


def _git(*arguments: str) -> list[str]:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    return result.stdout.splitlines() if result.returncode == 0 else []
