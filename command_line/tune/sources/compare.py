"""Compares all sources of hints that the folders offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from command_line.progress import Progress
from command_line.tune.advice import Advice, advise
from command_line.tune.agreement import acceptances
from command_line.tune.sources.comparison import Comparison, Judged, ranked
from command_line.tune.sources.forecasts import Place, Source, forecast
from command_line.tune.sources.measuring import Plan, TargetFacts, measure_sources, measure_target
from command_line.tune.sources.offers import Offer
from outrider.errors import InvalidRequest


def measure(
    target: Path, offered: Sequence[Offer], prompts: Sequence[Sequence[int]], plan: Plan, progress: Progress
) -> tuple[TargetFacts, list[Source]]:
    """Runs the target and all sources. Raises OutriderError."""
    facts = measure_target(target, offered, prompts, plan, progress)
    sources = measure_sources(facts, offered, plan, progress)
    for source in sources:
        if source.usable_num_hints(plan.num_hints_max) < 1:
            raise InvalidRequest(
                "prompts",
                f"too few tokens to compare {source.name} with: the answers end at once, or --budget-s is too short",
            )
    return facts, sources


def compare(
    facts: TargetFacts,
    sources: Sequence[Source],
    batches: Sequence[int],
    plan: Plan,
    machine: str,
    num_prompts: int,
) -> Comparison:
    """Predicts every source at every batch size, and ranks them. machine: hardware in words."""
    judged = ranked([judge(source, batches, plan.num_hints_max) for source in sources])
    found = Comparison(
        facts.folder,
        plan.settings,
        machine,
        facts.profile,
        plan.overheads,
        judged,
        (),
        len(facts.texts),
        sum(len(text.token_ids) for text in facts.texts),
        num_prompts,
    )
    return found if found.best is None else _advised(found, found.best, plan)


def judge(source: Source, batches: Sequence[int], num_hints_max: int) -> Judged:
    """A source's acceptance, and its forecasts by batch size."""
    forecasts = tuple(forecast(source, batch, num_hints_max) for batch in batches)
    return Judged(source, acceptances(source.pair.texts, source.usable_num_hints(num_hints_max)), forecasts)


def _advised(found: Comparison, best: Judged, plan: Plan) -> Comparison:
    """Adds the advice on draft workers to a comparison whose best source runs on them."""
    if best.source.place is not Place.DRAFT_WORKER:
        return found
    batches = [each.batch for each in best.forecasts if each.num_speculative_tokens]
    advice: tuple[Advice, ...] = tuple(advise(best.source.pair, batch, plan.num_hints_max) for batch in batches)
    return replace(found, advice=advice)
