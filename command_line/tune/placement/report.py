"""The table of placements, and what it means. Pure."""

from __future__ import annotations

from typing import Any, Final

from rich.table import Table
from rich.text import Text

from command_line.tune.placement.prediction import PlacementForecast, Placements

CLOSE: Final = 0.05
"""Share by which two predicted rates may differ and still count as equal."""
WORDS: Final = (
    "Where the draft runs: predicted tokens/s of all sequences together, by batch, with the best γ in parentheses. in "
    "turns: draft and target share a device or cores, and one of them runs at a time. cost: of all devices, relative "
    "to each other. Lines with = spend the draft's money on more of the target instead, without a draft."
)


def placement_table(found: Placements) -> Table:
    """Tokens per second by placement and batch."""
    made = Table(title="Where the draft runs: predicted tokens/s, by batch", title_style="bold")
    made.add_column("placement")
    made.add_column("cost", justify="right")
    for batch in found.batches:
        made.add_column(str(batch), justify="right")
    for each in found.forecasts:
        sign = "= " if each.placement.is_equal_cost else ""
        cells = [_cell(rate, gamma) for rate, gamma in zip(each.tokens_per_s, each.num_hints, strict=True)]
        style = "dim" if each.placement.has_free_shards else ""
        made.add_row(Text(sign + each.placement.name), f"{each.placement.price:.4g}", *cells, style=style)
    return made


def _cell(rate: float, gamma: int) -> str:
    return f"{rate:.0f} ({gamma})" if gamma else f"{rate:.0f}"


def placement_words(found: Placements) -> list[str]:
    """The meaning, in a sentence for the smallest batch and one for the largest, and what is missing or assumed."""
    lines = []
    for index in sorted({0, len(found.batches) - 1}):
        draft = found.best_draft(index)
        if draft is not None:
            lines.append(_compared(found, index, draft))
    notes = [f"{each.placement.name}: {each.placement.note}." for each in found.forecasts if each.placement.note]
    if found.why_no_more:
        notes.append(f"Not compared: {found.why_no_more}.")
    return [*lines, *notes]


def _compared(found: Placements, index: int, draft: PlacementForecast) -> str:
    """The best placement of a draft at a batch size against the target alone at the same cost."""
    here = f"At batch {found.batches[index]}"
    if not draft.num_hints[index]:
        return f"{here} no placement of the draft pays: the target alone is as fast."
    best = f"{here} the fastest is: {draft.placement.name}, {draft.tokens_per_s[index]:.0f} tokens/s"
    more, bound = (found.without_draft(draft, index, is_bound=is_bound) for is_bound in (False, True))
    if more is None:
        return f"{best}."
    at_most = f", {bound.tokens_per_s[index]:.0f} at most as shards" if bound is not None else ""
    against = f"for the same cost, {more.placement.name} gives {more.tokens_per_s[index]:.0f}{at_most}"
    ratio = draft.tokens_per_s[index] / more.tokens_per_s[index]
    if abs(ratio - 1.0) <= CLOSE:
        verdict = "about the same"
    else:
        verdict = "the draft is worth its cost" if ratio > 1.0 else "more of the target is worth more than a draft"
    return f"{best}; {against}: {verdict}."


def placements_dict(found: Placements) -> dict[str, Any]:
    """The forecasts as JSON."""
    return {
        "batches": list(found.batches),
        "placements": [
            {
                "name": each.placement.name,
                "sharing": str(each.placement.sharing),
                "cost": each.placement.price,
                "is_equal_cost": each.placement.is_equal_cost,
                "is_bound": each.placement.has_free_shards,
                "note": each.placement.note,
                "tokens_per_s": list(each.tokens_per_s),
                "num_speculative_tokens": list(each.num_hints),
            }
            for each in found.forecasts
        ],
        "words": placement_words(found),
    }
