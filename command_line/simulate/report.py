"""Tables and warnings of a simulation, for people. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from command_line.report import figure

if TYPE_CHECKING:
    from command_line.load.summary import Percentiles
    from command_line.simulator.fleet import Fleet
    from command_line.simulator.world import Outcome

NUM_ENDED_FEW = 100
COORDINATOR_FULL = 0.8
"""Share of a coordinator replica's time above which its streams wait for it."""
STEP_US = 200.0
"""Processor time of a coordinator per step and stream in µs, as measured (`python -m benchmarks coordinator_load`)."""
US_PER_S = 1e6
GROWTH = 1.2
"""Factor by which the requests in flight may grow during the measurement. A fleet with more does not keep up."""


def table(outcomes: Sequence[Outcome]) -> Table:
    """Table with a column per outcome."""
    made = Table(title="Predicted", title_style="bold")
    made.add_column("", no_wrap=True)
    for outcome in outcomes:
        made.add_column(Text(_name(outcome)), justify="right")
    first = outcomes[0]
    columns = [_figures(outcome, first) for outcome in outcomes]
    for label in columns[0]:
        shown = [column[label] for column in columns]
        if any(each != "-" for each in shown):
            made.add_row(label, *shown)
    return made


def ratios_table(outcomes: Sequence[Outcome], best: Outcome) -> Table:
    """Table with a row per ratio, all at the same price."""
    made = Table(
        title="Predicted for the same money",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for title in ("drafts", "targets", "tokens/s", "", "TTFT, ms", "TPOT, ms", "E2EL, ms", "τ", "busy, %"):
        made.add_column(title, justify="right", no_wrap=True)
    for outcome in outcomes:
        figures = _figures(outcome, outcomes[0])
        latencies = (figures[f"{name}, ms"].replace(" ", "") for name in ("TTFT", "TPOT", "E2EL"))
        made.add_row(
            f"{outcome.num_drafts}",
            f"{outcome.num_targets}",
            figures["output tokens/s"],
            figures["  against the first"],
            *latencies,
            figures["acceptance length τ"],
            f"{figures['drafts busy']}, {figures['targets busy']}".replace("%", ""),
            style="bold" if outcome is best else "",
        )
    return made


def _name(outcome: Outcome) -> str:
    workers = f"{outcome.num_targets} targets"
    return f"{workers}\n{outcome.num_drafts} drafts" if outcome.num_drafts else f"{workers}\nplain"


def _figures(outcome: Outcome, first: Outcome) -> dict[str, str]:
    against = outcome.tokens_per_s / first.tokens_per_s if first.tokens_per_s else None
    return {
        "output tokens/s": f"{outcome.tokens_per_s:.0f}",
        "  against the first": "-" if outcome is first or against is None else f"{against:.2f}×",
        "requests/s": f"{outcome.requests_per_s:.2f}",
        "TTFT, ms": _percentiles(outcome.ttft_ms, 0),
        "TPOT, ms": _percentiles(outcome.tpot_ms, 1),
        "E2EL, ms": _percentiles(outcome.e2el_ms, 0),
        "queue, ms": _percentiles(outcome.queue_ms, 0),
        "draft acceptance rate": figure(outcome.draft_acceptance_rate, "{:.0%}"),
        "acceptance length τ": figure(outcome.mean_acceptance_length, "{:.2f}"),
        "targets busy": figure(outcome.target_utilisation, "{:.0%}"),
        "drafts busy": figure(outcome.draft_utilisation, "{:.0%}"),
        "coordinators busy": figure(outcome.coordinator_utilisation, "{:.0%}"),
        "sessions a step": figure(outcome.mean_batch, "{:.1f}"),
        "step, ms": figure(outcome.mean_step_ms, "{:.1f}"),
        "requests ended": f"{outcome.num_ended}",
        "refused": f"{outcome.num_refused}" if outcome.num_refused else "-",
    }


def _percentiles(found: Percentiles | None, digits: int) -> str:
    return "-" if found is None else found.shown(digits)


def caption(fleet: Fleet, outcomes: Sequence[Outcome]) -> str:
    traffic = fleet.traffic
    load = f"{fleet.concurrency} at once" if traffic.rate is None else f"{traffic.rate:g} requests/s, Poisson"
    wall_s = sum(outcome.wall_s for outcome in outcomes)
    return (
        f"{load}, {traffic.seconds:g} s after {traffic.warmup_s:g} s of warm-up, seed {fleet.seed}; "
        f"latencies are p50 / p90 / p99; simulated in {wall_s:.1f} s"
    )


def verdict(best: Outcome) -> str:
    """The best of the ratios, in words."""
    if not best.num_drafts:
        return f"best: no draft workers ({best.num_targets} targets)"
    per_target = best.num_targets / best.num_drafts
    ratio = f"1 : {per_target:.3g}" if per_target >= 1.0 else f"{1.0 / per_target:.3g} : 1"
    return f"best draft : target ratio: {ratio} ({best.num_drafts} drafts, {best.num_targets} targets)"


def warnings(fleet: Fleet, outcomes: Sequence[Outcome]) -> list[str]:
    """Warnings about why these figures may be wrong."""
    found = []
    for outcome in outcomes:
        name = _name(outcome).replace("\n", ", ")
        before, after = outcome.num_under_way
        if outcome.num_ended < NUM_ENDED_FEW:
            found.append(f"{name}: only {outcome.num_ended} requests ended; raise --seconds")
        if fleet.traffic.rate is not None and after > GROWTH * before + 10:
            found.append(
                f"{name}: more requests come than end ({before} in flight at first, {after} at last); latencies "
                "grow as long as this lasts"
            )
        found += _coordinator_warnings(name, fleet, outcome)
        if outcome.num_refused:
            found.append(f"{name}: {outcome.num_refused} requests were refused: no slot in time")
    return found


def _coordinator_warnings(name: str, fleet: Fleet, outcome: Outcome) -> list[str]:
    steps_per_s, num_replicas = outcome.coordinator_steps_per_s, fleet.network.coordinators
    if fleet.network.step_us:
        if (outcome.coordinator_utilisation or 0.0) <= COORDINATOR_FULL:
            return []
        return [
            f"{name}: a coordinator is busy for {outcome.coordinator_utilisation:.0%} of the time, so that steps wait; "
            "raise [network] coordinators"
        ]
    num_needed = math.ceil(steps_per_s * STEP_US / US_PER_S / COORDINATOR_FULL)
    if num_needed <= num_replicas:
        return []
    return [
        f"{name}: {steps_per_s:.0f} steps of all streams a second need about {num_needed} coordinator replicas, at "
        f"{STEP_US:.0f} µs of a processor each; this has {num_replicas}, and step_us = 0 lets none of them wait"
    ]


def as_dict(fleet: Fleet, outcomes: Sequence[Outcome], best: Outcome | None) -> dict[str, Any]:
    """The outcomes as JSON: milliseconds, seconds, shares from 0 to 1."""
    return {
        "fleet": asdict(fleet) | {"texts": len(fleet.texts)},
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "best": None if best is None else {"targets": best.num_targets, "drafts": best.num_drafts},
        "warnings": warnings(fleet, outcomes),
    }
