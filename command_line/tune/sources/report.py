"""Tables, verdict and warnings of a comparison of sources, for people. Pure."""

from __future__ import annotations

from typing import Final

from rich.table import Table
from rich.text import Text

from command_line.draft_kinds import Kind
from command_line.tune.advice import MIN_GAIN, NOISE
from command_line.tune.report import MIN_TOKENS, SPREAD_MAX, bound_words
from command_line.tune.sources.comparison import Comparison, Judged, best_at
from command_line.tune.sources.forecasts import Place

_SHOWN_NUM_HINTS: Final = (1, 2, 4, 8, 12, 16, 20)
_ROWS: Final = 8  # of a draft worker's pass

WORDS: Final = (
    "γ: hints that a step verifies for a sequence. τ: tokens that a step adds to it, 1 without hints. ms: of a pass "
    "of one row; 8 rows: of a pass of eight, as a draft worker runs them.",
    "The factors are speed-ups over plain decoding by batch (sequences at once), each with its best γ; below "
    f"{MIN_GAIN:.2f}× a source is not worth it. A draft worker drafts while the target verifies. A head beside the "
    "target runs in turn with its steps. Lookup takes no time and is on beside every other source, but is counted only "
    "in its own row. Of sources that differ by less than 10 % the one that needs least is recommended.",
)
"""Explains every word of the tables."""


def acceptance_table(found: Comparison) -> Table:
    """Table of τ by γ, and of the time of a pass, for every source."""
    longest = max((each.num_hints for judged in found.judged for each in judged.acceptance), default=0)
    shown = [count for count in _SHOWN_NUM_HINTS if count <= longest]
    made = Table(title="Tokens a step (τ) by γ", title_style="bold")
    made.add_column("source")
    for heading in (*map(str, shown), "ms", f"{_ROWS} rows"):
        made.add_column(heading, justify="right", no_wrap=True)
    for judged in found.judged:
        source = judged.source
        lengths = {each.num_hints: f"{each.mean_length:.2f}" for each in judged.acceptance}
        times = ("-", "-") if source.profile is None else _pass_times(judged)
        name = f"{source.name}, {source.place}" if source.offer.kind is Kind.EAGLE3 else source.name
        made.add_row(name, *(lengths.get(count, "") for count in shown), *times)
    return made


def _pass_times(judged: Judged) -> tuple[str, str]:
    assert judged.source.profile is not None
    times = judged.source.profile.times
    return f"{times.at(1):.2f}", f"{times.at(_ROWS):.2f}"


def ranking_table(found: Comparison) -> Table:
    """Table of the predictions, the best source at the smallest batch first."""
    made = Table(title="Predicted over plain decoding, by batch", title_style="bold")
    made.add_column("source")
    made.add_column("runs on")
    for each in found.judged[0].forecasts:
        made.add_column(str(each.batch), justify="right", no_wrap=True)
    for judged in found.judged:
        cells = [
            Text(f"{each.speedup:.2f}×") if each.num_speculative_tokens else Text(f"{each.highest:.2f}×", "dim")
            for each in judged.forecasts
        ]
        is_best = judged is found.best
        made.add_row(judged.source.name, judged.source.place.value, *cells, style="bold" if is_best else "")
    return made


def verdict(found: Comparison) -> list[str]:
    """The recommendation in a sentence, and another one where the largest batch wants another source."""
    best = found.best
    if best is None:
        highest = max(each.highest for judged in found.judged for each in judged.forecasts)
        return [
            f"Do not speculate here: no source gives more than {highest:.2f}×; from {MIN_GAIN:.2f}× on it would pay.",
            f"The target is {bound_words(found.target_profile)}.",
        ]
    paying = [each for each in best.forecasts if each.num_speculative_tokens]
    shown = paying if len(paying) == 1 else [paying[0], paying[-1]]
    gains = " and ".join(
        f"{each.speedup:.2f}× at batch {each.batch} with γ = {each.num_speculative_tokens}" for each in shown
    )
    lines = [f"Use {_in_words(best)}: about {gains}.", f"The target is {bound_words(found.target_profile)}."]
    last = best_at(found.judged, -1)
    if last is not None and last.forecasts[-1].speedup > best.forecasts[-1].speedup * (1.0 + NOISE):
        each = last.forecasts[-1]
        lines.append(
            f"At batch {each.batch} {_in_words(last)} is better: {each.speedup:.2f}× with γ = "
            f"{each.num_speculative_tokens}."
        )
    return lines


def _in_words(judged: Judged) -> str:
    source = judged.source
    if source.place is Place.TARGET:
        return "lookup alone"
    where = "on a draft worker" if source.place is Place.DRAFT_WORKER else "beside the target's model"
    if source.num_masks is not None:
        masks = f"{source.num_masks or 'no'} mask token{'' if source.num_masks == 1 else 's'}"
        return f"{source.offer.name} with {masks} {where}"
    if source.offer.kind is Kind.EARLY_EXIT:
        return (
            f"the target's first {source.offer.num_layers} layer{'' if source.offer.num_layers == 1 else 's'} {where}"
        )
    if source.offer.kind is Kind.MTP:
        return f"the target's {source.offer.kind.value} {where}"
    return f"{source.offer.name} ({source.offer.kind.value}) {where}"


def caption(found: Comparison) -> str:
    """Machine, settings and amount of data behind the figures."""
    settings = found.settings
    return (
        f"{found.machine}; {settings.num_threads} thread{'' if settings.num_threads == 1 else 's'} of the target, "
        f"{settings.dtype}, {found.target_profile.context_len} tokens of context, {found.num_texts} prompts, "
        f"{found.num_tokens} greedy tokens; a step of the target takes {found.target_profile.times.at(1):.2f} ms, "
        f"overhead {found.overheads.plain_ms:.2f} ms"
    )


def warnings(found: Comparison) -> list[str]:
    """Warnings about why these figures may be wrong."""
    made = []
    profiles = {"target": found.target_profile}
    for judged in found.judged:
        if judged.source.profile is not None:
            profiles[judged.source.offer.name] = judged.source.profile
    for name, profile in profiles.items():
        if profile.spread > SPREAD_MAX:
            made.append(f"the steps of {name} differ by ±{profile.spread:.0%} (middle 50 %): is the machine busy?")
    if found.num_texts < found.num_prompts:
        made.append(f"{found.num_texts} of {found.num_prompts} prompts within --budget-s")
    if found.num_tokens < MIN_TOKENS:
        made.append(f"only {found.num_tokens} tokens were compared; more --prompts make acceptance more certain")
    for judged in found.judged:
        if judged.source.num_tokens < found.num_tokens:
            made.append(
                f"{judged.source.name} ({judged.source.place}) was compared with {judged.source.num_tokens} of "
                f"{found.num_tokens} tokens: raise --budget-s"
            )
    return made
