"""Every published format gives the logits of reference code, and the page that says so is fresh."""

from __future__ import annotations

from tests.engine.heads import table


def test_every_format_gives_the_logits_of_its_references_and_the_page_says_so() -> None:
    found = list(table.comparisons())
    assert not [each for each in found if not each.difference <= table.TOLERANCE]
    written = table.PAGE.read_text(encoding="utf-8")
    made = table.page(found)
    assert table.without_figures(written) == table.without_figures(made), (
        "write it anew: python -m tests.engine.heads.table --write"
    )


def test_a_row_that_fed_on_another_feature_would_be_seen() -> None:
    """The comparison can fail: one token's state of the target is another one."""
    case = table.EAGLE3_CASES[0]
    changed = case.states()
    changed[3] += 0.01
    engine = table.engines.head_engine(case.name)
    given = table.engines.projection(case.name).project(changed)
    kv, logits = table.engines.start(engine, table.token_ids(), given)
    kv.free()
    assert table.engines.difference(logits[1:], table.eagle_formula(case)) > 100 * table.TOLERANCE
