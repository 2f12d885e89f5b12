"""Report of an audit for people: a table, and lines about every problem. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from command_line.audit.findings import Finding, RequestReport
from command_line.audit.requests import ReplayWay
from command_line.report import figure
from outrider.audit import ROUNDING_NATS, Divergence, Run, Verdict

_STYLES: Final = {
    Verdict.IDENTICAL: "green",
    Verdict.DIVERGED: "bold red",
    Verdict.UNSTABLE: "bold magenta",
    Verdict.FAILED: "red",
    Verdict.INEXACT: "yellow",
}
_WAYS: Final = {
    ReplayWay.PREFIX: "prompt and common output as the prompt",
    ReplayWay.PARTIAL: "the request again up to this position",
    ReplayWay.WHOLE: "the whole request again",
}


def table(reports: Sequence[RequestReport], caption: str) -> Table:
    """Table with one row per request."""
    made = Table(title="Audit: the same requests plain and with speculation", caption=caption)
    made.add_column("request")
    made.add_column("ends in")
    made.add_column("mode", no_wrap=True)
    for column in ("tokens", "runs", "hints", "accepted", "tokens a step"):
        made.add_column(column, justify="right")
    # This word must stay readable on any terminal.
    made.add_column("verdict", no_wrap=True, min_width=max(len(_shown(verdict)) for verdict in Verdict))
    for report in reports:
        plain, hints, verdict = report.plain, report.hints, report.verdict
        made.add_row(
            Text(report.request.name),
            Text(report.request.excerpt, "dim"),
            plain.decoding_mode if plain else "",
            str(len(plain.token_ids)) if plain else "",
            str(len(report.findings)),
            str(hints.num_draft_tokens),
            figure(hints.draft_acceptance_rate, "{:.0%}"),
            figure(hints.mean_acceptance_length, "{:.2f}"),
            Text(_shown(verdict), _STYLES[verdict]),
        )
    return made


def _shown(verdict: Verdict) -> str:
    return verdict.value if verdict is Verdict.IDENTICAL else verdict.value.upper()


def details(report: RequestReport) -> list[Text]:
    """Lines about every problem; none for a request whose runs are identical."""
    lines: list[Text] = []
    for finding in report.findings:
        if finding.divergence is not None and report.plain is not None:
            lines += _divergence(report, report.plain, finding, finding.divergence)
    if report.message:
        lines.append(Text.assemble((f"{report.request.name}: FAILED ", "red"), report.message))
    if report.plain is not None and report.plain.num_forced_tokens:
        lines.append(
            Text(
                f"{report.request.name}: the plain run was fed {report.plain.num_forced_tokens} tokens ahead that "
                "its grammar forces; as a reference it is not strictly plain",
                "yellow",
            )
        )
    return lines


def _divergence(report: RequestReport, plain: Run, finding: Finding, divergence: Divergence) -> list[Text]:
    position = divergence.position
    lines = [
        Text.assemble(
            (
                f"{report.request.name}, run {finding.number}: {_shown(finding.verdict)}",
                _STYLES[finding.verdict],
            ),
            f" at output position {position}, after {len(plain.prompt_token_ids)} tokens of prompt",
        )
    ]
    tokens = finding.surroundings.tokens if finding.surroundings else {}
    if divergence.plain_token_id is None and divergence.speculated_token_id is None:
        lines.append(
            Text(
                f"  the tokens agree; the end does not: plain {plain.finish_reason!r}, speculation "
                f"{finding.run.finish_reason!r}, text {'equal' if plain.content == finding.run.content else 'unequal'}"
            )
        )
    else:
        lines.append(Text(f"  plain       {_token(divergence.plain_token_id, plain, tokens)}"))
        lines.append(Text(f"  speculation {_token(divergence.speculated_token_id, finding.run, tokens)}"))
        lines += [Text(f"  {line}") for line in _margin_lines(finding, plain.decoding_mode)]
    if finding.ranked:
        likeliest = ", ".join(f"{_token(each, plain, tokens)} {at:.3f}" for each, at in finding.ranked)
        lines.append(Text(f"  likeliest   {likeliest}", "dim"))
    lines.append(Text(f"  replay      {_replay(finding, tokens)}"))
    if finding.surroundings is not None:
        around = finding.surroundings
        lines.append(Text.assemble(("  text        ", ""), (f"…{around.before!r}", "dim")))
        lines.append(Text(f"       plain  … {around.plain!r}"))
        lines.append(Text(f"  speculation … {around.speculated!r}"))
    return lines + [Text(f"  note        {note}", "yellow") for note in finding.notes]


def _token(token_id: int | None, run: Run, tokens: Mapping[int, str]) -> str:
    if token_id is None:
        return f"had ended ({run.finish_reason})"
    return f"{token_id} {tokens[token_id]!r}" if token_id in tokens else str(token_id)


def _margin_lines(finding: Finding, decoding_mode: str) -> list[str]:
    """Log probabilities of both tokens, their difference and how to read it."""
    lines = []
    for name, margin in finding.margins.items():
        if margin is None:
            continue
        if margin.is_ruled_out:
            between = "the parameters rule speculation's token out"
        else:
            at_least = "at least " if margin.is_bound else ""
            between = f"margin {at_least}{margin.nats:.3f} nats"
        at_most = "below " if margin.is_bound else ""
        lines.append(
            f"{name:<11} log probability plain {margin.plain_logprob:.3f}, speculation "
            f"{at_most}{margin.speculated_logprob:.3f}: {between}"
        )
    if not lines:
        return ["margin      unknown: the server shows no log probabilities for both tokens there"]
    processed = finding.margins.get("processed")
    if decoding_mode == "coupled":
        lines.append("            (of probabilities before noise; the seed's noise decides, so it may be negative)")
    elif processed is not None and not processed.is_ruled_out:
        meaning = (
            "so close, it may be rounding: suspect batch invariance"
            if abs(processed.nats) < ROUNDING_NATS
            else "too far apart for rounding: suspect verification"
        )
        lines.append(f"            ({meaning})")
    return lines


def _replay(finding: Finding, tokens: Mapping[int, str]) -> str:
    if finding.way is None or finding.verdict is Verdict.FAILED:
        return "failed, so the cause is unknown"
    way = _WAYS[finding.way]
    if finding.verdict is Verdict.INEXACT:
        return f"the engine promises the distribution, and these tokens are nearly equally likely ({way})"
    if finding.verdict is Verdict.DIVERGED:
        return f"plain decoding repeats its token ({way}): speculation changed the output"
    said = "an end" if finding.replay_token_id is None else _token(finding.replay_token_id, finding.run, tokens)
    agreeing = "as speculation did" if finding.agrees_with_replay else "unlike either run"
    return (
        f"plain decoding contradicts itself: {said} this time, {agreeing} ({way}). The engine is not "
        "batch-invariant; speculation is not the cause"
    )


def changes(reports: Sequence[RequestReport]) -> list[str]:
    """Changes made to the requests, with the number of requests for each."""
    counts = Counter(change for report in reports for change in report.request.changes)
    return [f"{change} ({count} of {len(reports)} requests)" for change, count in counts.items()]
