"""Every published format gives the logits of reference code, and the page that says so is fresh."""

from __future__ import annotations

import functools

import pytest

from tests.engine.heads import engines, table
from tests.engine.heads.checkpoints import EAGLE3_CASES, token_ids
from tests.engine.heads.table import Comparison


@functools.cache
def compared(name: str) -> list[Comparison]:
    return list(table.comparisons(engines.CASES[name]))


@pytest.mark.parametrize("name", engines.CASES)
def test_a_format_gives_the_logits_of_its_references(name: str) -> None:
    assert not [each for each in compared(name) if not each.difference <= table.TOLERANCE]


def test_the_page_has_every_format() -> None:
    written = table.PAGE.read_text(encoding="utf-8")
    made = table.page([each for name in engines.CASES for each in compared(name)])
    assert table.without_figures(written) == table.without_figures(made), (
        "write it anew: python -m tests.engine.heads.table --write"
    )


def test_a_row_that_fed_on_another_feature_would_be_seen() -> None:
    """The comparison can fail: one token's state of the target is another one."""
    case = EAGLE3_CASES[0]
    changed = case.states()
    changed[3] += 0.01
    engine = engines.head_engine(case.name)
    given = engines.projection(case.name).project(changed)
    kv, logits = engines.start(engine, token_ids(), given)
    kv.free()
    assert engines.difference(logits[1:], table.eagle_formula(case)) > 100 * table.TOLERANCE
