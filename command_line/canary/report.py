"""Report on a canary, for people and as JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.canary.intervals import Interval, difference_interval, ratio_interval, share_interval
from outrider.canary.plan import ArmName, Canary, CanaryState
from outrider.canary.rule import Judgement, Standing, Verdict, judge
from outrider.canary.statistics import ArmStatistics, Count, Figure, Loss
from outrider.canary.store import CanaryView

CONFIDENCE: Final = 0.95
QUANTILES: Final = (0.5, 0.99)
EXIT_PROMOTE, EXIT_CONTINUE, EXIT_ABORT, EXIT_NONE = 0, 3, 4, 5
_STYLES: Final = {Standing.PASSED: "green", Standing.OPEN: "yellow", Standing.BROKEN: "bold red"}
_DECIDED: Final = {CanaryState.PROMOTED: EXIT_PROMOTE, CanaryState.ABORTED: EXIT_ABORT}
_RECOMMENDED: Final = {
    Verdict.PROMOTE: EXIT_PROMOTE, Verdict.CONTINUE: EXIT_CONTINUE, Verdict.ABORT: EXIT_ABORT,
}  # fmt: skip


def judgement_of(view: CanaryView, canary: Canary) -> Judgement:
    """Judgement of the rule for this view, also for a canary that was decided by a person."""
    is_out_of_time = canary.state is CanaryState.RUNNING and view.clock_ms >= canary.ends_ms
    return judge(canary.plan, view.arms, is_out_of_time=is_out_of_time)


def exit_status(view: CanaryView) -> int:
    """Exit status: 0 promoted, or to be; 3 undecided; 4 aborted, or to be; 5 there is none."""
    canary = view.canary
    if canary is None:
        return EXIT_NONE
    if canary.state in _DECIDED:
        return _DECIDED[canary.state]
    return EXIT_ABORT if canary.has_ended(view.clock_ms) else _RECOMMENDED[judgement_of(view, canary).verdict]


def as_dict(view: CanaryView) -> dict[str, Any]:
    """The report as JSON: times in milliseconds, shares from 0 to 1, intervals at 95 %; null if unknown."""
    canary = view.canary
    if canary is None:
        return {"canary": None}
    judgement = judgement_of(view, canary)
    control, other = view.arms[ArmName.CONTROL], view.arms[ArmName.CANARY]
    return {
        "canary": {
            **canary.plan.model_dump(mode="json"),
            "state": canary.state,
            "share_now": canary.share_at(view.clock_ms),
            "seconds_left": seconds_left(view, canary),
            "reason": canary.reason,
        },
        "arms": {arm: _arm_as_dict(view.arms[arm]) for arm in ArmName},
        "differences": {
            f"{figure}_ms": {
                "mean": mean.value - base.value,
                "interval": _pair(difference_interval(mean, base, CONFIDENCE)),
            }
            for figure in Figure
            for mean, base in [(other.mean(figure), control.mean(figure))]
            if mean.whole and base.whole
        },
        "verdict": judgement.verdict,
        "guards": [asdict(guard) for guard in judgement.guards],
    }


def seconds_left(view: CanaryView, canary: Canary) -> float | None:
    """Seconds until the time limit; None once it is decided."""
    if canary.state in _DECIDED:
        return None
    return max(canary.ends_ms - view.clock_ms, 0) / 1000


def _arm_as_dict(arm: ArmStatistics) -> dict[str, Any]:
    return {
        "requests": {"ended": arm.num_ended} | {what: arm.num(what) for what in Count},
        **{f"{figure}_ms": _figure_as_dict(arm, figure) for figure in Figure},
        "draft_acceptance_rate": {
            "value": arm.draft_acceptance_rate,
            "interval": _pair(arm.draft_acceptance_interval(CONFIDENCE)),
        },
        "failure_rate": _loss_as_dict(arm, Loss.FAILURES),
        "departure_rate": _loss_as_dict(arm, Loss.DEPARTURES),
    }


def _loss_as_dict(arm: ArmStatistics, loss: Loss) -> dict[str, Any]:
    return {
        "value": arm.loss_rate(loss) if arm.num_judged else None,
        "interval": _pair(share_interval(arm.num_lost(loss), arm.num_judged, CONFIDENCE)),
    }


def _figure_as_dict(arm: ArmStatistics, figure: Figure) -> dict[str, Any]:
    found = arm.mean(figure)
    mean = {
        "value": found.value if found.whole else None,
        "interval": _pair(ratio_interval(found, CONFIDENCE)),
    }
    quantiles = {
        f"p{share * 100:g}": {
            "value": arm.quantile(figure, share),
            "interval": _pair(arm.quantile_interval(figure, share, CONFIDENCE)),
        }
        for share in QUANTILES
    }
    return {"num": round(found.whole), "mean": mean, **quantiles}


def _pair(interval: Interval) -> list[float | None]:
    return [interval.low, interval.high]


def page(view: CanaryView) -> RenderableType:
    """Both arms side by side, the rule's decision, and the time left."""
    canary = view.canary
    if canary is None:
        return Text("There is no canary. `outrider canary start --help` tells how to begin one.")
    found, judgement = as_dict(view), judgement_of(view, canary)
    lines: list[RenderableType] = [_headline(view, canary), _table(found)]
    lines += [
        Text.assemble((f"  {guard.standing:7}", _STYLES[guard.standing]), f" {guard.name}: {guard.text}")
        for guard in judgement.guards
    ]
    return Group(*lines, _bottom_line(view, canary, judgement))


def _headline(view: CanaryView, canary: Canary) -> Text:
    plan = canary.plan
    mode = "acts as the rule says" if plan.is_automatic else "recommends"
    of_model = f" of {plan.model}" if plan.model else ""
    text = f"Canary {plan.canary_id}{of_model}: {plan.change}, {plan.share:.1%} of the keys, {canary.state}"
    if canary.state in _DECIDED:
        return Text.assemble((text, "bold"), f" ({canary.reason})" if canary.reason else "")
    if canary.has_ended(view.clock_ms):
        return Text.assemble((text, "bold"), ", its time is over")
    if canary.state is CanaryState.WAITING:
        rest = f", for a draft worker of {plan.change.draft_model}"
    elif not canary.is_open(view.clock_ms):
        rest = f", begins in {(canary.begins_ms - view.clock_ms) / 1000:.0f} s"
    else:
        rest = ""
    left = seconds_left(view, canary) or 0.0
    return Text.assemble((text, "bold"), f"{rest}; {in_words(left)} left; {mode}")


def _bottom_line(view: CanaryView, canary: Canary, judgement: Judgement) -> Text:
    if canary.state is CanaryState.PROMOTED:
        text = "Promoted: all traffic has it. Set the processes' flags to match, then `outrider canary clear`."
        return Text(text, "bold green")
    if canary.has_ended(view.clock_ms):
        name = canary.plan.change.draft_model
        kept = f" Draft workers of {name} are nobody's until `outrider canary clear`." if name else ""
        return Text(f"Ended: everybody is back at control.{kept}", "bold")
    match judgement.verdict:
        case Verdict.PROMOTE:
            return Text("Recommended: promote (`outrider canary promote`)", "bold green")
        case Verdict.CONTINUE:
            return Text(f"It goes on ({judgement.reason})", "yellow")
        case Verdict.ABORT:
            return Text(f"Recommended: abort ({judgement.reason})", "bold red")


def _table(found: dict[str, Any]) -> Table:
    table = Table(caption="means, quantiles and shares with their 95 % intervals", caption_style="dim")
    for name in ("", "control", "canary", "difference"):
        table.add_column(name, justify="right" if name else "left")
    arms = [found["arms"][arm] for arm in ArmName]
    table.add_row("requests ended", *(f"{arm['requests']['ended']:,}" for arm in arms), "")
    for what in (Count.FAILED, Count.LATE, Count.LEFT, Count.REFUSED):
        table.add_row(f"  {what}", *(f"{arm['requests'][what]:,}" for arm in arms), "")
    for figure, label in ((Figure.TTFT, "TTFT"), (Figure.TPOT, "TPOT"), (Figure.E2E, "end to end")):
        name = f"{figure}_ms"
        for part in ("mean", "p50", "p99"):
            cells = [_cell(arm[name][part], " ms") for arm in arms]
            difference = found["differences"].get(name) if part == "mean" else None
            shown = "" if difference is None else _cell(_renamed(difference), " ms", sign="+")
            table.add_row(f"{label} {part}", *cells, shown)
    for name, label in (
        ("draft_acceptance_rate", "acceptance"), ("failure_rate", "failures"), ("departure_rate", "departures"),
    ):  # fmt: skip
        table.add_row(label, *(_cell(arm[name], "%") for arm in arms), "")
    counts = arms[1]["requests"]
    table.add_row("audits that diverge", "", f"{counts[Count.DIVERGED]} of {counts[Count.AUDITED]}", "")
    table.add_row("in the sample, not audited", "", f"{counts[Count.UNAUDITED]}", "")
    return table


def _renamed(difference: dict[str, Any]) -> dict[str, Any]:
    return {"value": difference["mean"], "interval": difference["interval"]}


def _cell(found: dict[str, Any], unit: str, sign: str = "") -> str:
    """A value and its interval, to three digits."""
    value, (low, high) = found["value"], found["interval"]
    if value is None:
        return "-"
    scale = 100.0 if unit == "%" else 1.0
    ends = ["?" if end is None else _number(scale * end, sign) for end in (low, high)]
    return f"{_number(scale * value, sign)}{unit} [{ends[0]}, {ends[1]}]"


def _number(value: float, sign: str) -> str:
    return f"{value:{sign},.0f}" if abs(value) >= 999.5 else f"{value:{sign}.3g}"


def in_words(seconds: float) -> str:
    """A duration in words, such as 90 s, 12 min, 5.5 h."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
