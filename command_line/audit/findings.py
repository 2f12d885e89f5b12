"""Findings of an audit for each request, and the same as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from command_line.audit.requests import AuditRequest, ReplayWay
from outrider.audit import Divergence, HintCounts, Margin, Run, Verdict, exit_code, worst


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Tokens around a divergence, decoded by the server."""

    before: str  # the last tokens that both runs share, with the prompt's end
    plain: str  # from the divergence on
    speculated: str
    tokens: dict[int, str]  # by token id


@dataclass(slots=True)
class Finding:
    """Comparison of one speculated run with the plain one. The later fields are set only if they differ."""

    number: int  # number of the run, from 1
    run: Run
    verdict: Verdict
    divergence: Divergence | None = None
    way: ReplayWay | None = None
    replay_token_id: int | None = None  # plain decoding's token in the replay; None: nothing
    agrees_with_replay: bool = False  # whether speculation generated the same token
    margins: dict[str, Margin | None] = field(default_factory=dict)  # by distribution: processed, raw
    ranked: list[tuple[int, float]] = field(default_factory=list)  # most likely tokens there, processed
    surroundings: Surroundings | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class RequestReport:
    """Findings about one request."""

    request: AuditRequest
    plain: Run | None = None
    findings: list[Finding] = field(default_factory=list)
    message: str = ""  # the error that ended its audit

    @property
    def verdict(self) -> Verdict:
        failed = [Verdict.FAILED] if self.message else []
        return worst([*failed, *(finding.verdict for finding in self.findings)])

    @property
    def hints(self) -> HintCounts:
        """Hint counts of all its speculated runs."""
        return HintCounts.total(finding.run.hints for finding in self.findings)


def num_verified(reports: Sequence[RequestReport]) -> int:
    """Hints verified in all speculated runs; 0 means that the audit proved little."""
    return sum(report.hints.num_draft_tokens for report in reports)


def as_dict(reports: Sequence[RequestReport], *, is_speculation_required: bool) -> dict[str, Any]:
    """The report as JSON. Log probabilities are in nats; -9999 stands for an impossible token."""
    verdicts = [report.verdict for report in reports]
    return {
        "verdict": worst(verdicts).value,
        "exit_code": exit_code(verdicts, is_unproven=is_speculation_required and not num_verified(reports)),
        "num_requests": len(reports),
        "verdicts": {verdict.value: verdicts.count(verdict) for verdict in Verdict},
        "has_speculated": num_verified(reports) > 0,
        **_hints(HintCounts.total(report.hints for report in reports)),
        "requests": [_request(report) for report in reports],
    }


def _hints(hints: HintCounts) -> dict[str, Any]:
    return {
        **asdict(hints),
        "draft_acceptance_rate": hints.draft_acceptance_rate,
        "mean_acceptance_length": hints.mean_acceptance_length,
    }


def _request(report: RequestReport) -> dict[str, Any]:
    plain = report.plain
    return {
        "name": report.request.name,
        "path": report.request.path,
        "changes": list(report.request.changes),
        "verdict": report.verdict.value,
        "error": report.message or None,
        "decoding_mode": plain.decoding_mode if plain else None,
        "exactness": (plain.exactness or None) if plain else None,
        "num_prompt_tokens": len(plain.prompt_token_ids) if plain else None,
        "num_output_tokens": len(plain.token_ids) if plain else None,
        "num_forced_tokens": plain.num_forced_tokens if plain else None,
        **_hints(report.hints),
        "runs": [_finding(finding) for finding in report.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    found: dict[str, Any] = {"verdict": finding.verdict.value, **_hints(finding.run.hints)}
    divergence = finding.divergence
    if divergence is None:
        return {**found, "divergence": None}
    around, is_unknown = finding.surroundings, finding.verdict is Verdict.FAILED
    return {
        **found,
        "divergence": {
            **asdict(divergence),
            "replay": None if finding.way is None else finding.way.value,
            "replay_token_id": finding.replay_token_id,
            "is_plain_reproduced": None if is_unknown else finding.verdict is Verdict.DIVERGED,
            "margins": {
                name: None if margin is None else {**asdict(margin), "nats": margin.nats}
                for name, margin in finding.margins.items()
            },
            "likeliest": [{"token_id": each, "logprob": at} for each, at in finding.ranked],
            "text": None if around is None else {
                "before": around.before, "plain": around.plain, "speculated": around.speculated,
            },
            "notes": finding.notes,
        },
    }  # fmt: skip
