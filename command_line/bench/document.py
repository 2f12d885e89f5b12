"""A run as one JSON object: times in milliseconds, rates per second, names as in the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from command_line.bench.cells import Cell, TurnResult
from command_line.bench.run import Run
from command_line.load.summary import MS_PER_S, RequestResult
from command_line.report import rounded
from outrider import __version__
from outrider.engine.loading.machine import hardware


def document(run: Run, found: Sequence[Cell], *, has_requests: bool, is_cut_short: bool) -> dict[str, Any]:
    """The whole run except the API key. `has_requests` adds a row per request; `is_cut_short`: some turns are
    missing."""
    plan, asked = run.plan, run.workload
    return {
        "outrider": __version__,
        "began_at": run.began_at,
        "client_machine": hardware(),
        "is_cut_short": is_cut_short,
        "servers": [asdict(server) for server in run.servers],
        "load": {
            "levels": [{level.loop.value: level.value} for level in plan.levels],
            "num_rounds": plan.num_rounds,
            "num_requests": [plan.num_requests_at(level) for level in plan.levels],
            "duration_s": plan.duration_s,
            "num_warmup": [plan.num_warmup_at(level) for level in plan.levels],
            "timeout_s": run.timeout_s,
        },
        "workload": {**asdict(asked), "prompts": len(asked.prompts)},
        "slo": asdict(run.slo),
        "results": rounded([_cell(cell, has_requests=has_requests) for cell in found]),
    }


def _cell(cell: Cell, *, has_requests: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "server": cell.server,
        "level": {cell.level.loop.value: cell.level.value},
        **asdict(cell.summary),
        "over_rounds": {name: asdict(each) if each else None for name, each in cell.over_rounds.items()},
        "output_tokens_per_s_against_first": asdict(cell.against_first) if cell.against_first else None,
        "client": {
            "cpu_share_max": cell.client_cpu_share,
            "stall_ms_max": cell.client_stall_ms_max,
            "late_ms_max": cell.late_ms_max,
        },
        "rounds": [asdict(each) for each in cell.rounds],
    }
    if has_requests:
        made["requests"] = [_row(turn, result) for turn in cell.turns for result in turn.results]
    return made


def _row(turn: TurnResult, result: RequestResult) -> dict[str, Any]:
    """One request as JSON; `sent_ms` counts from the turn's first request."""
    began_s = min(each.sent_s for each in turn.results)
    return {
        "round": turn.turn.number,
        "index": result.index,
        "sent_ms": _ms(result.sent_s - began_s),
        "ttft_ms": _ms(result.ttft_s),
        "tpot_ms": _ms(result.tpot_s),
        "e2el_ms": _ms(result.e2el_s),
        "itl_ms": [_ms(gap) for gap in result.itl_s],
        "num_output_tokens": result.num_output_tokens,
        "is_counted_by_usage": result.is_counted_by_usage,
        "mean_acceptance_length": result.mean_acceptance_length,
        "late_ms": _ms(result.late_s),
        "cause": result.cause,
        "detail": result.detail,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * MS_PER_S
